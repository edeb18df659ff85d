"""Real server processes, each with the embedded engine; one for the session, others where a test needs its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.server.scripted import MAX_LEN, make_checkpoint

ROOT = Path(__file__).resolve().parents[2]
MODEL = "scripted"
START_SECONDS = 120


@dataclass
class Server:
    """A running server process."""

    process: subprocess.Popen[str]
    log: Path
    url: str = ""
    http: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=60, verify=False))

    def wait(self) -> Server:
        """Until it answers."""
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until and self.process.poll() is None:
            if (found := re.search(r"address +(http://\S+)", self.output)) is not None:
                self.url = found[1]
                return self
            time.sleep(0.05)
        raise AssertionError(f"the server did not start:\n{self.output}")

    @property
    def output(self) -> str:
        return self.log.read_text(encoding="utf-8")

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return self.http.get(self.url + path, **kwargs)

    def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        return self.http.post(self.url + path, json=body, **kwargs)

    def complete(self, **body: Any) -> dict[str, Any]:
        """The JSON of a completion that must succeed."""
        response = self.post("/v1/completions", body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def load(self) -> dict[str, Any]:
        answer: dict[str, Any] = self.get("/load").json()
        return answer

    def until_idle(self, seconds: float) -> dict[str, Any]:
        """The load once nothing is open, runs or waits and every page is free, or after so many seconds."""
        until = time.monotonic() + seconds
        while True:
            load = self.load()
            held = load["kv_pages_total"] - load["kv_pages_free"]
            idle = not (load["server_load"] or load["running"] or load["waiting"] or held)
            if idle or time.monotonic() > until:
                return load

    def engine_pid(self) -> int:
        """The process that the server started."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        found = [int(c) for c in children if b"mla_serve.engine" in Path(f"/proc/{c}/cmdline").read_bytes()]
        assert len(found) == 1, children
        return found[0]

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        self.process.terminate()
        try:
            return self.process.wait(60)
        finally:
            self.close()

    def close(self) -> None:
        """Leaves nothing behind, however the server fared."""
        self.http.close()
        self.process.kill()
        self.process.wait()


Start = Callable[..., Server]


def start_server(log: Path, model: Path, *, engine: dict[str, Any] | None = None, **settings: Any) -> Server:
    """Starts a process and does not wait for it."""
    arguments = {
        "port": 0, "served_model_name": MODEL,
        "engine": {"model": str(model), "policy": "availability", "threads": 1, "decisions": str(log.with_suffix(".json"))}
        | (engine or {}),
        **settings,
    }  # fmt: skip
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.server.launch", json.dumps(arguments)],
            cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
    return Server(process, log)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("scripted")
    make_checkpoint(directory)
    return directory


@pytest.fixture(scope="session")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server that most tests share, with default settings."""
    running = start_server(tmp_path_factory.mktemp("log") / "server.log", checkpoint)
    try:
        yield running.wait()
    finally:
        assert running.stop() == 0, running.output


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


__all__ = ["MAX_LEN", "MODEL", "Server", "start_server"]
