"""Measures one bucket: every candidate through the gate, the survivors against the clock, the winner by rank."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import psutil
import torch

from mla_serve.backends.base import AttentionError, Plan, State
from mla_serve.errors import UserError
from mla_serve.selection import timing
from mla_serve.selection.candidates import Candidate
from mla_serve.selection.decision import CandidateResult, Verdict
from mla_serve.selection.floor import Rates, traffic
from mla_serve.selection.gate import GateResult, check, describe, spot_check
from mla_serve.selection.inputs import Call, full_size, limits_of, make_call
from mla_serve.selection.timing import Effort, Measure
from mla_serve.shapes import AttentionShape

_HOST_MEMORY = "can't allocate memory"


class NotMeasured(UserError):
    """Nothing can be measured of a bucket, through no fault of its kernels."""


class TooLarge(NotMeasured):
    """A bucket whose inputs do not fit into memory."""


@dataclass(slots=True)
class Trial:
    """A candidate planned for the bucket's full size, ready to be run again and again as an engine would run it."""

    candidate: Candidate
    call: Call
    state: State
    current: Plan

    @classmethod
    def make(cls, candidate: Candidate, call: Call) -> Trial:
        backend = candidate.backend
        lens = list(call.batch.q_lens_host or ()), list(call.batch.kv_lens_host or ())
        state = backend.prepare(call.shape, limits_of(lens))
        return cls(candidate, call, state, backend.plan(state, call.batch, scale=call.scale))

    @property
    def label(self) -> str:
        return self.candidate.label

    def run(self) -> object:
        return self.call.run(self.candidate.backend, self.current, need_lse=self.call.shape.lse)

    def plan(self) -> object:
        self.current = self.candidate.backend.plan(self.state, self.call.batch, scale=self.call.scale, reuse=self.current)
        return self.current


class Bench:
    """One bucket on the bench: its inputs, and the candidates that are ready to be timed, by number.

    Raises TooLarge before anything is allocated.
    """

    def __init__(self, shape: AttentionShape, device: torch.device, *, clean_pool: bool) -> None:
        _make_room(shape, device)
        self.seed = zlib.crc32(str(shape).encode())  # the same inputs for the same bucket, others for each candidate
        self.clean_pool = clean_pool
        self.call = make_call(shape, *full_size(shape), device, seed=self.seed)
        self.trials: dict[int, timing.Trial] = {}

    def qualify(self, number: int, candidate: Candidate, *, gate: bool = True) -> CandidateResult:
        """The gate, and a run at full size. A candidate that passes is among `trials` then; any other's row says why not.

        `gate` False leaves the gate out, for one that has passed it before.
        """
        seed = self.seed + 1 + 2 * number
        backend = candidate.backend
        needed, free = backend.workspace_bytes(self.call.shape), _free_bytes(backend.device)
        if needed > free:
            return candidate.result(
                "not-measured", f"needs about {needed / 2**30:.1f} GiB beside its inputs and {free / 2**30:.1f} GiB are free"
            )
        try:
            passed = check(backend, self.call.shape, seed=seed, clean_pool=self.clean_pool) if gate else GateResult()
            if passed.failure is not None:
                return _row(candidate, passed, "disqualified", passed.failure)
            trial = Trial.make(candidate, self.call)
            full = spot_check(backend, self.call, trial.current, seed=seed)
            served: timing.Trial = trial
            if self.call.shape.graph and backend.device.type == "cuda" and full.failure is None:
                served = timing.Replayed(trial, backend.device)
        except (torch.OutOfMemoryError, MemoryError) as error:
            return candidate.result("crashed", f"out of memory: {describe(error)}")
        except AttentionError as error:
            return candidate.result("unsupported", describe(error))
        except torch.AcceleratorError as error:
            return candidate.result("crashed", f"raised {describe(error)}")
        except Exception as error:  # noqa: BLE001 - a candidate may raise anything; its reason is kept and the others go on
            if _HOST_MEMORY in str(error):  # torch has no type of its own for it
                return candidate.result("crashed", f"out of memory: {describe(error)}")
            return candidate.result("unsupported", f"raised {describe(error)}")
        worst = GateResult(
            _larger(passed.error, full.error), _larger(passed.lse_error, full.lse_error), passed.leaks_nan, full.failure
        )
        if full.failure is not None:
            return _row(candidate, worst, "disqualified", full.failure)
        self.trials[number] = served
        return _row(candidate, worst, "slower", None)

    def time(self, rows: Mapping[int, CandidateResult], measure: Measure, effort: Effort) -> dict[int, CandidateResult]:
        """Times the trials of these numbers in turn and returns their rows with figures; one that raises has crashed.

        The verdict of a row with `ms` is preliminary; `ranking.rank` gives it.
        """
        trials = [self.trials[number] for number in rows]
        watch = _Guarded(measure)
        timed: dict[int, CandidateResult] = {}
        times = timing.time_trials(trials, watch, effort)
        for (number, row), trial, took in zip(rows.items(), trials, times, strict=True):
            if id(trial) in watch.failures:
                timed[number] = replace(row, verdict="crashed", reason=watch.failures[id(trial)])
            else:
                timed[number] = replace(row, reason=took.stopped, ms=took.ms, plan_ms=took.plan_ms, spread=took.spread)
        return timed


