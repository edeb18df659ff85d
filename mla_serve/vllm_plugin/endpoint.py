"""/attention and /attention/decisions on vLLM's own server: which kernel serves which shape, and why.

vLLM loads it only where VLLM_PLUGINS names `mla_serve`, which then must name every other plugin that is wanted, too.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI
from starlette.responses import HTMLResponse, Response

from mla_serve.pages import page_headers, render_page
from mla_serve.selection import Decision, DecisionTable, default_table_path
from mla_serve.selection.entry import host_of
from mla_serve.vllm_plugin.config import PluginSettings
from mla_serve.vllm_plugin.shared import read_decisions

router = APIRouter(tags=["attention"])


@router.get("/attention")
async def page() -> Response:
    """A page: how much each bucket's kernel wins, every candidate with its time and reason, the host."""
    return HTMLResponse(await asyncio.to_thread(_page), headers=page_headers())


@router.get("/attention/decisions")
async def decisions() -> Response:
    """Every decision in force in a worker, as JSON."""
    found = await asyncio.to_thread(read_decisions)
    return Response(msgspec.json.encode({"decisions": found}), headers={"content-type": "application/json"})


def _page() -> str:
    """The decisions in force, then those of the decision file that the same device made."""
    in_force = [Decision.from_json(decision) for decision in read_decisions()]
    hosts = {host_of(decision.fingerprint) for decision in in_force}
    table = list(DecisionTable.load(PluginSettings.read().decisions or default_table_path()))
    here = [decision for decision in table if host_of(decision.fingerprint) in hosts]
    return render_page(in_force, here, subject="vLLM", served=True, other_hosts=len(table) - len(here))


class Endpoint:
    """What vLLM's `EndpointPlugin` protocol asks for. The routes read files, and need neither state nor engine."""

    name = "mla_serve"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        app.include_router(router)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Nothing to set up."""


def make() -> Endpoint:
    """The entry point of the group `vllm.endpoint_plugins`."""
    return Endpoint()
