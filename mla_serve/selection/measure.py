"""Measures one bucket: every candidate through the gate, the survivors against the clock, the winner by rank."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import psutil
import torch

from mla_serve.backends.base import AttentionError, Plan, State
from mla_serve.errors import UserError
from mla_serve.selection import timing
from mla_serve.selection.candidates import Candidate
from mla_serve.selection.decision import CandidateResult, Verdict
from mla_serve.selection.floor import traffic
from mla_serve.selection.gate import GateResult, check, describe, spot_check
from mla_serve.selection.inputs import Call, full_size, limits_of, make_call
from mla_serve.selection.timing import Effort, Measure
from mla_serve.shapes import AttentionShape


class TooLarge(UserError):
    """A bucket whose inputs do not fit into memory, so that nothing can be measured."""


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


class InProcess:
    """Measures in this very process: a kernel that crashes takes it along, so only for kernels that are known to behave.

    `measure` replaces the device's clock; `clean_pool` forgives kernels that let NaN through (see `gate.check`).
    """

    def __init__(
        self, device: torch.device, *, measure: Measure | None = None, effort: Effort | None = None, clean_pool: bool = False
    ) -> None:
        self.device, self.effort, self.clean_pool = device, effort or Effort(), clean_pool
        self._measure = measure

    @torch.inference_mode()
    def __call__(self, shape: AttentionShape, candidates: Sequence[Candidate]) -> list[CandidateResult]:
        """One row per candidate, in their order: figures for those that ran, a verdict and reason for those that are out.

        The verdict of a row with `ms` is preliminary; `ranking.rank` gives it. Raises TooLarge before anything is allocated.
        """
        _make_room(shape, self.device)
        seed = zlib.crc32(str(shape).encode())  # the same inputs for the same bucket, others for each candidate
        call = make_call(shape, *full_size(shape), self.device, seed=seed)
        rows: list[CandidateResult] = []
        trials: dict[int, Trial] = {}
        for i, candidate in enumerate(candidates):
            if candidate.verdict is not None:
                rows.append(candidate.result())
                continue
            trial, row = self._qualify(candidate, call, seed + 1 + 2 * i)
            rows.append(row)
            if trial is not None:
                trials[i] = trial
        if self._measure is None:
            self._measure = timing.clock(self.device)
        watch = _Guarded(self._measure)
        timings = timing.time_trials(list(trials.values()), watch, self.effort)
        for (i, trial), time in zip(trials.items(), timings, strict=True):
            if id(trial) in watch.failures:
                rows[i] = replace(rows[i], verdict="crashed", reason=watch.failures[id(trial)])
            else:
                rows[i] = replace(rows[i], reason=time.stopped, ms=time.ms, plan_ms=time.plan_ms, spread=time.spread)
        return rows

    def _qualify(self, candidate: Candidate, call: Call, seed: int) -> tuple[Trial | None, CandidateResult]:
        """The gate: a trial that may be timed and its figures, or None and why not."""
        try:
            gate = check(candidate.backend, call.shape, seed=seed, clean_pool=self.clean_pool)
            if gate.failure is not None:
                return None, _row(candidate, gate, "disqualified", gate.failure)
            trial = Trial.make(candidate, call)
            full = spot_check(candidate.backend, call, trial.current, seed=seed)
        except torch.OutOfMemoryError as error:
            return None, candidate.result("crashed", f"out of memory: {describe(error)}")
        except AttentionError as error:
            return None, candidate.result("unsupported", describe(error))
        except Exception as error:  # noqa: BLE001 - a candidate may raise anything; its reason is kept and the others go on
            return None, candidate.result("unsupported", f"raised {describe(error)}")
        worst = GateResult(
            _larger(gate.error, full.error), _larger(gate.lse_error, full.lse_error), gate.leaks_nan, full.failure
        )
        if full.failure is not None:
            return None, _row(candidate, worst, "disqualified", full.failure)
        return trial, _row(candidate, worst, "slower", None)


def _make_room(shape: AttentionShape, device: torch.device) -> None:
    """Raises TooLarge unless inputs, and a copy of them as a kernel may make, fit into the memory that is free."""
    cuda = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if cuda else psutil.virtual_memory().available
    needed = 2 * traffic(shape)
    if needed > free:
        raise TooLarge(
            f"{shape.phase.value} of {shape.batch} x {shape.q_len} on {shape.kv_len} tokens needs about "
            f"{needed / 2**30:.1f} GiB to measure and {free / 2**30:.1f} GiB are free; ask for a smaller batch or shorter keys"
        )


def _larger(a: float | None, b: float | None) -> float | None:
    return max((x for x in (a, b) if x is not None), default=None)


def _row(candidate: Candidate, gate: GateResult, verdict: Verdict, reason: str | None) -> CandidateResult:
    return CandidateResult(
        candidate.native.name, candidate.padding, verdict, reason,
        error=gate.error, lse_error=gate.lse_error, leaks_nan=gate.leaks_nan,
    )  # fmt: skip
