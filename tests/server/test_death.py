"""E04: the engine is killed under a stream."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import httpx
import openai
import pytest

from tests.server.conftest import MODEL, start_server


@pytest.mark.parametrize("sigterm", [False, True], ids=["alone", "sigterm-right-after"])
def test_e04_kill_9_of_the_engine(checkpoint: Path, tmp_path: Path, sigterm: bool) -> None:
    server = start_server(tmp_path / "log", checkpoint).wait()
    try:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            stream = client.completions.create(
                model=MODEL, prompt="XY", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
            )
            for _ in range(3):
                next(stream)
            os.kill(server.engine_pid(), signal.SIGKILL)
            killed = time.monotonic()
            if sigterm:
                server.process.send_signal(signal.SIGTERM)
            with pytest.raises(openai.APIError) as ended:
                list(stream)
            assert ended.value.code == "engine_dead"
            assert "exit status -9" in ended.value.message
        if not sigterm:
            health = server.get("/health")
            assert health.status_code == 503
            assert "exit status -9" in health.json()["error"]["message"]
            late = server.post("/v1/completions", {"prompt": "XY"})
            assert (late.status_code, late.json()["error"]["code"]) == (503, "engine_dead")
        assert time.monotonic() - killed < 5
        assert server.process.wait(30) == 1
        with pytest.raises(httpx.ConnectError):
            server.get("/health")
    finally:
        server.close()


def test_a_drain_that_takes_too_long_ends_the_stream_with_an_error(checkpoint: Path, tmp_path: Path) -> None:
    server = start_server(tmp_path / "log", checkpoint, drain_timeout=0.2).wait()
    try:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            body = {"ignore_eos": True}
            stream = client.completions.create(model=MODEL, prompt="XY", max_tokens=4000, stream=True, extra_body=body)
            next(stream)
            server.process.send_signal(signal.SIGTERM)
            with pytest.raises(openai.APIError) as ended:
                list(stream)
            assert ended.value.code == "engine_dead"
        assert server.process.wait(30) == 0
    finally:
        server.close()


def test_sigterm_while_the_model_loads_ends_quietly(checkpoint: Path, tmp_path: Path) -> None:
    server = start_server(tmp_path / "log", checkpoint)
    try:
        until = time.monotonic() + 60
        while "engine: loading" not in server.output and time.monotonic() < until:
            time.sleep(0.01)
        assert server.stop() == 0, server.output
        assert "Traceback" not in server.output
    finally:
        server.close()
