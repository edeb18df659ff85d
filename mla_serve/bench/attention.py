"""`mla-serve bench attention`: the choice, our kernels and everybody else's, in one run, on the shapes of a grid."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mla_serve.bench.attention_contenders import CHOSEN, Chosen, our_calls, peer_calls
from mla_serve.bench.attention_peers import PeerCall, PeerModule
from mla_serve.bench.attention_rows import Row, judged
from mla_serve.bench.grids import Case
from mla_serve.selection import Selector, paddings, timing
from mla_serve.selection.floor import Rates, flops, traffic
from mla_serve.selection.gate import describe, lse_tolerance, tolerance
from mla_serve.selection.inputs import Call, make_call
from mla_serve.shapes import AttentionShape

__all__ = ["RUN_ALONE", "Bench", "bench"]

RUN_ALONE = 1_000_000
"""Layers that share a plan, for a Selector whose choice is held against runs without plans."""

_CPU_EFFORT = timing.Effort(least_rounds=15, most_rounds=31, milliseconds=8000.0, plans=1)
# Many rounds of short calls and few of long ones; a kernel far behind is no contender, but its figure is quoted.
_CUDA_EFFORT = timing.Effort(least_rounds=9, most_rounds=101, milliseconds=250.0, plans=5, stop_at=30.0)
_SAMPLED = 24

Note = Callable[[str], None]


@dataclass(slots=True)
class Bench:
    """What stays the same from shape to shape.

    `own` names our kernels that are timed alone (None: all); `allowed` gives the reason why a name takes no part, or None.
    """

    selector: Selector
    peers: Sequence[PeerModule] = ()
    own: Collection[str] | None = None
    allowed: Callable[[str], str | None] = lambda name: None
    measure: timing.Measure | None = None
    effort: timing.Effort | None = None
    rates: Rates = field(init=False)

    def __post_init__(self) -> None:
        self.rates = Rates.of(self.selector.device)

    @torch.inference_mode()
    def rows(self, case: Case) -> list[Row]:
        """A row for the choice, one for each of our kernels and for each peer's, in each form."""
        device = self.selector.device
        call = make_call(case.shape, case.q_lens, case.kv_lens, device, seed=1)
        floor_us = self.floor_us(case)
        chosen = Chosen(self.selector, call)
        contenders = [
            chosen.peer_call(),
            *our_calls(self.selector, call, self.own),
            *peer_calls(self.peers, call, self.allowed),
        ]
        oracle = Oracle(call)
        measure = self.measure or timing.clock(device)
        rows: list[Row] = []
        racing: list[tuple[int, PeerCall]] = []
        for contender in contenders:
            row = _row(case, contender, floor_us)
            if contender.why_not is None:
                row = self._first_run(row, contender, oracle, measure)
                if row.verdict == "slower":
                    racing.append((len(rows), contender))
            rows.append(row)
        effort = self.effort or (_CUDA_EFFORT if device.type == "cuda" else _CPU_EFFORT)
        took = timing.time_trials([contender for _, contender in racing], measure, effort)
        for (number, _), timed in zip(racing, took, strict=True):
            rows[number] = replace(
                rows[number], us=timed.ms * 1e3, plan_us=timed.plan_ms * 1e3, spread=timed.spread,
                rounds=len(timed.samples), reason=timed.stopped,
            )  # fmt: skip
        decision = chosen.kernel.decision
        rows[0] = replace(rows[0], kernel=decision.label, policy=decision.policy, settings=decision.note)
        return judged(rows)

    def _first_run(self, row: Row, contender: PeerCall, oracle: Oracle, measure: timing.Measure) -> Row:
        """The row with its error, "slower" for now where it may race: it is right, and the clock has seen it once."""
        try:
            assert contender.read is not None
            out, lse = contender.read(contender.run())
            error, lse_error, wrong = oracle.compare(out, lse)
            row = replace(row, error=error, lse_error=lse_error)
            if wrong is None and row.timed == "graph" and self.selector.device.type == "cuda":
                contender.run = timing.capture(contender.run, self.selector.device)
                wrong = oracle.compare(*contender.read(contender.run()))[2]
            if wrong is not None:
                return replace(row, verdict="disqualified", reason=wrong)
            measure(contender, "run")
        except Exception as error:  # noqa: BLE001 - a kernel may raise anything; its reason is kept and the others go on
            return replace(row, verdict="crashed", reason=f"raised {describe(error)[:300]}")
        return replace(row, verdict="slower")

    def floor_us(self, case: Case) -> float:
        """Microseconds; request by request where they differ, since causal arithmetic grows with the square of a length."""
        shape = case.shape
        whole = self.rates.floor_ms(shape)  # measures the rates when first asked
        if not case.ragged:
            return 1e3 * whole
        alone = [
            replace(shape, batch=1, q_len=q_len, kv_len=kv_len) for q_len, kv_len in zip(case.q_lens, case.kv_lens, strict=True)
        ]
        arithmetic = sum(map(flops, alone)) / self.rates.arithmetic[shape.dtype]
        return 1e3 * max(arithmetic, sum(map(traffic, alone)) / self.rates.memory)

    def measured_rates(self) -> dict[str, float]:
        """`tflops` by dtype and `memory_gb_s`, for the head of a results file."""
        found = {f"tflops_{dtype}": rate / 1e9 for dtype, rate in self.rates.arithmetic.items()}
        return {**found, "memory_gb_s": self.rates.memory / 1e6}


