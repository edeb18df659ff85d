"""/v1/models: the one model there is."""

from __future__ import annotations

from fastapi import APIRouter

from mla_serve.server.answers import ModelCard, ModelList
from mla_serve.server.state import ServerState, State

router = APIRouter(tags=["models"])


def _card(state: ServerState) -> ModelCard:
    return {
        "id": state.model_name,
        "object": "model",
        "created": state.created,
        "owned_by": "mla_serve",
        "max_model_len": state.engine.info.max_model_len,
    }


@router.get("/v1/models")
async def list_models(state: State) -> ModelList:
    """The model that this server serves."""
    return {"object": "list", "data": [_card(state)]}


@router.get("/v1/models/{model:path}")
async def get_model(model: str, state: State) -> ModelCard:
    """One model by name; 404 for any but the one served."""
    state.check_model(model)
    return _card(state)
