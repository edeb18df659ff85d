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

EFFORT = timing.Effort(least_rounds=15, most_rounds=15, plans=1, stop_at=float("inf"))

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
    usable = [
        c for c in candidates(shape, selector.backends) if c.verdict is None and check(c.backend, shape, seed=2).failure is None
    ]
    trials = [Trial.make(candidate, call) for candidate in usable]
    chosen = Chosen(selector, call)
    contestants: list[timing.Trial] = [*trials, chosen]
    for contestant in contestants:
        contestant.run()
    *timings, chosen_time = timing.time_trials(contestants, timing.clock(selector.device), EFFORT)

    def best(padded: bool) -> tuple[str | None, float | None]:
        of_form = [(c, t) for c, t in zip(usable, timings, strict=True) if (c.padding is not None) == padded]
        if not of_form:
            return None, None
        candidate, time = min(of_form, key=lambda pair: pair[1].ms)
        form = f" ({paddings.describe(shape, candidate.padding)})" if candidate.padding else ""
        return candidate.label + form, time.ms

    (native, native_ms), (padded, padded_ms) = best(False), best(True)
    return Row(
        phase=shape.phase.value,
        batch=shape.batch,
        heads=shape.heads,
        q_len=shape.q_len,
        kv_len=shape.kv_len,
        qk=shape.qk,
        v=shape.v,
        dtype=shape.dtype,
        native=native,
        native_ms=native_ms,
        padded=padded,
        padded_ms=padded_ms,
        chosen=chosen.name,
        chosen_ms=chosen_time.ms,
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
