"""Tool calls between special tokens: the formats of DeepSeek V3 and R1, DeepSeek V3.1, and Kimi K2.

All three have the same skeleton: a section, and in it calls of a head (the function's name) and a body (its arguments as
JSON). They differ in what the markers are called and in what the head says; each is documented by its model's chat template.
"""

from __future__ import annotations

import re
from enum import Enum, auto

from mla_serve.server.parsers.events import CallArguments, CallName, Content, Event
from mla_serve.server.parsers.scanner import Scanner


class _At(Enum):
    TEXT = auto()
    BETWEEN = auto()  # in the section, outside a call
    HEAD = auto()
    BODY = auto()


class TokenCalls:
    """The skeleton. White space between calls is dropped, and so is all that follows the section's end.

    A model may leave out the section's own markers; a call then begins one, and ends none.
    """

    section = ("", "")  # begin, end
    call = ("", "")
    separator = ""  # between head and body
    tails: tuple[str, ...] = ()  # other ends of a body, which take in what the format puts around it

    def __init__(self) -> None:
        self._scanner = Scanner()
        self._at = _At.TEXT
        self._calls = 0

    @classmethod
    def markers(cls) -> tuple[str, ...]:
        """Special tokens that must not be skipped when ids become text."""
        return (*cls.section, *cls.call)

    def head(self, text: str) -> tuple[str, str | None]:
        """Function name and call id."""
        return text.strip(), None

    def push(self, text: str) -> list[Event]:
        self._scanner.push(text)
        events: list[Event] = []
        while self._advance(events):
            pass
        return events

    def finish(self) -> list[Event]:
        """An unfinished head names no function and is dropped; unfinished arguments are given as far as they go."""
        held = self._scanner.rest()
        if not held or self._at in (_At.BETWEEN, _At.HEAD):
            return []
        return [Content(held) if self._at is _At.TEXT else CallArguments(self._calls - 1, held)]

    def _advance(self, events: list[Event]) -> bool:
        """One step; whether another may follow."""
        match self._at:
            case _At.TEXT:
                text, marker = self._scanner.take((self.section[0], self.call[0]))
                if text:
                    events.append(Content(text))
                if marker is None:
                    return False
                self._at = _At.BETWEEN if marker == self.section[0] else _At.HEAD
            case _At.BETWEEN:
                _, marker = self._scanner.take((self.call[0],))
                if marker is None:
                    return False
                self._at = _At.HEAD
            case _At.HEAD:
                whole = self._scanner.take_whole((self.separator,))
                if whole is None:
                    return False
                name, id_ = self.head(whole[0])
                events.append(CallName(self._calls, name, id_))
                self._calls += 1
                self._at = _At.BODY
            case _At.BODY:
                text, marker = self._scanner.take((self.call[1], *self.tails))
                if text:
                    events.append(CallArguments(self._calls - 1, text))
                if marker is None:
                    return False
                self._at = _At.BETWEEN
        return True


class DeepSeekV31Calls(TokenCalls):
    """`NAME<sep>ARGUMENTS`, in the tokens of DeepSeek V3.1."""

    section = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    call = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
    separator = "<｜tool▁sep｜>"

    @classmethod
    def markers(cls) -> tuple[str, ...]:
        return (*super().markers(), DeepSeekV31Calls.separator)


class DeepSeekV3Calls(DeepSeekV31Calls):
    """`function<sep>NAME`, then the arguments as a fenced block, in the tokens of DeepSeek V3 and R1."""

    separator = "\n```json\n"
    tails = ("\n```<｜tool▁call▁end｜>",)

    def head(self, text: str) -> tuple[str, str | None]:
        return text.partition(DeepSeekV31Calls.separator)[2].strip(), None


class KimiK2Calls(TokenCalls):
    """`functions.NAME:NUMBER`, which is the call's id too, in the tokens of Kimi K2."""

    section = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    call = ("<|tool_call_begin|>", "<|tool_call_end|>")
    separator = "<|tool_call_argument_begin|>"

    @classmethod
    def markers(cls) -> tuple[str, ...]:
        return (*super().markers(), cls.separator)

    def head(self, text: str) -> tuple[str, str | None]:
        id_ = text.strip()
        return re.sub(r"^functions\.|:\d+$", "", id_), id_
