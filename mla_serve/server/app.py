"""The FastAPI application: routes, layers, errors and the OpenAPI document."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from mla_serve import __version__
from mla_serve.engine.base import Engine
from mla_serve.server.answers import ErrorResponse
from mla_serve.server.defaults import GenerationDefaults
from mla_serve.server.errors import install_error_handlers
from mla_serve.server.middleware import ApiKeys, BodyLimit, RequestLog
from mla_serve.server.respond import IGNORED
from mla_serve.server.routes import attention, chat, completions, health, metrics, models, responses, tokens
from mla_serve.server.settings import ServerSettings
from mla_serve.server.state import ServerState
from mla_serve.server.streaming import ClientGoneError
from mla_serve.server.text import Tokenizer
from mla_serve.server.tracing import Tracing, TracingLayer

STATUSES = {
    400: "The request is wrong; the message names the field.",
    401: "An API key is needed.",
    404: "No such model or route.",
    408: "The body was not whole in time.",
    413: "The body is too large.",
    429: "The queue is full.",
    500: "The server or the engine failed this request.",
    504: "The request took longer than the operator allows.",
    503: "The engine is not healthy, or the server is shutting down.",
}


class _App(FastAPI):
    """FastAPI, but its document does not promise 422, which this server never answers, nor describe that answer."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            schema = super().openapi()
            for path in schema["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
            for name in ("HTTPValidationError", "ValidationError"):
                schema["components"]["schemas"].pop(name, None)
        assert self.openapi_schema is not None
        return self.openapi_schema


async def _nobody_reads(_: Request, __: Exception) -> Response:
    """The client has gone; 499 is what access logs call that."""
    return Response(status_code=499)


def create_app(engine: Engine, settings: ServerSettings, tokenizer: Tokenizer | None = None) -> FastAPI:
    """The application over a running engine. The tokenizer is loaded from the model's directory unless it is given.

    Raises UserError for a model directory whose tokenizer or generation_config.json cannot be used.
    """
    middleware = [Middleware(RequestLog)]
    tracing = None if settings.otlp_endpoint is None else Tracing(settings.otlp_endpoint, settings.model_name)
    if settings.allow_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=settings.allow_origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["X-Request-Id", IGNORED],
            )
        )
    if settings.api_keys:
        middleware.append(Middleware(ApiKeys, keys=settings.api_keys))
    if tracing is not None:  # behind the keys, so that nobody without one fills the operator's collector
        middleware.append(Middleware(TracingLayer, tracing=tracing))
    middleware.append(Middleware(BodyLimit, limit=settings.body_limit, seconds=settings.body_timeout))
    app = _App(
        title="mla_serve",
        version=__version__,
        description="OpenAI-compatible server for models with multi-head latent attention.",
        middleware=middleware,
        redirect_slashes=False,
        responses={status: {"model": ErrorResponse, "description": text} for status, text in STATUSES.items()},
    )
    app.state.server = ServerState(
        engine=engine,
        settings=settings,
        tokenizer=tokenizer or Tokenizer.load(settings.model_dir, settings.chat_template),
        defaults=GenerationDefaults.from_dir(settings.model_dir),
        tracing=tracing,
    )
    install_error_handlers(app)
    app.add_exception_handler(ClientGoneError, _nobody_reads)
    for routes in (models, completions, chat, responses, tokens, health, attention, metrics):
        app.include_router(routes.router)
    return app
