"""/attention and /attention/decisions on vLLM's own server; vLLM loads it where VLLM_PLUGINS names mla_serve."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, ClassVar

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from mla_serve.pages import page_headers, served_page
from mla_serve.selection import default_table_path
from mla_serve.vllm_plugin.config import Settings
from mla_serve.vllm_plugin.rpc import ask_workers

__all__ = ["AttentionEndpoint"]

router = APIRouter(tags=["attention"])


class AttentionEndpoint:
    """vLLM's `EndpointPlugin`, by its methods."""

    name = "mla_serve"
    required_tasks: ClassVar[tuple[str, ...]] = ("generate",)

    def attach_router(self, app: Any) -> None:
        app.include_router(router)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        state.mla_serve_engine = engine_client
        names = getattr(args, "served_model_name", None) or [getattr(args, "model", "")]
        state.mla_serve_model = names[0] if isinstance(names, list) else str(names)


@router.get("/attention", response_class=Response, responses={200: {"content": {"text/html": {}}}})
async def page(request: Request) -> Response:
    """The page of `mla-serve serve`: every bucket's kernel, its candidates, times and reasons."""
    ranks = await ask_workers(request.app.state.mla_serve_engine)
    if ranks is None:
        return _nothing()
    named = Settings.load().decisions
    path = Path(named) if named else default_table_path()
    html = await asyncio.to_thread(served_page, ranks[0]["decisions"], path, request.app.state.mla_serve_model)
    return HTMLResponse(html, headers=page_headers())


@router.get("/attention/decisions")
async def decisions(request: Request) -> Response:
    """Every decision in force on the first rank, and of each rank how often each kernel was planned and run."""
    ranks = await ask_workers(request.app.state.mla_serve_engine)
    if ranks is None:
        return _nothing()
    return JSONResponse({"decisions": ranks[0]["decisions"], "counts": [rank["counts"] for rank in ranks]})


def _nothing() -> Response:
    sentence = "mla_serve serves no layer of this model: it has none with MLA, or vLLM was not told to use its backend"
    return JSONResponse({"error": {"message": sentence, "type": "NotFoundError", "code": 404}}, status_code=404)
