"""`mla-serve bench attention`: native, padded and chosen beside each other, in one run, on the shapes of a grid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from mla_serve.backends.base import Plan
from mla_serve.selection import Decision, Kernel, Selector, candidates, paddings, timing
from mla_serve.selection.gate import check
from mla_serve.selection.inputs import Call, full_size, limits_of, make_call
from mla_serve.selection.measure import Trial
from mla_serve.shapes import AttentionShape, MLADims, Phase

HEAT = timing.Effort(least_rounds=3, most_rounds=3, plans=1)
"""Finds the fastest kernel of each form."""
FINAL = timing.Effort(least_rounds=31, most_rounds=31, plans=1, stop_at=float("inf"))
"""Native, padded and chosen against each other: enough rounds that one kernel timed twice shows one time."""

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Row:
    """One shape. Milliseconds, medians of interleaved rounds; None where no kernel of that form is right.

    `native` and `padded` are the fastest kernel of each form that passes the gate; `chosen` went through the Selector's
    look-up, call by call, with the table of an earlier process.
    """

    phase: str
    batch: int
    heads: int
    q_len: int
    kv_len: int
    qk: int
    v: int
    dtype: str
    native: str | None
    native_ms: float | None
    padded: str | None
    padded_ms: float | None
    chosen: str
    chosen_ms: float
    why: str

    @property
    def over_native(self) -> float | None:
        """How many times faster than native the choice is."""
        return self.native_ms / self.chosen_ms if self.native_ms else None

    @property
    def over_best(self) -> float:
        """The choice's time over the better of native and padded."""
        return self.chosen_ms / min(ms for ms in (self.native_ms, self.padded_ms) if ms)

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "times_faster_than_native": self.over_native, "over_best": self.over_best}


class Chosen:
    """A trial that asks the Selector at every call, as an engine does at every step."""

    label = "chosen"

    def __init__(self, selector: Selector, call: Call) -> None:
        shape = self.shape = call.shape
        dims = MLADims(heads=shape.heads, nope=shape.qk - shape.rope, rope=shape.rope, v=shape.v, latent=512)
        self.call = call
        limits = limits_of((call.batch.q_lens_host or (), call.batch.kv_lens_host or ()))
        self.bound = selector.bind(dims, dtype=shape.dtype, page_size=16, limits=limits)
        self.current: Plan = self.kernel().plan(call.batch, scale=call.scale)

    def kernel(self) -> Kernel:
        assert self.shape.phase is Phase.PREFILL
        return self.bound.prefill(self.shape.batch, self.call.batch.num_tokens, lse=self.shape.lse)

    @property
    def decision(self) -> Decision:
        return self.kernel().decision

    @property
    def name(self) -> str:
        """The kernel, and how it is padded."""
        padding = self.decision.padding
        return self.decision.label + (f" ({paddings.describe(self.shape, padding)})" if padding else "")

    def run(self) -> object:
        kernel = self.kernel()
        return kernel.run_prefill(*self.call.tensors, self.current, need_lse=self.shape.lse)

    def plan(self) -> object:
        self.current = self.kernel().plan(self.call.batch, scale=self.call.scale, reuse=self.current)
        return self.current


@torch.inference_mode()
def measure(shape: AttentionShape, selector: Selector) -> Row:
    """Times every kernel that is right for `shape`, native and padded, and the choice, in turn."""
    from mla_serve.selection import decision_sentence

    call = make_call(shape, *full_size(shape), selector.device, seed=1)
    watch = timing.clock(selector.device)
    usable = [
        candidate
        for candidate in candidates(shape, selector.backends)
        if candidate.verdict is None and check(candidate.backend, shape, seed=2).failure is None
    ]
    trials = [Trial.make(candidate, call) for candidate in usable]
    times = timing.time_trials(trials, watch, HEAT)

    def fastest(padded: bool) -> Trial | None:
        of_form = [
            (time.ms, trial) for time, trial in zip(times, trials, strict=True) if bool(trial.candidate.padding) == padded
        ]
        return min(of_form, key=lambda pair: pair[0])[1] if of_form else None

    def name(trial: Trial | None) -> str | None:
        if trial is None or trial.candidate.padding is None:
            return trial.label if trial else None
        return f"{trial.label} ({paddings.describe(shape, trial.candidate.padding)})"

    native, padded, chosen = fastest(False), fastest(True), Chosen(selector, call)
    finalists: list[timing.Trial] = [trial for trial in (native, padded, chosen) if trial is not None]
    final = {id(trial): time.ms for trial, time in zip(finalists, timing.time_trials(finalists, watch, FINAL), strict=True)}
    return Row(
        phase=shape.phase.value,
        batch=shape.batch,
        heads=shape.heads,
        q_len=shape.q_len,
        kv_len=shape.kv_len,
        qk=shape.qk,
        v=shape.v,
        dtype=shape.dtype,
        native=name(native),
        native_ms=final.get(id(native)),
        padded=name(padded),
        padded_ms=final.get(id(padded)),
        chosen=chosen.name,
        chosen_ms=final[id(chosen)],
        why=decision_sentence(chosen.decision),
    )


def bench(shapes: Sequence[AttentionShape], selector: Selector, note: Note) -> list[Row]:
    """One Row a shape; `note` hears of each as it begins."""
    rows = []
    for shape in shapes:
        note(
            f"timing {shape.phase.value} {shape.batch} x {shape.q_len}, {shape.heads} heads, {shape.qk}/{shape.v} {shape.dtype}"
        )
        rows.append(measure(shape, selector))
    return rows
