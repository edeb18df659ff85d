"""Off the grid: is the nearest measured bucket's kernel good enough where nothing was measured? 1.05x the best is asked.

    python benchmarks/off_grid.py --out benchmarks/results/off-grid-cpu.json

A grid of powers of two is measured as `mla-serve probe` does, then shapes between and beyond it (batch 3 and 24; 700 and 5,000
tokens) are put to the Selector, and after that every kernel is timed on those very shapes, interleaved, the chosen one among
them. `over_best` is the chosen kernel's time over that of the fastest right one. Decode has one kernel on a CPU in most shapes;
prefill is where the choice is.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch

from mla_serve.doctor import examine
from mla_serve.selection import Selector, candidates, probe
from mla_serve.selection.inputs import full_size, make_call
from mla_serve.selection.measure import InProcess, Trial
from mla_serve.selection.timing import CpuClock, Effort, time_trials
from mla_serve.shapes import AttentionShape, DType, MLADims

CPU = torch.device("cpu")
DIMS = MLADims(heads=4, nope=128, rope=64, v=128, latent=512)
ASKED = 1.05


def prefill(batch: int, q_len: int, dtype: DType) -> AttentionShape:
    return AttentionShape.prefill(DIMS, batch=batch, q_len=q_len, dtype=dtype, lse=False)


def context(q_len: int, kv_len: int, dtype: DType) -> AttentionShape:
    return AttentionShape.context(DIMS, batch=1, q_len=q_len, kv_len=kv_len, dtype=dtype)


def decode(batch: int, kv_len: int, dtype: DType) -> AttentionShape:
    return AttentionShape.decode(DIMS, batch=batch, kv_len=kv_len, dtype=dtype, page_size=16)


def grid(dtype: DType) -> list[AttentionShape]:
    """What a probe of a small deployment measures: batches 1 and 4, no bucket of 3, 24, 700 or 5,000."""
    lengths = (32, 128, 512, 2048)
    return [
        *(prefill(1, length, dtype) for length in lengths),
        *(prefill(4, length, dtype) for length in (32, 128)),
        *(context(q_len, kv_len, dtype) for q_len, kv_len in ((64, 256), (64, 2048), (512, 2048))),
        *(decode(batch, kv_len, dtype) for batch in (1, 4, 16) for kv_len in (256, 2048)),
    ]


def between(dtype: DType) -> list[AttentionShape]:
    """What nobody measured. A prefill of 24 x 5,000 takes a CPU minutes; its batch and its length are asked apart."""
    return [
        *(prefill(1, length, dtype) for length in (50, 200, 700, 1400)),
        *(prefill(3, length, dtype) for length in (50, 200, 700)),
        prefill(24, 50, dtype),
        context(100, 700, dtype),
        context(64, 5000, dtype),
        *(decode(batch, kv_len, dtype) for batch in (3, 24) for kv_len in (700, 5000)),
    ]


def time_all(selector: Selector, shape: AttentionShape) -> dict[str, object]:
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
        "shape": str(shape.phase) + f" {shape.batch} x {shape.q_len} on {shape.kv_len}",
        "dtype": shape.dtype,
        "chosen": decision.label,
        "note": decision.note,
        "chosen_ms": round(chosen, 4),
        "best": f"{best[0]}{'' if best[1] is None else '+pad'}",
        "best_ms": round(costs[best], 4),
        "over_best": round(chosen / costs[best], 3),
        "kernels": len(costs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", action="append", choices=("float32", "bfloat16"))
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    dtypes: list[DType] = asked.dtype or ["float32"]
    selector = Selector(CPU, clean_pool=True, measurer=InProcess(CPU, clean_pool=True, effort=Effort(5, 30, 600.0)))
    probe(selector, [shape for dtype in dtypes for shape in grid(dtype)])
    rows = [time_all(selector, shape) for dtype in dtypes for shape in between(dtype)]
    for row in rows:
        print(f"{row['shape']:>32} {row['dtype']}: {row['chosen']}, {row['over_best']}x {row['best']}", file=sys.stderr)
    held = [row for row in rows if float(str(row["over_best"])) <= ASKED]
    choices = [row for row in rows if int(str(row["kernels"])) > 1]
    host = examine()
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
        "host": {"system": host.system, "python": host.python, "devices": host.devices, "versions": host.versions},
        "asked": ASKED,
        "shapes": len(rows),
        "held": len(held),
        "shapes_with_a_choice": len(choices),
        "held_with_a_choice": sum(row in held for row in choices),
        "worst": max(float(str(row["over_best"])) for row in rows),
        "rows": rows,
    }
    if asked.out:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: result[key] for key in ("shapes", "held", "shapes_with_a_choice", "held_with_a_choice", "worst")}))


if __name__ == "__main__":
    main()
