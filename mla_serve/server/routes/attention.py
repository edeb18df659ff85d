"""/attention, a page, and /attention/decisions, JSON: which kernel serves which shape, and why."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
from fastapi import APIRouter
from starlette.responses import HTMLResponse, Response

from mla_serve.pages import page_headers, served_page
from mla_serve.selection import default_table_path
from mla_serve.server.answers import Decisions
from mla_serve.server.state import State

router = APIRouter(tags=["attention"])


@router.get("/attention", response_class=Response, responses={200: {"content": {"text/html": {}}}})  # errors stay JSON
async def page(state: State) -> Response:
    """A page: how much each bucket's kernel wins, every candidate with its time and reason, the host. Works without scripts."""
    found = await state.engine.decisions()
    named = state.settings.engine.decisions
    # In a thread: a long table takes a moment, and tokens are streamed meanwhile.
    html = await asyncio.to_thread(served_page, found, Path(named) if named else default_table_path(), state.model_name)
    return HTMLResponse(html, headers=page_headers())


@router.get("/attention/decisions", response_model=Decisions)
async def decisions(state: State) -> Response:
    """Every decision in force: bucket, winner, padding, and each candidate with its time, error and verdict."""
    found = await state.engine.decisions()
    return Response(msgspec.json.encode({"decisions": found}), headers={"content-type": "application/json"})
