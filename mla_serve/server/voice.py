"""One choice of a chat, told apart into what is thought, said and called; as a delta of a stream or as a whole message."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from mla_serve.server.parsers import CallArguments, CallName, Content, Event, Parser, Reasoning


@dataclass
class Voice:
    """A parser, and how many calls it has found. `finish_reason` says what a choice ended with, calls considered."""

    parser: Parser
    forced: bool = False  # one named function had to be called, which OpenAI reports as an ordinary end
    calls: int = field(default=0, init=False)

    def push(self, text: str, *, last: bool) -> list[Event]:
        """What is certain of a text's next piece; of the last one, all that is left."""
        events = self.parser.push(text) if text else []
        if last:
            events = events + self.parser.finish()
        self.calls += sum(isinstance(event, CallName) for event in events)
        return events

    def finish_reason(self, reason: str | None) -> str | None:
        return "tool_calls" if reason == "stop" and self.calls and not self.forced else reason


def as_delta(events: Iterable[Event]) -> dict[str, Any]:
    """The `delta` of one chunk. Reasoning has two names among clients, so both are there."""
    said, thought = "", ""
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        match event:
            case Content(text):
                said += text
            case Reasoning(text):
                thought += text
            case CallName(index, name, id_):
                calls[index] = _call(index, name, id_)
            case CallArguments(index, text):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += text
    delta: dict[str, Any] = {}
    if said:
        delta["content"] = said
    if thought:
        delta["reasoning"] = delta["reasoning_content"] = thought
    if calls:
        delta["tool_calls"] = list(calls.values())
    return delta


def as_message(events: Iterable[Event]) -> dict[str, Any]:
    """The whole `message`. One that only calls has no content."""
    delta = as_delta(events)
    calls = [{key: value for key, value in call.items() if key != "index"} for call in delta.get("tool_calls", ())]
    thought = delta.get("reasoning")
    message = {
        "role": "assistant",
        "content": delta.get("content", None if calls else ""),
        "refusal": None,
        "reasoning": thought,
        "reasoning_content": thought,
    }
    return message | {"tool_calls": calls} if calls else message


def _call(index: int, name: str, id_: str | None) -> dict[str, Any]:
    """A call with its id: the model's own, where its format has one, else a fresh one."""
    return {
        "index": index,
        "id": id_ or f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": name, "arguments": ""},
    }
