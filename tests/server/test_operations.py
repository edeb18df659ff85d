"""What operators and tools ask the server: models, health, versions, load, decisions, the OpenAPI document, ids, the log."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

import mla_serve
from tests.server.conftest import MAX_LEN, MODEL, Server


def test_models(client: openai.OpenAI) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == [MODEL]
    model: Any = client.models.retrieve(MODEL)
    assert (model.object, model.owned_by, model.max_model_len) == ("model", "mla_serve", MAX_LEN)


def test_health_ready_and_version(server: Server) -> None:
    for path in ("/health", "/ready"):
        response = server.get(path)
        assert (response.status_code, response.json()) == (200, {"status": "ok"})
    assert server.get("/version").json() == {"version": mla_serve.__version__}


def test_load(server: Server) -> None:
    load = server.until_idle(5)
    assert load["server_load"] == load["running"] == load["waiting"] == 0
    assert load["kv_pages_free"] == load["kv_pages_total"] > 0
    assert load["kv_cache_usage"] == 0


def test_decisions_are_there_after_the_warm_up(server: Server) -> None:
    decisions = server.get("/attention/decisions").json()["decisions"]
    assert {"prefill", "decode"} <= {decision["bucket"]["phase"] for decision in decisions}
    for decision in decisions:
        assert decision["winner"]
        assert decision["candidates"]


def test_the_start_says_what_runs_and_how_to_ask_it(server: Server) -> None:
    start = server.output
    for expected in (
        f"model      {MODEL}",
        "EmbeddedEngine on cpu, float32",
        "attention  prefill  ",
        "           decode   ",
        "by kernel class",
        server.url,
    ):
        assert expected in start
    command = next(line for line in start.splitlines() if line.startswith("curl "))
    assert command.startswith(f"curl {server.url}/v1/chat/completions ")
    body = json.loads(command.split(" -d ")[1].strip("'"))
    assert server.post("/v1/chat/completions", body).status_code == 200


@pytest.mark.parametrize("given", ["abc-1.2_3", "x" * 128])
def test_request_ids_are_kept(server: Server, given: str) -> None:
    assert server.get("/version", headers={"X-Request-Id": given}).headers["x-request-id"] == given


@pytest.mark.parametrize("given", [None, "", "x" * 129, "a b", "a;b", 'a"b'])
def test_other_request_ids_are_made(server: Server, given: str | None) -> None:
    headers = {} if given is None else {"X-Request-Id": given}
    made = [server.get("/version", headers=headers).headers["x-request-id"] for _ in range(2)]
    assert all(len(request_id) == 32 for request_id in made)
    assert made[0] != made[1]
    assert server.get("/nope", headers=headers).headers["x-request-id"]


def test_the_access_log_has_counts_and_no_text(server: Server) -> None:
    server.post("/v1/completions", {"prompt": "my secret", "max_tokens": 3}, headers={"X-Request-Id": "log-me"})
    server.get("/health", headers={"X-Request-Id": "not-me"})
    lines = [json.loads(line) for line in server.output.splitlines() if line.startswith("{")]
    mine = [line for line in lines if line["id"] == "log-me"]
    assert len(mine) == 1
    line = mine[0]
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/completions", 200)
    assert (line["prompt_tokens"], line["completion_tokens"]) == (9, 3)
    assert line["ms"] > 0
    assert "secret" not in server.output
    assert not any(line["path"] in ("/health", "/ready") for line in lines)


def test_the_document_promises_what_is_answered(server: Server) -> None:
    document = server.get("/openapi.json").json()
    assert {"/v1/models", "/v1/completions", "/v1/chat/completions", "/health", "/ready", "/version"} <= document[
        "paths"
    ].keys()
    for path in document["paths"].values():
        for operation in path.values():
            assert "422" not in operation["responses"]
            assert operation["responses"]["400"]["content"]["application/json"]["schema"] == {
                "$ref": "#/components/schemas/ErrorResponse"
            }
    body = document["components"]["schemas"]["ChatBody"]
    assert body["required"] == ["messages"]
    assert body["properties"]["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0.0, "maximum": 2.0}
