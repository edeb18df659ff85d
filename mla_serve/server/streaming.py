"""Server-sent events, and work that stops when the client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import AsyncExitStack, aclosing, suppress
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mla_serve.server.errors import as_api_error, error_body

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}

_encode = msgspec.json.Encoder().encode


def event(data: Any, *, name: str | None = None) -> bytes:
    """One event, with a type of its own if it has a name; msgspec writes UTF-8 as it is and no line breaks."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + _encode(data) + b"\n\n"


class ClientGoneError(Exception):
    """The client closed its connection; nobody will read the answer."""


async def _gone(receive: Receive) -> None:
    """Returns once the client has closed the connection. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled if the client closes the connection first: then raises ClientGoneError."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)  # so that the work has cleaned up when this returns


class EventStream(Response):
    """Sends events as they come. A closed connection closes the generator; an error in it becomes the last event.

    `held` is closed when the stream has ended, however it ended, also where the generator was never started.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], held: AsyncExitStack, headers: Mapping[str, str]) -> None:
        super().__init__(headers={**HEADERS, **headers})
        del self.headers["content-length"]
        self._events, self._held = events, held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._held:
            with suppress(ClientGoneError):
                await while_connected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._events) as events:
            try:
                async for data in events:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            except Exception as error:  # noqa: BLE001 - as_api_error logs what it does not know
                await send({"type": "http.response.body", "body": event(error_body(as_api_error(error))), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
