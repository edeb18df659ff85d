"""Several processes and one table: nothing is lost, nothing is measured twice, and a kill costs one bucket."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mla_serve.selection.claims import Claims
from mla_serve.selection.table import DecisionTable
from mla_serve.shapes import Bucket
from tests.selection.fakes import decode

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


@pytest.mark.slow("kills")
def test_20_kills(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    found = run(tmp_path, "kills=20")["kills"]
    for said, held, again in found:
        record_property("row", {"killed": "a process that probes", "said": said, "in_the_file": held, "after_another": again})
    check_kills(found, 20)


def check_kills(found: list[tuple[int, int, int]], count: int) -> None:
    assert len(found) == count
    for said, held, again in found:
        assert 1 <= said <= held <= said + 1, "one more may be in the file than it had time to tell"
        assert again == held + 4, "and the next prober goes on from there"


@pytest.mark.slow("kills")
def test_20_kills_of_the_command(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """`mla-serve probe`, killed at random times: each goes on where the one before was stopped, until the grid is measured and
    a new table is begun."""
    table, before, kills = tmp_path / "0.json", 0, 0
    while kills < 20:
        words = "probe", "--out", str(table), "--threads", "1", "--max-model-len", "512"
        command = [sys.executable, "-m", "mla_serve.cli", *words]
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as prober:
            assert prober.stderr is not None
            lines = [prober.stderr.readline()]
            time.sleep(random.uniform(0.0, 8.0))
            alive = prober.poll() is None
            prober.kill()
            lines += prober.stderr.readlines()
        said = sum(line.startswith(b"probed ") for line in lines)
        held = len(DecisionTable.load(table))
        if alive:
            kills += 1
            record_property("row", {"killed": "mla-serve probe", "said": said, "in_the_file": held, "before": before})
        assert max(before, said) <= held
        table, before = (table, held) if alive else (tmp_path / f"{kills}.json", 0)


def test_a_claim_is_waited_for_but_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mla_serve.selection.claims.PATIENCE", 0.2)
    bucket, waits = Bucket.of(decode()), []
    first, second = Claims(tmp_path / "table.json"), Claims(tmp_path / "table.json")
    second.waiting = lambda: waits.append(1)
    with first.claim(bucket, wait=False) as ours:
        assert ours
        with second.claim(bucket, wait=False) as theirs:
            assert not theirs
        with second.claim(Bucket.of(decode(batch=8)), wait=False) as another:
            assert another
        with second.claim(bucket, wait=True) as theirs:
            assert not theirs, "who holds it may be stopped"
    assert waits
    with second.claim(bucket, wait=False) as theirs:
        assert theirs


def test_without_a_file_every_claim_is_granted(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (None, tmp_path / "file" / "table.json"):
        with Claims(path).claim(Bucket.of(decode()), wait=True) as ours:
            assert ours
