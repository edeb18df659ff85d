"""Off the grid: is the nearest measured bucket's kernel good enough where nothing was measured? 1.05x the best is asked.

A grid of powers of two is measured as `mla-serve probe` does, then shapes between and beyond it (batch 3 and 24; 700 and 5,000
tokens) are put to the Selector, and after that every kernel is timed on those very shapes, interleaved, the chosen one among
them. `over_best` is the chosen kernel's time over that of the fastest right one. Decode has one kernel on a CPU in most shapes;
prefill is where the choice is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mla_serve.selection import Selector, candidates, probe
from mla_serve.selection.inputs import full_size, make_call
from mla_serve.selection.measure import InProcess, Trial
from mla_serve.selection.timing import CpuClock, Effort, time_trials
from mla_serve.shapes import AttentionShape, DType, MLADims

CPU = torch.device("cpu")
DIMS = MLADims(heads=4, nope=128, rope=64, v=128, latent=512)
DTYPE: DType = "float32"
ASKED = 1.05


def prefill(batch: int, q_len: int) -> AttentionShape:
    return AttentionShape.prefill(DIMS, batch=batch, q_len=q_len, dtype=DTYPE, lse=False)


def context(q_len: int, kv_len: int) -> AttentionShape:
    return AttentionShape.context(DIMS, batch=1, q_len=q_len, kv_len=kv_len, dtype=DTYPE)


def decode(batch: int, kv_len: int) -> AttentionShape:
    return AttentionShape.decode(DIMS, batch=batch, kv_len=kv_len, dtype=DTYPE, page_size=16)


GRID = [
    *(prefill(1, length) for length in (32, 128, 512, 2048)),
    *(prefill(4, length) for length in (32, 128)),
    *(context(q_len, kv_len) for q_len, kv_len in ((64, 256), (64, 2048), (512, 2048))),
    *(decode(batch, kv_len) for batch in (1, 4, 16) for kv_len in (256, 2048)),
]
"""What a probe of a small deployment measures: batches 1 and 4, no bucket of 3, 24, 700 or 5,000."""
BETWEEN = [
    *(prefill(1, length) for length in (50, 200, 700, 1400)),
    *(prefill(3, length) for length in (50, 200, 700)),
    prefill(24, 50),
    context(100, 700),
    context(64, 5000),
    *(decode(batch, kv_len) for batch in (3, 24) for kv_len in (700, 5000)),
]
"""What nobody measured. A prefill of 24 x 5,000 takes a CPU minutes; its batch and its length are asked apart."""


def time_all(selector: Selector, shape: AttentionShape) -> dict[str, Any]:
    """One row: the choice for `shape` and every kernel's time on exactly that shape, on one input."""
    decision = selector.decide(shape)
    rows = InProcess(CPU, effort=Effort(1, 1), clean_pool=True)(shape, found := candidates(shape, selector.backends))
    right = [candidate for candidate, row in zip(found, rows, strict=True) if row.ms is not None]
    call = make_call(shape, *full_size(shape), CPU, seed=1)
    with torch.inference_mode():
        trials = [Trial.make(candidate, call) for candidate in right]
        timings = time_trials(trials, CpuClock(), Effort(7, 21, 700.0, plans=1, stop_at=2.0))
    costs = {(c.native.name, c.padding): min(t.samples) for c, t in zip(right, timings, strict=True)}
    chosen = costs[decision.winner, decision.padding]
    best = min(costs, key=costs.__getitem__)
    return {
        "shape": f"{shape.phase} {shape.batch} x {shape.q_len} on {shape.kv_len}",
        "chosen": decision.label,
        "note": decision.note,
        "chosen_ms": round(chosen, 4),
        "best": f"{best[0]}{'' if best[1] is None else '+pad'}",
        "best_ms": round(costs[best], 4),
        "over_best": round(chosen / costs[best], 3),
        "kernels": len(costs),
    }


@pytest.mark.slow("off-grid")
def test_a_neighbours_choice_is_good_enough(threads: int, record_property: Callable[[str, object], None]) -> None:
    selector = Selector(CPU, clean_pool=True, measurer=InProcess(CPU, clean_pool=True, effort=Effort(5, 30, 600.0)))
    probe(selector, GRID)
    rows = [{"threads": threads, **time_all(selector, shape)} for shape in BETWEEN]
    for row in rows:
        record_property("row", row)
    worst = max(row["over_best"] for row in rows)
    choices = sum(row["kernels"] > 1 for row in rows)
    figures = {"threads": threads, "shapes": len(rows), "shapes_with_a_choice": choices, "worst": worst, "asked": ASKED}
    record_property("figures", figures)
    borrowed = [row["note"] for row in rows if row["note"] is not None]  # 1,400 tokens are in the bucket of 2,048
    assert len(borrowed) == len(rows) - 1
    assert all("nearest measured bucket" in note for note in borrowed)
    assert worst <= ASKED
