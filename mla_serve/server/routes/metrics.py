"""GET /metrics, for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from mla_serve.server.metrics import CONTENT_TYPE
from mla_serve.server.state import State

router = APIRouter(tags=["operations"])


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(state: State) -> Response:
    """The engine's load under vLLM's metric names, and the kernel in force for each bucket."""
    stats, decisions = await state.engine.stats(), await state.engine.decisions()
    return Response(state.metrics.render(stats, decisions), headers={"content-type": CONTENT_TYPE})
