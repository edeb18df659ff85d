"""K15 and its like: whatever a candidate does to its process, it costs only itself."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import psutil
import pytest
import torch

from mla_serve.backends.registry import load_backends
from mla_serve.errors import UserError
from mla_serve.selection.decision import CandidateResult, Decision
from mla_serve.selection.isolated import Isolated
from mla_serve.selection.probe import probe
from mla_serve.selection.selector import Selector
from mla_serve.selection.timing import Effort
from mla_serve.selection.workshop import Closed
from mla_serve.shapes import AttentionShape
from tests.selection import misbehaving as m
from tests.selection.fakes import SMALL, decode, prefill

EFFORT = Effort(least_rounds=2, most_rounds=3, milliseconds=20.0, plans=2)


@pytest.fixture(scope="module")
def shared() -> Iterator[Isolated]:
    """One process for all tests that leave it alive: importing torch is most of the time they take."""
    measurer = Isolated(torch.device("cpu"), effort=EFFORT)
    yield measurer
    measurer.close()


@pytest.fixture
def isolated(shared: Isolated) -> Isolated:
    shared.seconds = 15.0
    shared._strikes.clear()
    return shared


def by_name(decision: Decision) -> dict[str, CandidateResult]:
    return {row.label: row for row in decision.candidates}


def children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def test_k15_who_breaks_the_worker_costs_only_itself(cpu: torch.device, isolated: Isolated) -> None:
    isolated.seconds = 2.0
    bad = [m.Aborts, m.Hangs, m.Hoards, m.Floods, m.Segfaults, m.Exits, m.AbortsLater]
    backends = [cls(cpu) for cls in bad] + [m.Right(cpu), *load_backends(cpu, only={"torch-mla"})]
    selector = Selector(cpu, backends=backends, measurer=isolated)
    decision = selector.measure(decode())
    rows = by_name(decision)
    expected = {
        "aborts": ("crashed", "signal 6, Aborted; it printed: terminate called without an active exception"),
        "hangs": ("timed-out", "did not return within 2 s"),
        "hoards": ("crashed", "memory"),
        "floods": ("crashed", "printed more than 16 MiB"),
        "segfaults": ("crashed", "signal 11, Segmentation fault"),
        "exits": ("crashed", "exit status 3"),
        "abortslater": ("crashed", "signal 6, Aborted"),
    }
    for name, (verdict, reason) in expected.items():
        assert rows[name].verdict == verdict, rows[name]
        assert reason in (rows[name].reason or "")
        assert rows[name].ms is None
    # The pipe is cut anywhere in the flood, so the line that is kept may be the beginning of one.
    _, _, kept = (rows["floods"].reason or "").partition("it printed: ")
    assert kept
    assert "much ado about nothing".startswith(kept)
    for name in ("right", "torch-mla"):
        assert rows[name].ms is not None, rows[name]
        assert (rows[name].error or 0.0) < 1e-5
    assert decision.winner in ("right", "torch-mla")
    assert decision.floor_ms is not None
    assert selector.decide(decode()) == decision

    again = by_name(selector.measure(decode(batch=4)))
    assert "did not return" in (again["hangs"].reason or "")
    third = by_name(selector.measure(decode(batch=8)))
    assert (third["hangs"].verdict, third["aborts"].verdict) == ("timed-out", "crashed")
    assert all("not tried again" in (third[name].reason or "") for name in expected)
    assert third["right"].ms is not None


def test_the_same_rows_as_in_process(cpu: torch.device, isolated: Isolated) -> None:
    backends = load_backends(cpu)
    for shape in (prefill(q_len=16, lse=True), decode()):
        here = Selector(cpu, backends=backends, effort=EFFORT).measure(shape)
        there = Selector(cpu, backends=backends, measurer=isolated).measure(shape)
        for ours, theirs in zip(here.candidates, there.candidates, strict=True):
            assert (ours.backend, ours.padding, ours.error, ours.lse_error) == (
                theirs.backend, theirs.padding, theirs.error, theirs.lse_error,
            )  # fmt: skip
            assert (ours.ms is None) == (theirs.ms is None)
            assert ours.ms is not None or (ours.verdict, ours.reason) == (theirs.verdict, theirs.reason)


def test_a_well_behaved_worker_is_kept_and_one_killed_from_outside_is_replaced(cpu: torch.device, isolated: Isolated) -> None:
    selector = Selector(cpu, backends=[m.Right(cpu)], measurer=isolated)
    isolated.close()
    before = children()
    selector.measure(decode())
    first = children() - before
    selector.measure(decode(batch=4))
    assert children() - before == first
    for process in first:
        process.kill()
    assert selector.measure(decode(batch=8)).chosen is not None
    isolated.close()
    assert children() - before == set()


def measured_by_a_daemon(answers: multiprocessing.SimpleQueue[object]) -> None:
    cpu = torch.device("cpu")
    with closing(Selector(cpu, backends=[m.Right(cpu)], measurer=Isolated(cpu, effort=EFFORT))) as selector:
        row = selector.measure(decode()).chosen
    answers.put((multiprocessing.current_process().daemon, row is not None and row.ms is not None))


def test_a_daemonic_process_may_measure_too() -> None:
    """vLLM's workers are daemonic: multiprocessing gives those no children."""
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.SimpleQueue()
    process = spawn.Process(target=measured_by_a_daemon, args=(answers,), daemon=True)
    process.start()
    process.join(120)
    assert process.exitcode == 0
    assert answers.get() == (True, True)