class Oracle:
    """A sample of a call's rows in float32: first and last of the first, the longest and the last request, and random ones."""

    def __init__(self, call: Call) -> None:
        self.shape: AttentionShape = call.shape
        q_lens, kv_lens = call.batch.q_lens_host or (), call.batch.kv_lens_host or ()
        longest = max(range(len(kv_lens)), key=kv_lens.__getitem__)
        picks = [(request, row) for request in (0, longest, len(q_lens) - 1) for row in (0, q_lens[request] - 1)]
        draw = random.Random(1)
        while len(picks) < _SAMPLED:
            request = draw.randrange(len(q_lens))
            picks.append((request, draw.randrange(q_lens[request])))
        unique = sorted(set(picks))
        expected = [call.expected_row(request, row) for request, row in unique]
        self.out = torch.cat([out for out, _ in expected])  # [rows, heads, v]
        self.lse = torch.cat([lse for _, lse in expected])
        self.size = (call.batch.num_tokens, self.shape.heads, self.shape.v)
        self.at = torch.tensor([sum(q_lens[:request]) + row for request, row in unique], device=self.out.device)

    def compare(self, out: Tensor, lse: Tensor | None) -> tuple[float | None, float | None, str | None]:
        """The largest relative L2 of a row, the largest difference of an LSE, and what is wrong with them, if anything is."""
        if tuple(out.shape) != self.size:
            return None, None, f"gave an output of {list(out.shape)} for {list(self.size)}"
        difference = out[self.at].float() - self.out
        error = float((difference.flatten(1).norm(dim=1) / self.out.flatten(1).norm(dim=1)).max())
        if not math.isfinite(error):
            return None, None, "gave NaN or infinity"
        wrong = None if error <= tolerance(self.shape) else f"output off by {error:.2%}, relative L2"
        if lse is None:
            return error, None, "gave no LSE" if self.shape.lse else wrong
        off = (lse[self.at] - self.lse).abs()
        if wrong is None and not bool((off <= lse_tolerance(self.lse)).all()):
            wrong = f"LSE off by {float(off.max()):.3g}"
        return error, float(off.max()), wrong


def bench(bench: Bench, cases: Sequence[Case], note: Note, *, until: float | None = None) -> Iterator[list[Row]]:
    """The rows of each case in turn, none for one that fails altogether; `note` hears of each as it begins, and why it fails.

    None begins after `until`, a time of `time.monotonic`.
    """
    for number, case in enumerate(cases, 1):
        if until is not None and time.monotonic() >= until:
            note(f"{len(cases) - number + 1} of {len(cases)} shapes are left out: the time is up")
            return
        shape = case.shape
        name = (
            f"{shape.phase.value} {shape.batch} x {shape.q_len} on {shape.kv_len}, "
            f"{shape.heads} heads, {shape.qk}/{shape.v} {shape.dtype}{', ragged' if case.ragged else ''}"
        )
        note(f"timing {number} of {len(cases)}: {name}")
        try:
            yield bench.rows(case)
        except Exception as error:  # noqa: BLE001 - a device that a kernel has broken must not cost the rows before it
            note(f"{name} is left out: {describe(error)}")
        if bench.selector.device.type == "cuda":
            torch.cuda.empty_cache()  # the next shape's inputs may need what this one's peers have kept


def _row(case: Case, contender: PeerCall, floor_us: float) -> Row:
    more: dict[str, Any] = {"timed": "graph" if case.shape.graph and contender.capturable else "eager"}
    padding = contender.padding
    if padding is not None:
        more |= {"padding": padding.to_json(), "settings": paddings.describe(case.shape, padding)}
    if contender.settings and contender.name != CHOSEN:
        more["settings"] = contender.settings
    return Row.of(case, contender.name, floor_us=floor_us, reason=contender.why_not, **more)
