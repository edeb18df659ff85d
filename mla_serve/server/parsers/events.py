"""What parsers say, and what they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of what the model thought before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class CallName:
    """Call number `index` begins. `id` is the model's own name for the call, where its format has one."""

    index: int
    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of call `index`'s arguments: JSON text, as the model wrote it."""

    index: int
    text: str


Event = Content | Reasoning | CallName | CallArguments


class Parser(Protocol):
    """Text in pieces in, Events out. How the text was cut changes nothing but how Content and arguments are cut.

    `push` returns what is certain; `finish`, once and last, what was held back in case it became a marker.
    """

    def push(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]: ...


def joined(events: Iterable[Event]) -> Iterator[Event]:
    """The same Events with neighbouring pieces of one kind as one, which does not depend on how the text was cut."""
    last: Event | None = None
    for event in events:
        match last, event:
            case Content(a), Content(b):
                last = Content(a + b)
            case Reasoning(a), Reasoning(b):
                last = Reasoning(a + b)
            case CallArguments(i, a), CallArguments(j, b) if i == j:
                last = CallArguments(i, a + b)
            case _:
                if last is not None:
                    yield last
                last = event
    if last is not None:
        yield last
