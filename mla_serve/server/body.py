"""How bodies are read: by pydantic's JSON parser, which refuses NaN, half characters (lone surrogates) and endless nesting."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import pydantic_core
from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response


class _JsonRequest(Request):
    async def json(self) -> Any:
        """The parsed body. Raises ValueError, which FastAPI answers with 400."""
        return pydantic_core.from_json(await self.body(), allow_inf_nan=False)


class JsonRoute(APIRoute):
    """A route whose body is parsed as above."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return handler
