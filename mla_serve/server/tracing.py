"""OpenTelemetry traces of requests, behind the extra `otel`: one span a request, joined to the client's trace where it has one.

A span holds route, status and counts, never text.
"""

from __future__ import annotations

from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mla_serve import __version__
from mla_serve.errors import UserError
from mla_serve.server.middleware import log_fields

__all__ = ["Tracing", "TracingLayer"]

PREFIX = "/v1/"  # health checks and scrapes are not traced


class Tracing:
    """Sends spans to an OTLP collector over HTTP. Raises UserError where the extra is not installed."""

    def __init__(self, endpoint: str, model: str) -> None:
        try:
            from opentelemetry import propagate, trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise UserError(
                f"traces need OpenTelemetry ({error}); install mla-serve[otel], or leave --otlp-endpoint out"
            ) from error
        resource = Resource.create({"service.name": "mla_serve", "service.version": __version__})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint.rstrip("/") + "/v1/traces")))
        self.tracer, self.model = self._provider.get_tracer("mla_serve"), model
        self._extract, self._kind, self._status = propagate.extract, trace.SpanKind.SERVER, trace.StatusCode.ERROR

    def start(self, scope: Scope) -> Any:
        """The span of a request, a child of the one that its headers name."""
        headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
        attributes = {"http.request.method": scope["method"], "gen_ai.request.model": self.model}
        return self.tracer.start_span(scope["method"], self._extract(headers), kind=self._kind, attributes=attributes)

    def finish(self, span: Any, scope: Scope, status: int) -> None:
        """Adds what is known in the end. A client that has gone leaves a status of 0."""
        route = getattr(scope.get("route"), "path", None)
        if route is not None:
            span.update_name(f"{scope['method']} {route}")
            span.set_attribute("http.route", route)
        span.set_attribute("http.response.status_code", status)
        fields = log_fields(scope)
        for field, name in (
            ("prompt_tokens", "gen_ai.usage.input_tokens"),
            ("completion_tokens", "gen_ai.usage.output_tokens"),
        ):
            if field in fields:
                span.set_attribute(name, fields[field])
        if status >= 500 or not status:
            span.set_status(self._status)
        span.end()

    def shutdown(self) -> None:
        """Sends what has not been sent; blocks for seconds at most."""
        self._provider.shutdown()


class TracingLayer:
    """The ASGI layer."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self.app, self.tracing = app, tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(PREFIX):
            await self.app(scope, receive, send)
            return
        span, status = self.tracing.start(scope), 0

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, noted)
        finally:
            self.tracing.finish(span, scope, status)
