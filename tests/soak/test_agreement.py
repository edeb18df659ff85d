"""Do five probes of one grid agree? Each measures every bucket afresh, with a table of its own; at least 95 % are asked.

A bucket agrees if all probes chose the same kernel in the same form. Ties (within the noise of a run, 2 % at most) go to
native, then to the neighbouring bucket's choice, so a disagreement is two kernels that are closer than the machine is steady:
`gap` says how close, in the probe where they were furthest apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch

from mla_serve.selection import Decision, Selector, probe
from mla_serve.selection.measure import InProcess
from mla_serve.selection.timing import Effort
from mla_serve.shapes import AttentionShape, Bucket, MLADims

CPU = torch.device("cpu")
EFFORT = Effort(least_rounds=5, most_rounds=60, milliseconds=500.0)
PROBES = 5


def buckets() -> list[AttentionShape]:
    """Twenty, which a CPU measures in a few seconds; no decode, since most of its shapes have one kernel there."""
    dims = MLADims(heads=4, nope=128, rope=64, v=128, latent=512)
    prefills = [(1, q_len) for q_len in (16, 32, 64, 128, 256, 512)] + [(4, q_len) for q_len in (16, 64, 256)]
    return [
        *(
            AttentionShape.prefill(dims, batch=batch, q_len=q_len, dtype="float32", lse=lse)
            for batch, q_len in prefills
            for lse in (False, True)
        ),
        *(
            AttentionShape.context(dims, batch=1, q_len=q_len, kv_len=kv_len, dtype="float32")
            for q_len, kv_len in ((64, 256), (256, 256))
        ),
    ]


def gap(decisions: list[Decision]) -> float:
    """The largest ratio, over the probes, between the kernels that won somewhere in this bucket."""
    winners = {(decision.winner, decision.padding) for decision in decisions}
    worst = 1.0
    for decision in decisions:
        costs = [row.cost(1) for row in decision.candidates if (row.backend, row.padding) in winners]
        known = [cost for cost in costs if cost]
        worst = max(worst, max(known) / min(known)) if known else worst
    return worst


@pytest.mark.slow("agreement")
def test_five_probes_agree(threads: int, record_property: Callable[[str, object], None]) -> None:
    chosen: dict[Bucket, list[Decision]] = {Bucket.of(shape): [] for shape in buckets()}
    for _ in range(PROBES):
        measurer = InProcess(CPU, clean_pool=True, effort=EFFORT)
        for decision in probe(Selector(CPU, measurer=measurer), buckets()):
            chosen[decision.bucket].append(decision)
    agreed = 0
    for bucket, decisions in chosen.items():
        labels = Counter(f"{d.label} {d.padding.qk}" if d.padding else d.label for d in decisions)
        agrees = list(labels.values()) == [PROBES]
        agreed += agrees
        row = {"threads": threads, "bucket": str(bucket), "chosen": dict(labels), "agrees": agrees}
        record_property("row", row | {"gap": round(gap(decisions), 4)})
    figures = {"threads": threads, "probes": PROBES, "buckets": len(chosen), "agreed": agreed}
    record_property("figures", figures | {"share": agreed / len(chosen), "asked": 0.95})
    assert agreed >= 0.95 * len(chosen)
