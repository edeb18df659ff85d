"""The output of /v1/responses: Events become items (reasoning, message, function call), and each change one of OpenAI's events.

A whole answer comes from the same steps as a streamed one, its events left out, so that the two cannot differ.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mla_serve.server.parsers import CallArguments, CallName, Content, Event, Reasoning

Json = dict[str, Any]
Named = tuple[str, Json]  # an event's type, and its fields


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


@dataclass
class Items:
    """Items so far; the last one is open until another begins or the output ends."""

    done: list[Json] = field(default_factory=list)
    _open: Json | None = None

    def take(self, events: Sequence[Event], logprobs: Sequence[Json]) -> Iterator[Named]:
        """`logprobs` are of the tokens behind these events; they go to the message, if one of them is said in it."""
        for event in events:
            match event:
                case Content(text):
                    yield from self._text("message", text, logprobs)
                    logprobs = ()
                case Reasoning(text):
                    yield from self._text("reasoning", text, ())
                case CallName(_, name, id_):
                    yield from self._begin(
                        {"id": _id("fc"), "type": "function_call", "status": "in_progress", "call_id": id_ or _id("call"),
                         "name": name, "arguments": ""}
                    )  # fmt: skip
                case CallArguments(_, text):
                    assert self._open is not None
                    self._open["arguments"] += text
                    yield "response.function_call_arguments.delta", {**self._where, "delta": text}

    def end(self, *, whole: bool) -> Iterator[Named]:
        """Closes what is open. `whole` False: the answer was cut off."""
        yield from self._close("completed" if whole else "incomplete")

    def _text(self, kind: str, text: str, logprobs: Sequence[Json]) -> Iterator[Named]:
        if self._open is None or self._open["type"] != kind:
            yield from self._begin(
                {"id": _id("msg"), "type": "message", "role": "assistant", "status": "in_progress", "content": []}
                if kind == "message"
                else {"id": _id("rs"), "type": "reasoning", "status": "in_progress", "summary": [], "content": []}
            )
            part = _part(kind)
            yield "response.content_part.added", {**self._where, "content_index": 0, "part": {**part}}
            self._item["content"].append(part)
        part = self._item["content"][0]
        part["text"] += text
        where = {**self._where, "content_index": 0, "delta": text}
        if kind == "message":
            part["logprobs"] += logprobs
            yield "response.output_text.delta", {**where, "logprobs": list(logprobs)}
        else:
            yield "response.reasoning_text.delta", where

    def _begin(self, item: Json) -> Iterator[Named]:
        yield from self._close("completed")
        self._open = item
        yield "response.output_item.added", {"output_index": len(self.done), "item": {**item}}

    def _close(self, status: str) -> Iterator[Named]:
        if self._open is None:
            return
        item, where = self._item, self._where
        match item["type"]:
            case "message":
                part = item["content"][0]
                told = {"text": part["text"], "logprobs": part["logprobs"]}
                yield "response.output_text.done", {**where, "content_index": 0, **told}
                yield "response.content_part.done", {**where, "content_index": 0, "part": part}
            case "reasoning":
                part = item["content"][0]
                yield "response.reasoning_text.done", {**where, "content_index": 0, "text": part["text"]}
                yield "response.content_part.done", {**where, "content_index": 0, "part": part}
            case "function_call":
                told = {"name": item["name"], "arguments": item["arguments"]}
                yield "response.function_call_arguments.done", {**where, **told}
        item["status"] = status
        self.done.append(item)
        self._open = None
        yield "response.output_item.done", {"output_index": where["output_index"], "item": item}

    @property
    def _item(self) -> Json:
        assert self._open is not None
        return self._open

    @property
    def _where(self) -> Json:
        return {"item_id": self._item["id"], "output_index": len(self.done)}


def _part(kind: str) -> Json:
    if kind == "message":
        return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": ""}
