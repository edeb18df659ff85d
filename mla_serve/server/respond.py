"""The one way from Deltas to an HTTP answer, streamed or whole; a route adds only the shape of its JSON."""

from __future__ import annotations

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any, Protocol

import msgspec
from fastapi import Request
from starlette.responses import Response

from mla_serve.server.errors import ApiError
from mla_serve.server.generation import Delta, Generation, Tally, collect
from mla_serve.server.middleware import log_fields
from mla_serve.server.protocol import GenerationBody
from mla_serve.server.state import ServerState
from mla_serve.server.streaming import DONE, EventStream, event, while_connected

IGNORED = "X-MLA-Serve-Ignored"


class Shape(Protocol):
    """How one route writes an answer down."""

    def whole(self, choices: Sequence[Sequence[Delta]], tally: Tally) -> dict[str, Any]:
        """The body of an answer that is not streamed, from all Deltas of each choice."""
        ...

    def opening(self) -> Iterator[bytes]:
        """Events that go before all text."""
        ...

    def part(self, delta: Delta, tally: Tally) -> Iterator[bytes]:
        """Events of one Delta; none while what it says cannot be told yet."""
        ...

    def ending(self, tally: Tally) -> Iterator[bytes]:
        """Events that close a stream which ended well."""
        ...


class Body(Protocol):
    """What of a request's body decides how it is answered."""

    @property
    def stream(self) -> bool | None: ...

    @property
    def ignored(self) -> list[str]: ...


async def respond(request: Request, state: ServerState, body: Body, generation: Generation, shape: Shape) -> Response:
    """Runs the generation and answers. Until the first token is there, an error still gets a status of its own."""
    headers = {IGNORED: ", ".join(body.ignored)} if body.ignored else {}
    fields = log_fields(request.scope)
    fields["prompt_tokens"] = generation.prompt_tokens
    tally = Tally(generation)
    async with AsyncExitStack() as held:
        held.enter_context(state.admit(len(generation.choices)))
        deltas = await held.enter_async_context(aclosing(_in_time(state, generation)))
        if body.stream:
            first = await while_connected(request.receive, anext(deltas))
            return EventStream(_events(first, deltas, tally, shape, fields), held.pop_all(), headers)
        choices = await while_connected(request.receive, collect(deltas, tally, len(generation.choices)))
    fields["completion_tokens"] = tally.completion_tokens
    answer = shape.whole(choices, tally)
    return Response(msgspec.json.encode(answer), headers={"content-type": "application/json", **headers})


async def _in_time(state: ServerState, generation: Generation) -> AsyncGenerator[Delta, None]:
    """The Deltas of all choices. Raises ApiError 504 where they take longer than a request may."""
    limit = state.settings.request_timeout
    until = None if limit is None else asyncio.get_running_loop().time() + limit
    async with aclosing(generation.run(state.engine)) as deltas:
        while True:
            try:
                async with asyncio.timeout_at(until):
                    delta = await anext(deltas)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise ApiError(504, f"The request took longer than this server's {limit:g} seconds.", code="timeout") from None
            yield delta


async def _events(
    first: Delta, deltas: AsyncIterator[Delta], tally: Tally, shape: Shape, fields: dict[str, Any]
) -> AsyncGenerator[bytes, None]:
    """The events of a stream; `fields` is kept up to date for the log, whenever the stream ends."""
    for data in shape.opening():
        yield data
    delta: Delta | None = first
    while delta is not None:
        tally.add(delta)
        fields["completion_tokens"] = tally.completion_tokens
        for data in shape.part(delta, tally):
            yield data
        delta = await anext(deltas, None)
    for data in shape.ending(tally):
        yield data


class ChoiceShape(ABC):
    """What /v1/completions and /v1/chat/completions have in common: an envelope around choices, and chunks of it."""

    def __init__(self, state: ServerState, body: GenerationBody, *, prefix: str, whole: str, chunk: str, choices: int) -> None:
        self._head = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": whole,
            "created": int(time.time()),
            "model": state.model_name,
        }
        self._chunk, self._choices = {**self._head, "object": chunk}, choices
        self._with_usage = body.include_usage
        self._rest = {"usage": None} if body.include_usage else {}

    def choice_opening(self, index: int) -> dict[str, Any] | None:
        """The choice of a chunk that goes before all text, or None."""
        return None

    @abstractmethod
    def choice_part(self, delta: Delta) -> dict[str, Any] | None:
        """The choice of one streamed chunk; None while nothing can be told."""

    @abstractmethod
    def choice(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """The choice of a whole answer."""

    def beside(self, choices: Sequence[Sequence[Delta]]) -> dict[str, Any]:
        """Fields of the whole answer beside these."""
        return {}

    def whole(self, choices: Sequence[Sequence[Delta]], tally: Tally) -> dict[str, Any]:
        told = [self.choice(deltas) for deltas in choices]
        return {**self._head, "choices": told, "usage": tally.usage(), **self.beside(choices)}

    def opening(self) -> Iterator[bytes]:
        for index in range(self._choices):
            choice = self.choice_opening(index)
            if choice is not None:
                yield event({**self._chunk, "choices": [choice], **self._rest})

    def part(self, delta: Delta, tally: Tally) -> Iterator[bytes]:
        choice = self.choice_part(delta)
        if choice is not None:
            yield event({**self._chunk, "choices": [choice], **self._rest})

    def ending(self, tally: Tally) -> Iterator[bytes]:
        if self._with_usage:
            yield event({**self._chunk, "choices": [], "usage": tally.usage()})
        yield DONE
