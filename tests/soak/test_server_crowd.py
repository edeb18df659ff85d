"""1,000 clients that stream at the same time, three rounds: nobody is turned away, and memory does not grow."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.server.conftest import ROOT, start_server

CLIENTS, SECONDS, ROUNDS = 1000, 60, 3


def resident(pid: int) -> int:
    """Bytes of the server and the processes it started."""
    process = psutil.Process(pid)
    return sum(each.memory_info().rss for each in [process, *process.children(recursive=True)])


@pytest.mark.slow("server-crowd")
@pytest.mark.timeout(900)
def test_a_thousand_streaming_clients(checkpoint: Path, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    server = start_server(tmp_path / "log", checkpoint, max_queue=2000).wait()
    rounds = []
    try:
        for _ in range(ROUNDS):
            command = [sys.executable, "-m", "tests.soak.crowd_client", server.url, str(CLIENTS), str(SECONDS)]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=SECONDS * 4)
            statuses = json.loads(done.stdout)
            load = server.until_idle(10)
            rounds.append({"statuses": statuses, "resident_mb": round(resident(server.process.pid) / 2**20, 1)})
            record_property("row", rounds[-1])
            assert load["kv_pages_free"] == load["kv_pages_total"]
        assert server.stop() == 0
    finally:
        server.close()
    for row in rounds:
        statuses = row["statuses"]
        assert statuses.get("200", 0) >= 0.99 * sum(statuses.values()), row
        assert "429" not in statuses
        assert not any(status.startswith("5") for status in statuses)
    memory = [row["resident_mb"] for row in rounds]
    assert max(memory) <= 1.05 * memory[0], memory
