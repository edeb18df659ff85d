"""Tool calls in DSML, the tagged format of DeepSeek V3.2: one element a call, one a parameter.

The arguments become JSON as they come: a parameter with `string="true"` is text and is escaped piece by piece; another one
is JSON already and is passed on once it is whole, as a string where it is no JSON after all.
"""

from __future__ import annotations

import json
from enum import Enum, auto

from mla_serve.server.parsers.events import CallArguments, CallName, Content, Event
from mla_serve.server.parsers.scanner import Scanner

SECTION = "<｜DSML｜function_calls>"
CALL, CALL_END = '<｜DSML｜invoke name="', "</｜DSML｜invoke>"
PARAMETER, PARAMETER_END = '<｜DSML｜parameter name="', "</｜DSML｜parameter>"
KIND, TAG_END = '" string="', '">'


class _At(Enum):
    TEXT = auto()
    BETWEEN = auto()
    NAME = auto()
    CALL = auto()  # in a call, outside a parameter
    PARAMETER = auto()
    KIND = auto()
    STRING = auto()
    VALUE = auto()


class DsmlCalls:
    """White space between elements is dropped, and so is all that follows the section."""

    def __init__(self) -> None:
        self._scanner = Scanner()
        self._at = _At.TEXT
        self._calls = 0
        self._parameters = 0

    @classmethod
    def markers(cls) -> tuple[str, ...]:
        """Special tokens that must not be skipped when ids become text."""
        return ("｜DSML｜",)

    def push(self, text: str) -> list[Event]:
        self._scanner.push(text)
        events: list[Event] = []
        while self._advance(events):
            pass
        return events

    def finish(self) -> list[Event]:
        """Unfinished arguments are given as far as they go."""
        held = self._scanner.rest()
        match self._at:
            case _At.TEXT if held:
                return [Content(held)]
            case _At.STRING if held:
                return [self._arguments(_escaped(held))]
            case _At.VALUE if held:
                return [self._arguments(held)]
            case _:
                return []

    def _arguments(self, text: str) -> CallArguments:
        return CallArguments(self._calls - 1, text)

    def _advance(self, events: list[Event]) -> bool:
        """One step; whether another may follow."""
        match self._at:
            case _At.TEXT:
                text, marker = self._scanner.take((SECTION,))
                if text:
                    events.append(Content(text))
                return self._go(marker, _At.BETWEEN)
            case _At.BETWEEN:
                return self._go(self._scanner.take((CALL,))[1], _At.NAME)
            case _At.NAME:
                whole = self._scanner.take_whole((TAG_END,))
                if whole is not None:
                    events.append(CallName(self._calls, whole[0]))
                    self._calls, self._parameters = self._calls + 1, 0
                return self._go(whole, _At.CALL)
            case _At.CALL:
                marker = self._scanner.take((PARAMETER, CALL_END))[1]
                if marker == CALL_END:
                    events.append(self._arguments("}" if self._parameters else "{}"))
                return self._go(marker, _At.PARAMETER if marker == PARAMETER else _At.BETWEEN)
            case _At.PARAMETER:
                whole = self._scanner.take_whole((KIND,))
                if whole is not None:
                    opening = ", " if self._parameters else "{"
                    events.append(self._arguments(f"{opening}{json.dumps(whole[0], ensure_ascii=False)}: "))
                    self._parameters += 1
                return self._go(whole, _At.KIND)
            case _At.KIND:
                whole = self._scanner.take_whole((TAG_END,))
                text_follows = whole is not None and whole[0] == "true"
                if text_follows:
                    events.append(self._arguments('"'))
                return self._go(whole, _At.STRING if text_follows else _At.VALUE)
            case _At.STRING:
                text, marker = self._scanner.take((PARAMETER_END,))
                if text:
                    events.append(self._arguments(_escaped(text)))
                if marker is not None:
                    events.append(self._arguments('"'))
                return self._go(marker, _At.CALL)
            case _At.VALUE:
                whole = self._scanner.take_whole((PARAMETER_END,))
                if whole is not None:
                    events.append(self._arguments(_as_json(whole[0])))
                return self._go(whole, _At.CALL)

    def _go(self, found: object, at: _At) -> bool:
        if found is None:
            return False
        self._at = at
        return True


def _escaped(text: str) -> str:
    """Text as it stands between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _as_json(text: str) -> str:
    try:
        json.loads(text)
    except ValueError:
        return json.dumps(text, ensure_ascii=False)
    return text.strip()
