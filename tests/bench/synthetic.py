"""Results of a bench that never ran: the rows that a run would write, with times of ours."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from mla_serve.backends.padded import Padding
from mla_serve.bench.attention_rows import Row, judged
from mla_serve.bench.grids import Case, cases
from mla_serve.shapes import Phase

Times = Callable[[Case], dict[str, float]]
"""By label ("fa3", "torch-flash+pad"), in microseconds."""

DECODE = ("flashinfer-fa2", "flashinfer-fa3", "fa3", "flashmla", "flashmla+pad", "vllm-triton-mla", "triton-mla")
PREFILL = (
    "flashinfer-fa2", "flashinfer-fa3", "fa3", "fa3+pad", "torch-flash+pad", "torch-efficient", "torch-cudnn",
    "torch-cudnn+pad", "torch-math", "transformer-engine", "transformer-engine+pad",
)  # fmt: skip


def made_up(case: Case) -> dict[str, float]:
    """A random factor per kernel around a size-dependent time; the choice is 1 % behind the best."""
    draw = random.Random(str(case.shape))
    base = 20.0 + sum(case.kv_lens) / 5000
    names = DECODE if case.shape.phase is Phase.DECODE else PREFILL
    times = {name: base * draw.uniform(1.0, 2.2) for name in names}
    for slow, factor in (("vllm-triton-mla", 6.0), ("torch-math", 40.0)):
        if slow in times:
            times[slow] = base * factor
    return {"chosen": 1.01 * min(times.values()), **times}


def rows(times: Times = made_up, grid: str = "full") -> list[dict[str, Any]]:
    """Rows as JSON for every case of a grid."""
    found: list[dict[str, Any]] = []
    for case in cases(grid):
        shape = case.shape
        measured = times(case)
        others = {name: us for name, us in measured.items() if name != "chosen"}
        group = []
        for label, us in measured.items():
            name, _, padded = label.partition("+")
            wide = Padding.of(shape, heads=64) if shape.phase is Phase.DECODE else Padding.of(shape, v=shape.qk)
            kernel = min(others, key=lambda name: others[name]) if others and name == "chosen" else None
            group.append(
                Row.of(
                    case,
                    name,
                    us=us,
                    floor_us=5.0,
                    error=0.002,
                    verdict="slower",
                    padding=wide.to_json() if padded else None,
                    rounds=9,
                    timed="graph" if shape.graph else "eager",
                    kernel=kernel,
                    policy="measured" if kernel else None,
                )
            )
        group.append(Row.of(case, "fa2", reason="needs equal QK and V widths"))
        found += [row.to_json() for row in judged(group)]
    return found


def result(times: Times = made_up, grid: str = "full", **more: Any) -> dict[str, Any]:
    """A results file."""
    host = {
        "system": "Linux",
        "python": "3.12",
        "devices": [{"device": "cuda:0", "name": "Made-up GPU"}],
        "versions": {"torch": "0.0"},
    }
    return {
        "date": "2026-01-01T00:00:00+00:00",
        "command": "mla-serve bench attention",
        "host": host,
        **more,
        "rows": rows(times, grid),
    }