def test_a_pause_stops_the_clock_and_nobody_is_blamed(cpu: torch.device, isolated: Isolated) -> None:
    rows: list[CandidateResult | None] = []
    selector = Selector(cpu, backends=[m.Right(cpu)], measurer=isolated)
    selector.measure(decode())
    isolated.seconds = 1.0
    thread = threading.Thread(target=lambda: rows.append(selector.measure(decode(batch=4)).chosen))
    thread.start()
    isolated.shop.pause()
    time.sleep(1.5)  # longer than a candidate may take
    workers = [child for child in children() if "mla_serve.selection.worker" in child.cmdline()]
    assert {worker.status() for worker in workers} == {psutil.STATUS_STOPPED}
    isolated.shop.resume()
    thread.join(30)
    assert rows[0] is not None
    assert rows[0].verdict == "chosen"


def test_who_waits_for_a_stopped_workshop_blames_nobody(cpu: torch.device) -> None:
    isolated = Isolated(cpu)
    raised: list[BaseException] = []

    def measure() -> None:
        try:
            Selector(cpu, backends=[m.Hangs(cpu)], measurer=isolated).measure(decode())
        except Closed as error:
            raised.append(error)

    thread = threading.Thread(target=measure)
    thread.start()
    time.sleep(0.5)
    isolated.shop.stop()
    thread.join(5)
    isolated.close()
    assert len(raised) == 1


def test_a_budget_ends_what_hangs(cpu: torch.device, isolated: Isolated) -> None:
    Selector(cpu, backends=[m.Right(cpu)], measurer=isolated).measure(decode())  # the worker is there and warm
    backends = [m.Hangs(cpu), m.Right(cpu), *load_backends(cpu, only={"torch-mla"})]
    selector = Selector(cpu, backends=backends, measurer=isolated)
    began = time.monotonic()
    decisions = probe(selector, [decode(), decode(batch=4)], budget_s=2.0)
    assert time.monotonic() - began < isolated.seconds, "it was not waited for to the end"
    assert len(selector.table) == 0, "what was not measured is no entry of the table"
    assert [decision.policy for decision in decisions] == ["availability"] * 2
    for decision in decisions:
        assert decision.note == "not measured: the budget of 2 s was spent"
        assert {row.verdict for row in decision.candidates} <= {"chosen", "not-measured"}


def test_a_bucket_that_cannot_even_be_laid_out(cpu: torch.device, isolated: Isolated) -> None:
    huge = AttentionShape.decode(SMALL, batch=1 << 14, kv_len=1 << 24, dtype="float32", page_size=16)
    with pytest.raises(UserError, match="GiB to measure"):
        Selector(cpu, backends=[m.Right(cpu)], measurer=isolated).measure(huge)


PARENT = """
import torch
from mla_serve.selection.isolated import Isolated
from mla_serve.selection.selector import Selector
from tests.selection.fakes import decode
from tests.selection.misbehaving import Hangs
import psutil, threading
cpu = torch.device("cpu")
selector = Selector(cpu, backends=[Hangs(cpu)], measurer=Isolated(cpu))
threading.Thread(target=selector.measure, args=[decode()], daemon=True).start()
import time
while len(pids := psutil.Process().children(recursive=True)) < 2: time.sleep(0.05)
time.sleep(0.3)
print(*(p.pid for p in pids), flush=True)
time.sleep(600)
"""


def test_the_worker_dies_with_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, cwd=os.getcwd()) as parent:
        assert parent.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        workers[0].send_signal(signal.SIGSTOP)
        parent.kill()
    _, alive = psutil.wait_procs(workers, timeout=5)
    assert all(process.status() == psutil.STATUS_ZOMBIE for process in alive)  # where nobody reaps orphans
