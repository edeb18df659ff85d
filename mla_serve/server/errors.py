"""Errors as OpenAI's clients expect them: `{"error": {"message", "type", "param", "code"}}`; small, and without the input."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from mla_serve.engine.base import EngineDeadError
from mla_serve.errors import UserError
from mla_serve.server.validation import sentence

log = logging.getLogger("mla_serve.server")

MAX_MESSAGE = 2000  # characters; an error body stays far below 16 KiB whatever a template or an engine had to say
TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer of its own: HTTP status, one sentence, the field at fault and a code that a program can compare."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})


class RequestFailedError(Exception):
    """The engine gave one request up after it had started; the others go on."""


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def as_api_error(error: Exception) -> ApiError:
    """What a client is told about any exception. Only an ApiError, a UserError and the engine's own words are passed on."""
    match error:
        case ApiError():
            return error
        case UserError():
            return bad_request(str(error))
        case EngineDeadError():
            return ApiError(503, f"The engine has ended and the server is going down: {error}", code="engine_dead")
        case RequestFailedError():
            return ApiError(500, f"The engine gave this request up: {error}", code="request_failed")
    log.error("internal error", exc_info=error)
    return ApiError(500, "Internal server error; the server's log has the details.", code="internal_error")


def error_body(error: ApiError) -> dict[str, Any]:
    """The JSON object that goes into a response or into an SSE event."""
    kind = TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": error.message[:MAX_MESSAGE], "type": kind, "param": error.param, "code": error.code}}


def error_response(error: ApiError) -> Response:
    body = msgspec.json.encode(error_body(error))
    return Response(body, error.status, {"content-type": "application/json", **error.headers})


HTTP_MESSAGES = {
    404: "There is no such route; see /docs for those there are.",
    405: "This route does not take that method.",
    400: "The body is not valid JSON.",
}


def install_error_handlers(app: FastAPI) -> None:
    """Gives every error that routes, validation or routing itself can raise its OpenAI shape."""

    async def on_error(_: Request, error: Exception) -> Response:
        return error_response(as_api_error(error))

    async def on_invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        message, param = sentence(error.errors())
        return error_response(bad_request(message, param))

    async def on_http(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = HTTP_MESSAGES.get(error.status_code, str(error.detail))
        return error_response(ApiError(error.status_code, message, headers=error.headers))

    for kind in (ApiError, UserError, EngineDeadError, RequestFailedError):
        app.add_exception_handler(kind, on_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http)
