"""The plugin's routes on a server whose engine is a stand-in; `tests/vllm/test_server.py` has the real ones."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from mla_serve.vllm_plugin.endpoint import AttentionEndpoint
from tests.pages.sample import decisions


class Engine:
    """Two workers that answer alike, or an error."""

    def __init__(self, answer: dict[str, Any] | Exception) -> None:
        self.answer = answer

    async def collective_rpc(self, method: str) -> list[str]:
        assert method == "mla_serve_attention"
        if isinstance(self.answer, Exception):
            raise self.answer
        return [json.dumps(self.answer)] * 2


def client(answer: dict[str, Any] | Exception) -> TestClient:
    app, plugin = FastAPI(), AttentionEndpoint()
    plugin.attach_router(app)
    asyncio.run(plugin.init_state(Engine(answer), app.state, SimpleNamespace(served_model_name=["mine"], model="/m")))
    return TestClient(app, raise_server_exceptions=False)


def test_decisions_are_the_first_ranks_and_counts_are_everybodys() -> None:
    counts = [{"steps": [], "runs": []}]
    found = [decision.to_json() for decision in decisions()]
    asked = client({"decisions": found, "counts": counts})
    assert asked.get("/attention/decisions").json() == {"decisions": found, "counts": [counts, counts]}
    page = asked.get("/attention")
    assert page.status_code == 200
    assert "mine" in page.text


@pytest.mark.parametrize("route", ["/attention", "/attention/decisions"])
def test_a_model_without_our_layers_is_not_found(route: str) -> None:
    answer = client(Exception("Method 'mla_serve_attention' is not implemented.")).get(route)
    assert answer.status_code == 404
    assert "serves no layer of this model" in answer.json()["error"]["message"]
    assert client(Exception("the engine is dead")).get(route).status_code == 500
