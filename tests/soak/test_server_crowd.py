"""1,000 clients that stream at the same time, three rounds: nobody is turned away, and memory does not grow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.server.conftest import ROOT, Server, start_server

CLIENTS, SECONDS, ROUNDS = 1000, 60, 3
FLAT = 1.05


def resident(server: Server) -> dict[str, float]:
    """MiB of the server and of its engine."""
    pids = {"server": server.process.pid, "engine": server.engine_pid()}
    return {name: round(psutil.Process(pid).memory_info().rss / 2**20, 1) for name, pid in pids.items()}


@pytest.mark.slow("server-crowd")
@pytest.mark.timeout(900)
def test_a_thousand_streaming_clients(checkpoint: Path, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """The clients have a core of their own where there are two."""
    server = start_server(tmp_path / "log", checkpoint, max_queue=2000).wait()
    cores = sorted(os.sched_getaffinity(0))
    rounds = []
    try:
        if len(cores) > 1:
            for process in (psutil.Process(server.process.pid), psutil.Process(server.engine_pid())):
                process.cpu_affinity(cores[:-1])
        for _ in range(ROUNDS):
            command = [sys.executable, "-m", "tests.soak.crowd_client", server.url, str(CLIENTS), str(SECONDS), str(cores[-1])]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=SECONDS * 4)
            load = server.until_idle(10)
            assert load["kv_pages_free"] == load["kv_pages_total"]
            rounds.append({"cores": len(cores), **json.loads(done.stdout), "resident_mib": resident(server)})
            record_property("row", rounds[-1])
        assert server.stop() == 0
    finally:
        server.close()
    memory = {name: [row["resident_mib"][name] for row in rounds] for name in ("server", "engine")}
    growth = {name: round(max(found) / found[0], 4) for name, found in memory.items()}
    record_property("figures", {"clients": CLIENTS, "seconds": SECONDS, "memory_over_first_round": growth, "asked": FLAT})
    for row in rounds:
        statuses = row["statuses"]
        assert row["most_at_once"] == CLIENTS
        assert statuses.get("200", 0) >= 0.99 * sum(statuses.values()), row
        assert "429" not in statuses
        assert not any(status.startswith("5") for status in statuses)
    assert max(growth.values()) <= FLAT, memory
