"""Probing beside a server, through `mla-serve serve` and with a third party's kernels: no token, no process is lost by it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from mla_serve.selection.table import DecisionTable
from tests.server.conftest import ROOT, Server

BAD = ("aborts", "hangs", "hoards", "floods")
WORKER = "mla_serve.selection.worker"
Serve = Callable[..., Server]


def plugin(directory: Path, *names: str) -> Path:
    """An installed distribution, as far as importlib.metadata can tell, with kernels of `tests.selection.misbehaving`."""
    info = directory / "misbehaving-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: misbehaving\nVersion: 1\n")
    lines = [f"{name} = tests.selection.misbehaving:{name.capitalize()}" for name in names]
    (info / "entry_points.txt").write_text("\n".join(["[mla_serve.backends]", *lines, ""]))
    return directory


@pytest.fixture
def serve(checkpoint: Path, tmp_path: Path) -> Iterator[Serve]:
    """Starts `mla-serve serve` with these options; kernels of the named kinds are installed."""
    started: list[Server] = []

    def start(*options: str, kernels: tuple[str, ...] = ()) -> Server:
        number = len(started)
        path = [str(ROOT), *([str(plugin(tmp_path / f"plugin{number}", *kernels))] if kernels else [])]
        command = [
            sys.executable, "-m", "mla_serve.cli", "serve", str(checkpoint), "--port", "0", "--threads", "1",
            "--num-pages", "512", "--decisions", str(tmp_path / f"{number}.json"), "--served-model-name", "scripted", *options,
        ]  # fmt: skip
        log = tmp_path / f"{number}.log"
        with log.open("w") as out:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"},
            )  # fmt: skip
        started.append(Server(process, log))
        return started[-1].wait()

    yield start
    for server in started:
        server.close()


def stream(server: Server, tokens: int = 60, during: Callable[[], None] | None = None) -> str:
    """The text of a greedy stream; `during` is called after its first token."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        pieces: list[str] = []
        for chunk in client.completions.create(
            model="scripted", prompt="Which kernel is it?", max_tokens=tokens, temperature=0, stream=True,
            extra_body={"ignore_eos": True},
        ):  # fmt: skip
            pieces += [choice.text for choice in chunk.choices]
            if during is not None:
                during, now = None, during
                now()
    return "".join(pieces)


def decisions(server: Server) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = server.get("/attention/decisions").json()["decisions"]
    return found


def workers(server: Server) -> list[psutil.Process]:
    return [
        child for child in psutil.Process(server.engine_pid()).children(recursive=True) if WORKER in " ".join(child.cmdline())
    ]


def test_k15_kernels_that_break_their_process_beside_a_stream(server: Server, serve: Serve) -> None:
    expected = stream(server)
    assert not any(decision["policy"] == "measured" for decision in decisions(server))
    server = serve("--probe", "on-demand", "--kernel-timeout", "2.5", kernels=BAD)
    pids = server.process.pid, server.engine_pid()
    assert stream(server) == expected
    assert server.process.poll() is None
    assert (server.process.pid, server.engine_pid()) == pids
    assert server.get("/health").status_code == 200
    decodes = [decision for decision in decisions(server) if decision["bucket"]["phase"] == "decode"]
    assert len(decodes) >= 2, "the stream met a shape that the warm-up had not"
    for decision in decodes:
        rows = {row["backend"]: row for row in decision["candidates"]}
        assert (decision["policy"], decision["winner"]) == ("measured", "torch-mla")
        assert rows["torch-mla"]["ms"] > 0
        assert [rows[name]["verdict"] for name in BAD] == ["crashed", "timed-out", "crashed", "crashed"]
        assert all(rows[name]["reason"] for name in BAD)
    assert server.stop() == 0


def test_an_idle_server_probes_and_a_request_stops_it(serve: Serve, tmp_path: Path) -> None:
    server = serve("--probe", "idle")
    assert "by kernel class; not measured yet, probing while idle" in server.output
    assert {decision["policy"] for decision in decisions(server)} == {"availability"}, "the start waits for no probe"
    expected = stream(server)
    until = time.monotonic() + 60
    while not any(worker.status() == psutil.STATUS_RUNNING for worker in workers(server)):
        assert time.monotonic() < until, server.output
        time.sleep(0.02)

    def all_stopped() -> None:
        until = time.monotonic() + 5  # a signal takes effect when its process is next scheduled
        while any(worker.status() != psutil.STATUS_STOPPED for worker in workers(server)) and time.monotonic() < until:
            time.sleep(0.01)
        assert {worker.status() for worker in workers(server)} == {psutil.STATUS_STOPPED}

    assert stream(server, during=all_stopped) == expected
    while not any(d["policy"] == "measured" and d["bucket"]["phase"] == "decode" for d in decisions(server)):
        assert time.monotonic() < until, server.output
        time.sleep(0.1)
    assert stream(server) == expected, "with other kernels than before"
    left = workers(server)
    assert server.stop() == 0
    psutil.wait_procs(left, timeout=5)
    assert not any(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in left)
    assert len(DecisionTable.load(tmp_path / "0.json")) > 0
    server = serve("--probe", "off", "--decisions", str(tmp_path / "0.json"))
    assert any(d["policy"] == "measured" and d["note"] is None for d in decisions(server)), "a shipped table serves at once"
    assert not workers(server)
    assert stream(server) == expected


@pytest.mark.slow("kills")
def test_20_kills_of_a_server_that_probes(serve: Serve, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """The engine, which probes while it is idle, is killed at random times; the next one goes on with its table."""
    table, before, kills = tmp_path / "kills-0.json", set[str](), 0

    def measured(found: Iterable[dict[str, Any]]) -> set[str]:
        own = (d for d in found if d["policy"] == "measured" and d["note"] is None)  # not a neighbour's
        return {json.dumps(d["bucket"], sort_keys=True) for d in own}

    while kills < 20:
        server = serve("--probe", "idle", "--decisions", str(table))
        time.sleep(random.uniform(0.0, 10.0))
        said, left = measured(decisions(server)), workers(server)
        os.kill(server.engine_pid(), signal.SIGKILL)
        assert server.process.wait(30) != 0, server.output
        psutil.wait_procs(left, timeout=10)
        held = measured(decision.to_json() for decision in DecisionTable.load(table))
        if left:
            kills += 1
            row = {"killed": "serve --probe idle", "said": len(said), "in_the_file": len(held), "before": len(before)}
            record_property("row", row)
        assert said | before <= held
        table, before = (table, held) if left else (tmp_path / f"kills-{kills}.json", set())
