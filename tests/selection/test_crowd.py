"""Several processes and one table: nothing is lost, nothing is measured twice, and a kill costs one bucket."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mla_serve.selection.table import DecisionTable

ROOT = Path(__file__).resolve().parents[2]


def run(directory: Path, *modes: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.selection.crowd", str(directory), *modes]
    result = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, timeout=240)
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One process for all: importing torch takes longer than what they do."""
    return run(tmp_path_factory.mktemp("crowd"), "requests=1000", "probers=3", "writers=8", "kills=5")


def test_two_processes_and_1000_requests_measure_each_of_5_buckets_once(crowd: dict[str, Any]) -> None:
    measured = Counter(crowd["requests"])
    assert len(measured) == 5
    assert set(measured.values()) == {1}


def test_probers_of_one_table_share_the_work(crowd: dict[str, Any]) -> None:
    measured = Counter(crowd["probers"])
    assert len(measured) == 24
    assert set(measured.values()) == {1}


def test_eight_writers_lose_nothing(crowd: dict[str, Any]) -> None:
    assert crowd["writers"] == 8 * 16


def test_a_kill_leaves_every_finished_decision(crowd: dict[str, Any]) -> None:
    check_kills(crowd["kills"], 5)


@pytest.mark.slow
def test_20_kills(tmp_path: Path) -> None:
    check_kills(run(tmp_path, "kills=20")["kills"], 20)


def check_kills(found: list[tuple[int, int, int]], count: int) -> None:
    assert len(found) == count
    for said, held, again in found:
        assert 1 <= said <= held <= said + 1, "one more may be in the file than it had time to tell"
        assert again == held + 4, "and the next prober goes on from there"


@pytest.mark.slow
def test_20_kills_of_the_command(tmp_path: Path) -> None:
    """`mla-serve probe`, killed with all it has started at random times; each goes on where the one before was stopped."""
    table, before = tmp_path / "table.json", 0
    command = [sys.executable, "-m", "mla_serve.cli", "probe", "--out", str(table), "--threads", "1"]
    for _ in range(20):
        with subprocess.Popen(
            command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env=dict(os.environ)
        ) as prober:
            assert prober.stderr is not None
            lines = [prober.stderr.readline()]
            time.sleep(random.uniform(0.0, 8.0))
            prober.kill()
            lines += prober.stderr.readlines()
        said = sum(line.startswith(b"probed ") for line in lines)
        held = len(DecisionTable.load(table))
        assert max(before, said) <= held
        before = held
    assert before > 0
