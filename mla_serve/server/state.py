"""What the routes of one server share, and the count of what is open."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Depends, Request

from mla_serve.engine.base import Engine
from mla_serve.server.defaults import GenerationDefaults
from mla_serve.server.errors import ApiError, bad_request
from mla_serve.server.formats import AnswerFormats
from mla_serve.server.metrics import Metrics
from mla_serve.server.settings import ServerSettings
from mla_serve.server.text import Tokenizer
from mla_serve.server.tracing import Tracing

RETRY = {"Retry-After": "1"}


@dataclass
class ServerState:
    """`open` counts the choices that requests in flight wait for; `idle` is set while there are none.

    `draining` and `dead` end the taking of new requests.
    """

    engine: Engine
    settings: ServerSettings
    tokenizer: Tokenizer
    defaults: GenerationDefaults
    tracing: Tracing | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    open: int = 0
    draining: bool = False
    dead: str | None = None
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    metrics: Metrics = field(init=False)
    formats: AnswerFormats = field(init=False)

    def __post_init__(self) -> None:
        self.idle.set()
        self.metrics = Metrics(self.model_name)
        self.formats = AnswerFormats.of(self.settings, self.tokenizer)

    @property
    def model_name(self) -> str:
        return self.settings.model_name

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404 for a model that is not served here; a request that names none means the one there is."""
        if name is not None and name != self.model_name:
            raise ApiError(
                404,
                f"There is no such model here; this server serves {self.model_name!r}.",
                param="model",
                code="model_not_found",
            )

    def check_open(self) -> None:
        """Raises ApiError 503 where no new request is taken."""
        if self.dead is not None:
            raise ApiError(503, f"The engine has ended and the server is going down: {self.dead}", code="engine_dead")
        if self.draining:
            raise ApiError(503, "The server is shutting down; send the request to another one.", code="draining", headers=RETRY)

    def check_size(self, choices: int) -> None:
        """Raises ApiError 400 for a request that would never fit: to be asked before any work is done for it."""
        limit = self.settings.max_queue
        if choices > limit:
            raise bad_request(
                f"The request asks for {choices} choices (prompts times n); this server takes at most {limit}.", "n"
            )

    @contextmanager
    def admit(self, choices: int) -> Iterator[None]:
        """Holds a place for a request of so many choices.

        Raises ApiError 503 where none is taken, 429 where the queue is full. `check_size` has let the request through.
        """
        self.check_open()
        limit = self.settings.max_queue
        if self.open + choices > limit:
            raise ApiError(429, f"All {limit} places are taken; try again later.", code="queue_full", headers=RETRY)
        self.open += choices
        self.idle.clear()
        try:
            yield
        finally:
            self.open -= choices
            if not self.open:
                self.idle.set()

    async def unhealthy(self) -> str | None:
        """Why the engine cannot be trusted to make a token, or None."""
        health = await self.engine.health()
        if not health.alive:
            return health.reason or "the engine process has ended"
        if health.heartbeat_age > self.settings.heartbeat_limit:
            return f"the engine's loop has not turned for {health.heartbeat_age:.1f} s"
        return self.dead


async def _get_state(request: Request) -> ServerState:
    state: Any = request.app.state.server
    assert isinstance(state, ServerState)
    return state


State = Annotated[ServerState, Depends(_get_state)]
