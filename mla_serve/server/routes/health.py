"""What orchestrators and operators ask: is it alive, does it take requests, how busy is it, which version."""

from __future__ import annotations

from fastapi import APIRouter

from mla_serve import __version__
from mla_serve.server.answers import Load, Status, Version
from mla_serve.server.errors import ApiError
from mla_serve.server.state import State

router = APIRouter(tags=["operations"])


@router.head("/health", include_in_schema=False)  # as some load balancers ask
@router.get("/health")
async def health(state: State) -> Status:
    """200 while the engine's loop turns; 503 once its heartbeat is stale or its process has ended."""
    reason = await state.unhealthy()
    if reason is not None:
        raise ApiError(503, f"The engine is not healthy: {reason}.", code="engine_unhealthy")
    return {"status": "ok"}


@router.head("/ready", include_in_schema=False)
@router.get("/ready")
async def ready(state: State) -> Status:
    """200 while new requests are taken; 503 while the server drains or its engine is not healthy."""
    state.check_open()
    return await health(state)


@router.get("/version")
async def version() -> Version:
    """The version of mla_serve."""
    return {"version": __version__}


@router.get("/load")
async def load(state: State) -> Load:
    """How much is running and waiting; `server_load` counts the choices that open requests wait for."""
    stats = await state.engine.stats()
    return {
        "server_load": state.open,
        "running": stats.running,
        "waiting": stats.waiting,
        "kv_cache_usage": stats.kv_cache_usage,
        "kv_pages_total": stats.kv_pages_total,
        "kv_pages_free": stats.kv_pages_free,
    }
