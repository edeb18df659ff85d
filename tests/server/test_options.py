"""What an operator may set beside the engine: a bound on each request's time, browsers' origins, keys from the environment."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from mla_serve.errors import UserError
from mla_serve.server.settings import read_api_keys
from tests.server.conftest import MODEL, Server, start_server

ORIGIN = "https://chat.example"
LONG = {"prompt": "XY", "max_tokens": 4000, "ignore_eos": True}


@pytest.fixture(scope="module")
def strict(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("options") / "server.log"
    running = start_server(log, checkpoint, request_timeout=0.5, allow_origins=[ORIGIN])
    try:
        yield running.wait()
    finally:
        assert running.stop() == 0, running.output


def test_a_request_that_takes_too_long_ends(strict: Server) -> None:
    answer = strict.post("/v1/completions", LONG)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
    assert "0.5 seconds" in answer.json()["error"]["message"]
    assert strict.until_idle(2)["running"] == 0


def test_a_stream_that_takes_too_long_ends_with_an_error(strict: Server) -> None:
    with openai.OpenAI(base_url=f"{strict.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(
            model=MODEL, prompt="XY", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
        )
        with pytest.raises(openai.APIError) as ended:
            list(stream)
    assert ended.value.code == "timeout"
    assert strict.until_idle(2)["running"] == 0


def test_a_short_request_is_not_touched(strict: Server) -> None:
    assert strict.complete(prompt="XY", max_tokens=2)["usage"]["completion_tokens"] <= 2


def preflight(server: Server, origin: str) -> httpx.Response:
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    return server.http.options(server.url + "/v1/completions", headers=headers)


def test_only_the_named_origin_may_call_from_a_browser(strict: Server, server: Server) -> None:
    allowed = preflight(strict, ORIGIN)
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, ORIGIN)
    other = preflight(strict, "https://evil.example")
    assert "access-control-allow-origin" not in other.headers
    answer = strict.post("/v1/completions", {"prompt": "X", "max_tokens": 1}, headers={"Origin": ORIGIN})
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
    assert "access-control-allow-origin" not in preflight(server, ORIGIN).headers, "off by default"


def test_keys_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLA_SERVE_API_KEY", " one\ttwo \n")
    assert read_api_keys(None) == ("one", "two")
    (tmp_path / "keys").write_text("three\n")
    assert read_api_keys(tmp_path / "keys") == ("three",), "a file wins"
    monkeypatch.delenv("MLA_SERVE_API_KEY")
    assert read_api_keys(None) == ()
    monkeypatch.setenv("MLA_SERVE_API_KEY", " \n")
    with pytest.raises(UserError, match="holds no key"):
        read_api_keys(None)


def test_the_document_names_what_streams(server: Server) -> None:
    paths = server.get("/openapi.json").json()["paths"]
    for route in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
        assert set(paths[route]["post"]["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    assert "422" not in json.dumps(paths)


def test_load_balancers_may_ask_with_head(server: Server) -> None:
    for path in ("/health", "/ready"):
        answer = server.http.head(server.url + path)
        assert (answer.status_code, answer.content) == (200, b"")
