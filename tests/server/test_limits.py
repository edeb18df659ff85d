"""A server with limits and keys: who gets in, how many, how much, and how it goes down."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.server.conftest import MODEL, Server, start_server

KEYS = ["first-key", "second-key"]
AUTH = {"Authorization": f"Bearer {KEYS[0]}"}
CAP = 12
LONG: dict[str, Any] = {"prompt": "XY", "max_tokens": CAP, "ignore_eos": True}


@pytest.fixture(scope="module")
def strict(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("strict") / "server.log"
    running = start_server(
        log,
        checkpoint,
        api_keys=KEYS,
        max_queue=4,
        body_limit=4096,
        max_output_tokens=CAP,
        heartbeat_limit=2.0,
        engine={"max_model_len": 256},
    )
    try:
        yield running.wait()
    finally:
        running.close()


# API keys


@pytest.mark.parametrize(
    "path",
    ["/v1/models", "/v1/completions", "/load", "/metrics", "/attention", "/attention/decisions", "/docs", "/openapi.json",
     "/nope", "/health/", "//health",
     "/health/../v1/models", "/%68ealth/x", "/v1/models?x=/health", "/ready/../load", "/HEALTH"],
)  # fmt: skip
def test_every_route_wants_a_key(strict: Server, path: str) -> None:
    target = httpx.URL(strict.url).copy_with(raw_path=path.encode())
    for header in (None, "Bearer wrong", "first-key", "Basic first-key", "Bearer first-key x", "Bearer", ""):
        response = strict.http.get(target, headers={} if header is None else {"Authorization": header})
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"


def test_health_checks_want_none(strict: Server) -> None:
    assert [strict.get(path).status_code for path in ("/health", "/ready")] == [200, 200]


@pytest.mark.parametrize("key", KEYS)
def test_each_key_opens(strict: Server, key: str) -> None:
    with openai.OpenAI(base_url=f"{strict.url}/v1", api_key=key, max_retries=0) as client:
        assert [model.id for model in client.models.list().data] == [MODEL]
    with (
        openai.OpenAI(base_url=f"{strict.url}/v1", api_key=key + "x", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


def test_keys_are_never_written(strict: Server) -> None:
    strict.get("/v1/models", headers=AUTH)
    assert not any(key in strict.output for key in KEYS)
    assert "Authorization: Bearer KEY" in strict.output


# Limits


def test_s07_the_operators_cap_binds(strict: Server) -> None:
    for path, prompt in (
        ("/v1/completions", {"prompt": "XY"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": False}),
    ):
        unset = strict.post(path, {**prompt, "ignore_eos": True}, headers=AUTH).json()
        assert unset["usage"]["completion_tokens"] == CAP
        assert unset["choices"][0]["finish_reason"] == "length"
        response = strict.post(path, {**prompt, "max_tokens": CAP + 1}, headers=AUTH)
        assert response.status_code == 400
        assert f"at most {CAP}" in response.json()["error"]["message"]


def test_the_body_limit(strict: Server) -> None:
    assert strict.post("/v1/completions", {**LONG, "x": "y" * 3900}, headers=AUTH).status_code == 200
    response = strict.post("/v1/completions", {**LONG, "x": "y" * 4200}, headers=AUTH)
    assert response.status_code == 413
    assert "4096 bytes" in response.json()["error"]["message"]


def test_a_request_that_would_never_fit_the_queue(strict: Server) -> None:
    assert strict.post("/v1/completions", {**LONG, "n": 5}, headers=AUTH).status_code == 400
    assert strict.post("/v1/completions", {**LONG, "n": 4}, headers=AUTH).status_code == 200


def slow_request(server: Server, choices: int, answers: list[httpx.Response]) -> threading.Thread:
    """A request whose engine is stopped under it, so that it stays open until `go_on`."""

    def run() -> None:
        answers.append(server.post("/v1/completions", {**LONG, "n": choices}, headers=AUTH))

    thread = threading.Thread(target=run)
    thread.start()
    until = time.monotonic() + 30
    while server.get("/load", headers=AUTH).json()["server_load"] < choices and time.monotonic() < until:
        time.sleep(0.01)
    return thread


def test_a_full_queue_is_429_and_takes_requests_again(strict: Server) -> None:
    answers: list[httpx.Response] = []
    engine = strict.engine_pid()
    os.kill(engine, signal.SIGSTOP)
    try:
        thread = slow_request(strict, 3, answers)
        full = strict.post("/v1/completions", {**LONG, "n": 2}, headers=AUTH)
    finally:
        os.kill(engine, signal.SIGCONT)
    assert full.status_code == 429
    assert full.headers["retry-after"] == "1"
    assert full.json()["error"]["type"] == "rate_limit_error"
    thread.join(60)
    assert answers[0].status_code == 200
    assert strict.post("/v1/completions", LONG, headers=AUTH).status_code == 200


# The way down, last in this file: it ends the server.


def test_an_engine_that_hangs_is_unhealthy_until_it_goes_on(strict: Server) -> None:
    engine = strict.engine_pid()
    os.kill(engine, signal.SIGSTOP)
    try:
        until = time.monotonic() + 20
        while strict.get("/health").status_code == 200 and time.monotonic() < until:
            time.sleep(0.1)
        response = strict.get("/health")
        assert response.status_code == 503
        assert "has not turned" in response.json()["error"]["message"]
        assert strict.get("/ready").status_code == 503
    finally:
        os.kill(engine, signal.SIGCONT)
    while strict.get("/health").status_code != 200 and time.monotonic() < until:
        time.sleep(0.1)
    assert strict.get("/ready").status_code == 200


def test_sigterm_drains(strict: Server) -> None:
    answers: list[httpx.Response] = []
    engine = strict.engine_pid()
    os.kill(engine, signal.SIGSTOP)
    try:
        thread = slow_request(strict, 2, answers)
        strict.process.send_signal(signal.SIGTERM)
        until = time.monotonic() + 20
        while strict.get("/ready").status_code == 200 and time.monotonic() < until:
            time.sleep(0.02)
        refused = strict.post("/v1/completions", LONG, headers=AUTH)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "draining"
        assert refused.headers["retry-after"] == "1"
        assert strict.process.poll() is None
    finally:
        os.kill(engine, signal.SIGCONT)
    thread.join(60)
    assert answers[0].status_code == 200
    assert answers[0].json()["usage"]["completion_tokens"] == 2 * CAP
    assert strict.process.wait(30) == 0


def test_a_port_in_use_is_one_sentence(checkpoint: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        running = start_server(tmp_path / "log", checkpoint, port=port)
        assert running.process.wait(60) == 3
    assert running.output.splitlines()[-1] == (
        f"cannot listen on 127.0.0.1 port {port} (Address already in use); choose another port, or end the process that has it"
    )


def test_a_broken_model_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    running = start_server(tmp_path / "log", tmp_path)
    assert running.process.wait(60) == 3
    assert "Traceback" not in running.output
