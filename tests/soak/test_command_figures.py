"""Figures that the commands themselves give, each beside what is asked of it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

Record = Callable[[str, object], None]


def run(*words: str) -> str:
    """Standard output of `mla-serve WORDS`; its progress goes where pytest's does."""
    command = [sys.executable, "-m", "mla_serve.cli", *words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=600).stdout


@pytest.mark.slow("commands")
def test_the_demo_models_grid_is_probed_in_90_seconds(tmp_path: Path, record_property: Record) -> None:
    """On two cores, measured with as many threads as an engine takes here."""
    begin = time.monotonic()
    found = json.loads(run("probe", "--out", str(tmp_path / "table.json"), "--json"))
    seconds = round(time.monotonic() - begin, 1)
    padded = sum(decision["padding"] is not None for decision in found)
    record_property("row", {"command": "probe", "buckets": len(found), "padded": padded, "seconds": seconds, "asked": 90})
    assert all(decision["policy"] == "measured" for decision in found)
    assert seconds <= 90


@pytest.mark.slow("commands")
def test_look_up_and_load_take_microseconds_and_milliseconds(record_property: Record) -> None:
    found = json.loads(run("bench", "selector", "--json"))
    figures = {name: round(found[name], 3) for name in ("median_us", "p99_us", "load_ms")}
    asked = {"median_us": 2.0, "p99_us": 10.0, "load_ms": 20.0}
    record_property("row", {"command": "bench selector", **figures, "asked": asked})
    assert all(figures[name] <= asked[name] for name in asked)
