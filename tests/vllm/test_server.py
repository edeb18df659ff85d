"""vLLM's own OpenAI server with the plugin, through the real `openai` client, and the plugin's two routes on it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from mla_serve.demo import MODEL_DIR, questions
from mla_serve.selection import Decision
from tests.vllm.conftest import ROOT, environment

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

START_SECONDS = 240


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL_DIR), "--served-model-name", "demo",
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "4",
        "--kv-cache-memory-bytes", str(64 << 20), "--enforce-eager",
    ]  # fmt: skip
    env = environment(
        VLLM_PLUGINS="mla_serve", MLA_SERVE_DEFAULT="1", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", TORCHDYNAMO_DISABLE="1"
    )
    with log.open("w") as output:
        server = subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT)
    try:
        _wait(server, f"http://127.0.0.1:{port}", log)
        yield f"http://127.0.0.1:{port}"
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0, log.read_text()[-4000:]
    finally:
        server.kill()
        server.wait()


def _wait(server: subprocess.Popen[bytes], address: str, log: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        assert server.poll() is None, log.read_text()[-6000:]
        try:
            if httpx.get(f"{address}/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.3)
    pytest.fail(f"no server after {START_SECONDS} s:\n{log.read_text()[-6000:]}")


def test_the_openai_client_gets_the_demo_answers(address: str) -> None:
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    for question in questions()[::40]:
        messages = question.messages()
        whole = client.chat.completions.create(model="demo", messages=messages, temperature=0, max_tokens=200)
        assert whole.choices[0].message.content == question.answer
        parts = client.chat.completions.create(model="demo", messages=messages, temperature=0, max_tokens=200, stream=True)
        assert "".join(part.choices[0].delta.content or "" for part in parts) == question.answer


def test_attention_decisions_agree_with_the_counts(address: str) -> None:
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    client.completions.create(model="demo", prompt="What is MLA?", temperature=0, max_tokens=4)
    found = httpx.get(f"{address}/attention/decisions").raise_for_status().json()
    decisions = [Decision.from_json(decision) for decision in found["decisions"]]
    ((counts,),) = found["counts"]
    ran = {(run["phase"], run["kernel"]) for run in counts["runs"]}
    assert ran == {(decision.bucket.shape.phase.value, decision.label) for decision in decisions}
    steps = {(step["phase"], step["kernel"]): step["count"] for step in counts["steps"]}
    assert {phase for phase, _ in steps} == {"prefill", "decode"}
    for run in counts["runs"]:
        layers = 1 if run["phase"] == "decode" else 3
        assert run["count"] == layers * steps[run["phase"], run["kernel"]]


def test_the_page_is_served_as_by_our_own_server(address: str) -> None:
    page = httpx.get(f"{address}/attention").raise_for_status()
    assert "torch-mla" in page.text
    assert "demo" in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
