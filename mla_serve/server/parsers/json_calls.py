"""Calls that must be made: the request's grammar has the output be JSON, whatever the model's own format is."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

from mla_serve.server.parsers.events import CallArguments, CallName, Event

_HEAD = re.compile(r'[\s,\[]*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')


def calls_schema(functions: Mapping[str, dict[str, Any]], *, several: bool) -> dict[str, Any]:
    """The JSON schema of a list of calls, at least one, of functions given with their parameters' schemas.

    Definitions move to the top, where references look for them. Raises ValueError where two functions define one name
    differently.
    """
    definitions: dict[str, Any] = {}
    calls = []
    for name, parameters in functions.items():
        own, inside = dict(parameters), parameters.get("$defs")
        if isinstance(inside, dict):
            del own["$defs"]
        for key, value in inside.items() if isinstance(inside, dict) else ():
            if definitions.setdefault(key, value) != value:
                raise ValueError(f"two functions define $defs.{key} differently; give each definition a name of its own")
        calls.append({
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": {**own, "type": "object"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        })  # fmt: skip
    one = calls[0] if len(calls) == 1 else {"anyOf": calls}
    bounds = {"minItems": 1} if several else {"minItems": 1, "maxItems": 1}
    return {"type": "array", "items": one, **bounds, **({"$defs": definitions} if definitions else {})}


class OneCall:
    """All text is the arguments of the one function that was asked for."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def push(self, text: str) -> list[Event]:
        if not text:
            return []
        name, self._name = self._name, None
        return [*([CallName(0, name)] if name is not None else []), CallArguments(0, text)]

    def finish(self) -> list[Event]:
        return []


class _At(Enum):
    HEAD = auto()
    BODY = auto()


class JsonCalls:
    """Text that follows `calls_schema`, in pieces."""

    def __init__(self) -> None:
        self._held = ""
        self._at = _At.HEAD
        self._calls = 0
        self._depth, self._string, self._escape = 0, False, False

    def push(self, text: str) -> list[Event]:
        self._held += text
        events: list[Event] = []
        while self._advance(events):
            pass
        return events

    def finish(self) -> list[Event]:
        """An unfinished head names no function and is dropped."""
        return []

    def _advance(self, events: list[Event]) -> bool:
        """One step; whether another may follow."""
        if self._at is _At.HEAD:
            head = _HEAD.match(self._held)
            if head is None:
                return False
            events.append(CallName(self._calls, json.loads(head[1])))
            self._calls += 1
            self._held, self._at = self._held[head.end() :], _At.BODY
        end = self._end()
        body, self._held = self._held[:end], self._held[end:]
        if body:
            events.append(CallArguments(self._calls - 1, body))
        return self._at is _At.HEAD

    def _end(self) -> int:
        """How far the arguments go in what is held; moves on to the next head where they are whole."""
        for position, char in enumerate(self._held):
            if self._string:
                self._string = self._escape or char != '"'
                self._escape = char == "\\" and not self._escape
            elif char == '"':
                self._string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if not self._depth:
                    self._at = _At.HEAD
                    return position + 1
        return len(self._held)
