"""A server with limits and keys: who gets in, how many, how much, and how it goes down."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from playwright.sync_api import Error, expect, sync_playwright

from tests.server.conftest import MODEL, Server, start_server
from tests.server.test_bad_requests import refused

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
        body_timeout=1.5,
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
     "/nope", "/health/", "//health", "/v1/models/", "//v1/models", "/v1/../health", "/%2e%2e/health",
     "/health/../v1/models", "/health/%2e%2e/v1/models", "/health%00", "/%68ealth/x", "/v1/models?x=/health", "/ready/../load",
     "/HEALTH"],
)  # fmt: skip
def test_every_route_wants_a_key(strict: Server, path: str) -> None:
    """The path goes out as it stands, which httpx would tidy up."""
    for header in (None, "Bearer wrong", "first-key", "Basic first-key", "Bearer first-key x", "Bearer", ""):
        address = httpx.URL(strict.url)
        with closing(HTTPConnection(address.host, address.port, timeout=60)) as connection:
            connection.request("GET", path, headers={} if header is None else {"Authorization": header})
            response = connection.getresponse()
            assert response.status == 401
            assert json.loads(response.read())["error"]["code"] == "invalid_api_key"
        scheme = "Basic" if path.startswith("/attention") else "Bearer"
        assert response.headers["www-authenticate"].split()[0] == scheme


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "PUT", "TRACE"])
def test_no_method_gets_past_the_keys(strict: Server, method: str) -> None:
    assert strict.http.request(method, f"{strict.url}/v1/models").status_code == 401
    assert strict.http.request(method, f"{strict.url}/v1/models", headers=AUTH).status_code == 405


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


def basic(name: str, password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()}


@pytest.mark.parametrize("path", ["/attention", "/attention/decisions"])
def test_a_page_takes_a_key_as_a_browser_sends_it(strict: Server, path: str) -> None:
    for key in KEYS:
        assert strict.get(path, headers=basic("anyone", key)).status_code == 200
        assert strict.get(path, headers=basic("", key)).status_code == 200
    for wrong in (basic(KEYS[0], ""), basic("", ""), basic("anyone", KEYS[0] + "x"), {"Authorization": "Basic ?"}):
        assert strict.get(path, headers=wrong).status_code == 401


def test_what_acts_takes_no_key_that_a_browser_would_send_by_itself(strict: Server) -> None:
    for path in ("/v1/models", "/metrics", "/attention/"):
        assert strict.get(path, headers=basic("anyone", KEYS[0])).status_code == 401
    for path in ("/v1/completions", "/attention"):
        assert strict.http.post(f"{strict.url}{path}", json={}, headers=basic("anyone", KEYS[0])).status_code == 401


def test_a_real_browser_opens_the_page_with_a_key(strict: Server) -> None:
    chromium = shutil.which(os.environ.get("CHROMIUM", "chromium"))
    assert chromium is not None, "this test drives chromium: run `make browser`, or set CHROMIUM to its path"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--headless", "--no-sandbox", "--disable-gpu"])
        credentials = {"username": "anyone", "password": KEYS[0], "origin": strict.url}
        page = browser.new_context(http_credentials=credentials).new_page()  # type: ignore[arg-type]
        answer = page.goto(f"{strict.url}/attention")
        assert answer is not None
        assert answer.status == 200
        expect(page.locator("h1")).to_be_visible()
        with pytest.raises(Error, match="ERR_INVALID_AUTH_CREDENTIALS"):  # nobody answers its question for a key
            browser.new_context().new_page().goto(f"{strict.url}/attention")
        browser.close()


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


def test_half_a_body_is_waited_for_so_long_and_harms_nobody(strict: Server) -> None:
    host, port = httpx.URL(strict.url).host, httpx.URL(strict.url).port
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEYS[0]}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, port), timeout=30) as lazy:
        lazy.sendall(f'{head}Content-Length: 100\r\n\r\n{{"prompt": "X'.encode())
        assert strict.post("/v1/completions", LONG, headers=AUTH).status_code == 200
        answer = b""
        while piece := lazy.recv(4096):  # until the server closes the connection
            answer += piece
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"The body was not whole after 1.5 seconds" in answer


def test_a_request_that_would_never_fit_the_queue(strict: Server) -> None:
    assert strict.post("/v1/completions", {**LONG, "n": 5}, headers=AUTH).status_code == 400
    assert strict.post("/v1/completions", {**LONG, "n": 4}, headers=AUTH).status_code == 200


@pytest.mark.parametrize("prompt", [["a" * 300] * 3, [[1] * 300] * 3, [[1]] * 500])
def test_what_would_never_fit_is_refused_before_its_prompts_are_looked_at(strict: Server, prompt: list[Any]) -> None:
    refused(strict.post("/v1/completions", {"prompt": prompt, "n": 2}, headers=AUTH), 400, param="n")


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
