"""/attention/decisions: which kernel serves which shape, and why."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from mla_serve.server.responses import Decisions
from mla_serve.server.state import State

router = APIRouter(tags=["attention"])


@router.get("/attention/decisions", response_model=Decisions)
async def decisions(state: State) -> Response:
    """Every decision in force: bucket, winner, padding, and each candidate with its time, error and verdict."""
    found = await state.engine.decisions()
    return Response(msgspec.json.encode({"decisions": found}), headers={"content-type": "application/json"})