class _Guarded:
    """A clock that outlives a candidate that fails after all: its time is infinite, its reason is kept."""

    def __init__(self, measure: Measure) -> None:
        self.measure = measure
        self.failures: dict[int, str] = {}

    def __call__(self, trial: timing.Trial, part: timing.Part) -> float:
        if id(trial) in self.failures:  # not by label: a kernel may have several padded forms
            return math.inf
        try:
            return self.measure(trial, part)
        except Exception as error:  # noqa: BLE001 - a candidate may raise anything; its reason is kept and the others go on
            self.failures[id(trial)] = f"raised {describe(error)} while it was timed"
            return math.inf


class BudgetSpent(UserError):
    """The time is up before a bucket was measured. `rows` say what became of each candidate."""

    def __init__(self, rows: Sequence[CandidateResult]) -> None:
        super().__init__("the budget was spent before every kernel was measured")
        self.rows = list(rows)


class Measurer(Protocol):
    """Measures all candidates of one bucket.

    `until` is a time of `time.monotonic` after which BudgetSpent is raised. `waiting` may be called now and then meanwhile.
    """

    until: float | None
    waiting: Callable[[], None]

    def __call__(self, shape: AttentionShape, candidates: Sequence[Candidate]) -> list[CandidateResult]:
        """One row per candidate, in their order: figures for those that ran, a verdict and reason for those that are out.

        The verdict of a row with `ms` is preliminary; `ranking.rank` gives it. Raises TooLarge and BudgetSpent.
        """
        ...

    def floor_ms(self, shape: AttentionShape) -> float | None:
        """See `floor.Rates`; None where the rates cannot be measured."""
        ...

    def close(self) -> None:
        """Frees what measuring holds on to."""
        ...


class InProcess:
    """Measures in this very process: a kernel that crashes takes it along, so only for kernels that are known to behave.

    `measure` replaces the device's clock; `clean_pool` forgives kernels that let NaN through (see `gate.check`).
    """

    def __init__(
        self, device: torch.device, *, measure: Measure | None = None, effort: Effort | None = None, clean_pool: bool = False
    ) -> None:
        self.device, self.effort, self.clean_pool = device, effort or Effort(), clean_pool
        self.until: float | None = None
        self.waiting: Callable[[], None] = lambda: None
        self._measure = measure
        self._rates = Rates.of(device)

    @torch.inference_mode()
    def __call__(self, shape: AttentionShape, candidates: Sequence[Candidate]) -> list[CandidateResult]:
        """See `Measurer`."""
        bench = Bench(shape, self.device, clean_pool=self.clean_pool)
        rows = [candidate.result() for candidate in candidates]
        for number, candidate in enumerate(candidates):
            if candidate.verdict is None:
                if self.until is not None and time.monotonic() >= self.until:
                    raise BudgetSpent(rows)
                rows[number] = bench.qualify(number, candidate)
        if self._measure is None:
            self._measure = timing.clock(self.device)
        for number, row in bench.time({number: rows[number] for number in bench.trials}, self._measure, self.effort).items():
            rows[number] = row
        return rows

    def floor_ms(self, shape: AttentionShape) -> float | None:
        return self._rates.floor_ms(shape)

    def close(self) -> None:
        """There is nothing to free."""


def _make_room(shape: AttentionShape, device: torch.device) -> None:
    """Raises TooLarge unless inputs, and a copy of them as a kernel may make, fit into the memory that is free."""
    free = _free_bytes(device)
    needed = 2 * traffic(shape)
    if needed > free:
        raise TooLarge(
            f"{shape.phase.value} of {shape.batch} x {shape.q_len} on {shape.kv_len} tokens needs about "
            f"{needed / 2**30:.1f} GiB to measure and {free / 2**30:.1f} GiB are free; ask for a smaller batch or shorter keys"
        )


def _free_bytes(device: torch.device) -> int:
    """Of the device's memory; what torch's own cache holds on to is free as well."""
    if device.type != "cuda":
        return int(psutil.virtual_memory().available)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + cached


def _larger(a: float | None, b: float | None) -> float | None:
    return max((x for x in (a, b) if x is not None), default=None)


def _row(candidate: Candidate, gate: GateResult, verdict: Verdict, reason: str | None) -> CandidateResult:
    return CandidateResult(
        candidate.native.name, candidate.padding, verdict, reason,
        error=gate.error, lse_error=gate.lse_error, leaks_nan=gate.leaks_nan,
    )  # fmt: skip
