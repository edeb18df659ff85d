"""Our server over real vLLM with the plugin in it: answers, parameters, refusals, disconnects, and E04."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from mla_serve.demo import questions
from tests.vllm.conftest import ROOT, environment

pytestmark = pytest.mark.vllm

FLAGS = ["--enforce-eager", "--kv-cache-memory-bytes", "268435456", "--max-model-len", "1024", "--dtype", "float32"]
START = 150
QUIET = {"TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


class Running:
    """A server process and what it has written."""

    def __init__(self, command: list[str], log: Path) -> None:
        self.log = log
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, *command], cwd=ROOT, env=environment(**QUIET), stdout=out,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self.url = ""

    def wait(self) -> Running:
        until = time.monotonic() + START
        while time.monotonic() < until and self.process.poll() is None:
            if not self.url and (found := re.search(r"address +(http://\S+)", self.log.read_text())):
                self.url = found[1]
            if self.url:
                with contextlib.suppress(httpx.HTTPError):
                    if httpx.get(self.url + "/health", timeout=5).status_code == 200:
                        return self
            time.sleep(0.2)
        raise AssertionError(self.log.read_text()[-6000:])

    def children(self, name: str) -> list[int]:
        """Process ids below this one whose title holds `name`."""
        found = []
        for status in Path("/proc").glob("[0-9]*/stat"):
            try:
                session = int(status.read_text().rpartition(")")[2].split()[3])
                title = (status.parent / "cmdline").read_bytes() + (status.parent / "comm").read_bytes()
            except OSError:
                continue
            if session == self.process.pid and name.encode() in title:
                found.append(int(status.parent.name))
        return found

    def stop(self) -> int:
        """SIGTERM to the server alone; its exit status."""
        self.process.terminate()
        try:
            return self.process.wait(60)
        finally:
            self.close()

    def close(self) -> None:
        """Ends whatever is left of the server's own session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    log = tmp_path_factory.mktemp("ours") / "server.log"
    running = Running(
        ["-m", "mla_serve.cli", "serve", "--engine", "vllm", "--port", "0", "--policy", "availability", "--", *FLAGS],
        log,
    )
    try:
        yield running.wait()
    finally:
        running.close()


@pytest.fixture
def client(ours: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{ours.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def decided(url: str) -> set[tuple[str, str]]:
    """Phase and kernel of every decision in force."""
    found = httpx.get(url + "/attention/decisions", timeout=30).json()["decisions"]
    return {(decision["bucket"]["phase"], decision["winner"] + ("+pad" if decision["padding"] else "")) for decision in found}


async def ask(url: str, model: str, asked: Any) -> list[str]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=280) as client:

        async def one(question: Any) -> str:
            answer = await client.chat.completions.create(model=model, messages=question.messages(), temperature=0)
            return answer.choices[0].message.content or ""

        return list(await asyncio.gather(*(one(question) for question in asked)))


def wrong(url: str, model: str, asked: Any) -> list[tuple[str, str]]:
    answers = asyncio.run(ask(url, model, asked))
    return [
        (question.prompt[-60:], answer) for question, answer in zip(asked, answers, strict=True) if answer != question.answer
    ]


def test_the_demo_model_answers_word_for_word(ours: Running) -> None:
    asked = questions()
    assert wrong(ours.url, "mla-serve-demo", asked) == []
    assert {("prefill", "torch-flash+pad"), ("decode", "torch-mla")} <= decided(ours.url)


def test_parameters(client: openai.OpenAI) -> None:
    extra = {"structured_outputs": {"choice": ["客单价", "👩‍👩‍👧"]}}
    answer = client.completions.create(
        model="mla-serve-demo", prompt="x", max_tokens=64, logprobs=3, seed=1, n=2, extra_body=extra
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.text in ("客单价", "👩‍👩‍👧")
        assert choice.finish_reason == "stop"
        assert choice.logprobs is not None
        assert len(choice.logprobs.token_logprobs or []) == len(choice.logprobs.tokens or [])
    echoed = client.completions.create(
        model="mla-serve-demo", prompt="What is", echo=True, logprobs=1, max_tokens=2, temperature=0
    )
    assert echoed.choices[0].text.startswith("What is")
    assert echoed.choices[0].logprobs is not None
    assert (echoed.choices[0].logprobs.token_logprobs or [])[0] is None
    one, two = (
        client.completions.create(model="mla-serve-demo", prompt="x", max_tokens=12, seed=7, extra_body={"ignore_eos": True})
        for _ in range(2)
    )
    assert one.choices[0].text == two.choices[0].text
    biased = client.completions.create(model="mla-serve-demo", prompt="x", max_tokens=3, temperature=0, logit_bias={"65": 100})
    assert biased.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"regex": "("}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 5}}}},
        {"max_tokens": 5000},
        {"prompt": [10**6]},
    ],
)
def test_bad_requests_get_one_sentence(ours: Running, fields: dict[str, Any]) -> None:
    response = httpx.post(ours.url + "/v1/completions", json={"prompt": "a", "max_tokens": 4, **fields}, timeout=60)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"].endswith(".")
    assert httpx.get(ours.url + "/health", timeout=10).status_code == 200


def test_a_client_that_goes_frees_everything(ours: Running) -> None:
    body = {"prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": True}
    for _ in range(3):
        with httpx.stream("POST", ours.url + "/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            for _ in range(3):
                next(lines)
    until = time.monotonic() + 2
    while True:
        load = httpx.get(ours.url + "/load", timeout=10).json()
        if not load["running"] and load["kv_pages_free"] == load["kv_pages_total"]:
            break
        assert time.monotonic() < until, load
        time.sleep(0.05)
    assert load["server_load"] == 0


def test_e04_the_engines_death_ends_streams_and_server(ours: Running) -> None:
    """Last: it ends the server that the others share."""
    (core,) = ours.children("EngineCore")
    # Many at once: on a busy host the engine would be done with one before its first token has come through.
    body = {"prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": True, "n": 32}
    with httpx.stream("POST", ours.url + "/v1/completions", json=body, timeout=60) as response:
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        os.kill(core, signal.SIGKILL)
        killed = time.monotonic()
        rest = list(lines)
    assert time.monotonic() - killed < 5
    assert "error" in json.loads(rest[-1].removeprefix("data: "))
    assert ours.process.wait(30) == 1
