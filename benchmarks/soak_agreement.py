"""Do five probes of one grid agree? Each measures every bucket afresh, with a table of its own; at least 95 % are asked.

    python benchmarks/soak_agreement.py --out benchmarks/results/soak-agreement.json

A bucket agrees if all probes chose the same kernel in the same form. Ties (within the noise of a run, 2 % at most) go to
native, then to the neighbouring bucket's choice, so a disagreement is two kernels that are closer than the machine is steady:
`gap` says how close, in the probe where they were furthest apart.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import torch

from mla_serve.bench.grids import named_grid
from mla_serve.doctor import examine
from mla_serve.selection import Decision, Selector, probe
from mla_serve.selection.measure import InProcess
from mla_serve.selection.timing import Effort
from mla_serve.shapes import AttentionShape, Bucket, DType, MLADims

CPU = torch.device("cpu")
ASKED = 0.95


def reduced(dtype: DType) -> list[AttentionShape]:
    """Twenty buckets that a CPU measures in a few seconds."""
    dims = MLADims(heads=4, nope=128, rope=64, v=128, latent=512)
    prefills = [(1, q_len) for q_len in (16, 32, 64, 128, 256, 512)] + [(4, q_len) for q_len in (16, 64, 256)]
    return [
        *(
            AttentionShape.prefill(dims, batch=batch, q_len=q_len, dtype=dtype, lse=lse)
            for batch, q_len in prefills
            for lse in (False, True)
        ),
        *(
            AttentionShape.context(dims, batch=1, q_len=q_len, kv_len=kv_len, dtype=dtype)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--probes", type=int, default=5)
    parser.add_argument("--grid", choices=("reduced", "cpu"), default="reduced")
    parser.add_argument("--milliseconds", type=float, default=300.0, help="of runs per bucket")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    shapes = named_grid("cpu") if asked.grid == "cpu" else reduced("float32")
    chosen: dict[Bucket, list[Decision]] = {}
    for number in range(asked.probes):
        effort = Effort(least_rounds=5, most_rounds=60, milliseconds=asked.milliseconds)
        for decision in probe(Selector(CPU, measurer=InProcess(CPU, clean_pool=True, effort=effort)), shapes):
            chosen.setdefault(decision.bucket, []).append(decision)
        print(f"probe {number + 1} of {asked.probes} is done", file=sys.stderr)
    rows = []
    for bucket, decisions in chosen.items():
        labels = Counter(f"{d.label} {d.padding.qk}" if d.padding else d.label for d in decisions)
        agrees = len(labels) == 1 and len(decisions) == asked.probes
        rows.append({"bucket": str(bucket), "chosen": dict(labels), "agrees": agrees, "gap": round(gap(decisions), 4)})
    host = examine()
    agreed = sum(bool(row["agrees"]) for row in rows)
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
        "host": {"system": host.system, "python": host.python, "devices": host.devices, "versions": host.versions},
        "asked": ASKED,
        "probes": asked.probes,
        "buckets": len(rows),
        "agreed": agreed,
        "share": round(agreed / len(rows), 4),
        "rows": rows,
    }
    if asked.out:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: result[key] for key in ("probes", "buckets", "agreed", "share")}))


if __name__ == "__main__":
    main()
