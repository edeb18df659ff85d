"""`<think>` reasoning, as DeepSeek R1, V3.1 and Kimi K2 Thinking write it."""

from __future__ import annotations

from enum import Enum, auto

from mla_serve.server.parsers.events import Content, Event, Reasoning
from mla_serve.server.parsers.scanner import Scanner

OPEN, CLOSE = "<think>", "</think>"


class _At(Enum):
    START = auto()  # only white space so far
    INSIDE = auto()
    AFTER = auto()  # between the reasoning and the first word of the answer
    ANSWER = auto()


class Thinking:
    """Reasoning, then the answer; a `<think>` anywhere but at the start is plain text.

    Chat templates differ in who writes the opening tag: pass the rendered prompt's end to `of_prompt`.
    """

    def __init__(self, *, inside: bool = False, answer: bool = False) -> None:
        """`inside`: the prompt has opened the tag already; `answer`: it has closed it, so that no reasoning comes."""
        self._scanner = Scanner()
        self._at = _At.INSIDE if inside else _At.ANSWER if answer else _At.START

    @classmethod
    def of_prompt(cls, prompt: str) -> Thinking:
        """The parser for what follows this prompt."""
        end = prompt.rstrip()
        return cls(inside=end.endswith(OPEN), answer=end.endswith(CLOSE))

    def push(self, text: str) -> list[Event]:
        self._scanner.push(text)
        events: list[Event] = []
        while self._advance(events):
            pass
        return events

    def finish(self) -> list[Event]:
        held = self._scanner.rest()
        if self._at is _At.AFTER or not held:
            return []
        return [Reasoning(held) if self._at is _At.INSIDE else Content(held)]

    def _advance(self, events: list[Event]) -> bool:
        """One step; whether another may follow."""
        match self._at:
            case _At.START:
                return self._start(events)
            case _At.INSIDE:
                text, marker = self._scanner.take((CLOSE,))
                if text:
                    events.append(Reasoning(text))
                if marker is None:
                    return False
                self._at = _At.AFTER
            case _At.AFTER:
                held = self._scanner.rest().lstrip("\n")
                if not held:
                    return False
                self._scanner.push(held)
                self._at = _At.ANSWER
            case _At.ANSWER:
                if text := self._scanner.rest():
                    events.append(Content(text))
                return False
        return True

    def _start(self, events: list[Event]) -> bool:
        held = self._scanner.rest()
        word = held.lstrip()
        if word.startswith(OPEN):
            self._at, held = _At.INSIDE, word[len(OPEN) :]
        elif not OPEN.startswith(word):
            self._at = _At.ANSWER
        self._scanner.push(held)
        return self._at is not _At.START
