"""The layers between the socket and the routes, as plain ASGI: request ids and the access log, API keys, the body limit."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import re
import time
import uuid
from collections.abc import MutableMapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mla_serve.server.errors import ApiError, as_api_error, error_response

access = logging.getLogger("mla_serve.access")

OPEN_PATHS = frozenset({"/health", "/ready"})  # need no key and leave no line in the access log
PAGES = frozenset({"/attention", "/attention/decisions"})
REALM = "mla_serve, any name and an API key as the password"
REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
LOG_FIELDS = "mla_serve.log"


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)


def log_fields(scope: MutableMapping[str, Any]) -> dict[str, Any]:
    """Fields that a route adds to its line in the access log: counts, never text."""
    fields: dict[str, Any] = scope.setdefault(LOG_FIELDS, {})
    return fields


class RequestLog:
    """Gives each request an id (a sane X-Request-Id is kept), logs it as one JSON line, and answers what nobody caught."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = _header(scope, b"x-request-id")
        request_id = given if given is not None and REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        begin = time.perf_counter()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except Exception as error:
            if status:
                raise
            await error_response(as_api_error(error))(scope, receive, send_with_id)
        finally:
            if scope["path"] not in OPEN_PATHS:
                self._log(scope, request_id, status, time.perf_counter() - begin)

    @staticmethod
    def _log(scope: Scope, request_id: bytes, status: int, seconds: float) -> None:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "id": request_id.decode(),
            "client": (scope.get("client") or ("?",))[0],
            "method": scope["method"],
            "path": scope["path"][:200],
            "status": status,
            "ms": round(seconds * 1000, 1),
            **log_fields(scope),
        }
        access.info(json.dumps(line))


class ApiKeys:
    """Wants `Authorization: Bearer KEY` on every path but the health checks.

    Pages for people also take a key as the password of HTTP's basic authentication, which every browser asks for by itself;
    these paths only show something, so that no other site can make a browser do anything with it. Keys are compared by
    digest and all of them every time, so that the time taken says nothing about them.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        page = scope["type"] == "http" and scope["path"] in PAGES and scope["method"] in ("GET", "HEAD")
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self._allows(scope, page=page):
            error = ApiError(
                401, "A valid API key is needed; send it as Authorization: Bearer KEY.", code="invalid_api_key",
                headers={"WWW-Authenticate": f'Basic realm="{REALM}", charset="UTF-8"' if page else "Bearer"},
            )  # fmt: skip
            await error_response(error)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _allows(self, scope: Scope, *, page: bool) -> bool:
        scheme, _, key = (_header(scope, b"authorization") or b"").partition(b" ")
        scheme, key = scheme.lower(), key.strip()
        if page and scheme == b"basic":
            try:
                key = base64.b64decode(key, validate=True).partition(b":")[2]  # whatever the name is
            except ValueError:
                key = b""
        digest = hashlib.sha256(key).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme in (b"bearer", *((b"basic",) if page else ())) and any(matches)


class BodyLimit:
    """Answers 413 to a body above `limit` bytes, announced or not, and 408 to one that is not whole after `seconds`."""

    def __init__(self, app: ASGIApp, limit: int, seconds: float) -> None:
        self.app, self.limit, self.seconds = app, limit, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        length = _header(scope, b"content-length")
        if length is not None and length.isdigit() and (len(length) > 18 or int(length) > self.limit):
            # The rest of the body is not read, so the connection cannot be used again.
            error = ApiError(413, self._message, code="body_too_large", headers={"Connection": "close"})
            await error_response(error)(scope, receive, send)
            return
        seen, until = 0, time.monotonic() + self.seconds
        whole = False

        async def counted() -> Message:
            nonlocal seen, whole
            try:
                message = await (receive() if whole else asyncio.wait_for(receive(), max(0.0, until - time.monotonic())))
            except TimeoutError:
                text = f"The body was not whole after {self.seconds:g} seconds; send it at once."
                raise HTTPException(408, text, {"Connection": "close"}) from None
            whole = whole or not message.get("more_body", False)
            seen += len(message.get("body", b""))
            if seen > self.limit:
                raise HTTPException(413, self._message, {"Connection": "close"})
            return message

        await self.app(scope, counted, send)

    @property
    def _message(self) -> str:
        return f"The body is too large; this server takes at most {self.limit} bytes."
