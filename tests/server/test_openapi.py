"""schemathesis against the server's own OpenAPI document: whatever is sent is answered as the document says."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import SEED
from tests.server.conftest import ROOT, Server, start_server

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


@pytest.fixture(scope="module")
def short(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose answers are short, so that many of them fit into a minute."""
    running = start_server(tmp_path_factory.mktemp("openapi") / "server.log", checkpoint, max_output_tokens=8)
    try:
        yield running.wait()
    finally:
        running.close()


def fuzz(server: Server, directory: Path, seconds: int) -> dict[str, Any]:
    """Runs schemathesis for so long. Its report, and "said", what it printed."""
    report = directory / "report.json"
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "--checks", CHECKS, "--phases",
        "fuzzing", "--max-time", str(seconds), "--workers", "2", "--seed", str(SEED), "--no-color", "--report", "json",
        "--report-json-path", str(report), "--continue-on-failure", "--suppress-health-check", "all", "--request-timeout", "60",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds * 3 + 120, check=False)
    assert report.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    return {**json.loads(report.read_text()), "said": done.stdout[-8000:], "status": done.returncode}


def test_a_part(short: Server, tmp_path: Path) -> None:
    found = fuzz(short, tmp_path, 45)
    assert found["status"] == 0, found["said"]
    load = short.until_idle(5)
    assert (load["running"], load["waiting"]) == (0, 0)


@pytest.mark.slow("openapi")
@pytest.mark.timeout(1500)
def test_five_minutes(short: Server, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    found = fuzz(short, tmp_path, 300)
    record_property("figures", {"report": {key: value for key, value in found.items() if key not in ("said",)}})
    assert found["status"] == 0, found["said"]
