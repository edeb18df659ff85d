"""How long a server waits for its decision file: the load of a table as large as many models on one host make it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter_ns

import torch

from mla_serve.backends.padded import Padding
from mla_serve.selection import CandidateResult, Decision, DecisionTable, Fingerprint
from mla_serve.shapes import AttentionShape, Bucket, MLADims

BUCKETS, CANDIDATES = 500, 9


def made_up_table(buckets: int = BUCKETS, candidates: int = CANDIDATES) -> DecisionTable:
    """A table in memory whose figures mean nothing but have the length of real ones."""
    here = Fingerprint.here(torch.device("cpu"))
    table = DecisionTable()
    for number in range(buckets):
        dims = MLADims(heads=1 + number // 50, nope=128, rope=64, v=128, latent=512)
        shape = AttentionShape.decode(dims, batch=1 << number % 5, kv_len=1 << number % 50 // 5, dtype="bfloat16", page_size=64)
        rows = tuple(
            CandidateResult(
                f"kernel-{i}", Padding.of(shape, heads=16) if i % 2 else None, "slower" if i else "chosen",
                ms=1.0 + i / 3, plan_ms=0.01 / 3, spread=0.02 / 3, error=1e-3 / 3, lse_error=1e-4 / 3,
            )
            for i in range(candidates)
        )  # fmt: skip
        decision = Decision(
            Bucket.of(shape), "measured", "kernel-0", None, rows, here, floor_ms=1 / 3, measured_at="2026-01-01T00:00:00Z"
        )
        table.put(decision, save=False)
    return table


def benchmark_load(loads: int = 15) -> dict[str, float]:
    """`load_ms`, the median over `loads` loads of a file of 500 buckets with 9 candidates each, and the file's `buckets`."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "decisions.json"
        made_up_table().save(path, strict=True)
        times = []
        for _ in range(loads):
            start = perf_counter_ns()
            table = DecisionTable.load(path)
            times.append((perf_counter_ns() - start) / 1e6)
    assert len(table) == BUCKETS
    return {"load_ms": median(times), "buckets": BUCKETS}
