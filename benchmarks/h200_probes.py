"""Probes the full grids of two models, by their config.json alone, and writes how long each took and the decisions.

    python benchmarks/h200_probes.py --out build/h200

`OUT/h200-probes.json` holds the seconds (with compiled kernels cached if this ran before), `OUT/tables/nvidia-h200.json` the
decisions of both, to be shipped as mla_serve/tables/nvidia-h200.json: default decisions for hosts like this one, valid until a
kernel library or one of our own kernels changes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from mla_serve.bench.results import save_result, stamped
from mla_serve.selection import DecisionTable

CONFIGS = Path(__file__).parent / "configs"
MODELS = {"DeepSeek-V2-Lite": ("deepseek-v2-lite", 1), "DeepSeek-V3 at TP 8": ("deepseek-v3", 8)}
ASKED = 90.0


def probe(directory: Path, tp: int, table: Path, timeout: float) -> float:
    """Seconds of `mla-serve probe` in a process of its own. Raises CalledProcessError or TimeoutExpired."""
    command = [sys.executable, "-m", "mla_serve.cli", "probe", str(directory), "--tp", str(tp), "--out", str(table), "--again"]
    began = time.monotonic()
    subprocess.run(command, check=True, timeout=timeout, stdout=subprocess.DEVNULL)
    return time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path("build/h200"))
    parser.add_argument("--name", default="nvidia-h200")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for one model")
    asked = parser.parse_args()
    tables = asked.out / "tables"
    tables.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    together = DecisionTable()
    for name, (config, tp) in MODELS.items():
        own = tables / f"{config}.json"
        own.unlink(missing_ok=True)
        seconds = probe(CONFIGS / config, tp, own, asked.timeout)
        table = DecisionTable.load(own, strict=True)
        found[name] = {"seconds": round(seconds, 1), "buckets": len(table), "winners": winners(table)}
        together.add(table)
        print(f"{name}: {seconds:.1f} s for {len(table)} buckets, {ASKED:g} s asked", file=sys.stderr)
    shipped = tables / f"{asked.name}.json"
    shipped.unlink(missing_ok=True)
    together.save(shipped, strict=True)
    result = {"asked_seconds": ASKED, "models": found}
    save_result(asked.out / "h200-probes.json", stamped(result, command=" ".join(["python", *sys.argv])))
    return 0 if all(model["seconds"] <= ASKED for model in found.values()) else 1


def winners(table: DecisionTable) -> dict[str, int]:
    """In how many buckets each kernel won, padded forms apart."""
    counts: dict[str, int] = {}
    for decision in table:
        counts[decision.label] = counts.get(decision.label, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


if __name__ == "__main__":
    sys.exit(main())
