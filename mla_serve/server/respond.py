"""The one way from Deltas to an HTTP answer, streamed or whole; a route adds only the shape of its JSON."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any, Protocol

import msgspec
from fastapi import Request
from starlette.responses import Response

from mla_serve.server.generation import Delta, Generation, collect, usage
from mla_serve.server.middleware import log_fields
from mla_serve.server.protocol import GenerationBody
from mla_serve.server.state import ServerState
from mla_serve.server.streaming import DONE, EventStream, event, while_connected

IGNORED = "X-MLA-Serve-Ignored"


class Shape(Protocol):
    """How one route writes choices down."""

    prefix: str  # of the answer's id
    whole: str  # `object` of a whole answer
    chunk: str  # `object` of a streamed part

    def opening(self, choice: int) -> dict[str, Any] | None:
        """The choice of a chunk that goes before all text, or None."""
        ...

    def part(self, delta: Delta) -> dict[str, Any]:
        """The choice of one streamed chunk."""
        ...

    def choice(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """The choice of a whole answer."""
        ...


async def respond(request: Request, state: ServerState, body: GenerationBody, generation: Generation, shape: Shape) -> Response:
    """Runs the generation and answers. Until the first token is there, an error still gets a status of its own."""
    headers = {IGNORED: ", ".join(body.ignored)} if body.ignored else {}
    head = {
        "id": f"{shape.prefix}-{uuid.uuid4().hex}",
        "object": shape.whole,
        "created": int(time.time()),
        "model": state.model_name,
    }
    fields = log_fields(request.scope)
    fields["prompt_tokens"] = generation.prompt_tokens
    async with AsyncExitStack() as held:
        held.enter_context(state.admit(len(generation.choices)))
        deltas = await held.enter_async_context(aclosing(generation.run(state.engine)))
        if body.stream:
            first = await while_connected(request.receive, anext(deltas))
            events = _events(first, deltas, {**head, "object": shape.chunk}, generation, shape, body.include_usage, fields)
            return EventStream(events, held.pop_all(), headers)
        choices = await while_connected(request.receive, collect(deltas, len(generation.choices)))
    counts = usage(generation.prompt_tokens, sum(choice[-1].completion_tokens for choice in choices))
    fields["completion_tokens"] = counts["completion_tokens"]
    answer = {**head, "choices": [shape.choice(choice) for choice in choices], "usage": counts}
    return Response(msgspec.json.encode(answer), headers={"content-type": "application/json", **headers})


async def _events(
    first: Delta, deltas: AsyncIterator[Delta], head: dict[str, Any], generation: Generation, shape: Shape, with_usage: bool,
    fields: dict[str, Any],
) -> AsyncGenerator[bytes, None]:  # fmt: skip
    """The chunks of a stream; `fields` is kept up to date for the log, whenever the stream ends."""
    completion = [0] * len(generation.choices)
    rest = {"usage": None} if with_usage else {}

    def write(delta: Delta) -> bytes:
        completion[delta.choice] = delta.completion_tokens
        fields["completion_tokens"] = sum(completion)
        return event({**head, "choices": [shape.part(delta)], **rest})

    for opening in _openings(shape, len(generation.choices)):
        yield event({**head, "choices": [opening], **rest})
    yield write(first)
    async for delta in deltas:
        yield write(delta)
    if with_usage:
        yield event({**head, "choices": [], "usage": usage(generation.prompt_tokens, sum(completion))})
    yield DONE


def _openings(shape: Shape, choices: int) -> Iterator[dict[str, Any]]:
    for index in range(choices):
        opening = shape.opening(index)
        if opening is not None:
            yield opening
