"""Times tunings of `triton-mla` on this GPU over the decode grid, 8 query tokens and ragged batches, and proposes its table.

    python benchmarks/triton_mla_tune.py --out build/tune
    python benchmarks/triton_mla_tune.py --only 16x16 --quick

Two rounds for each shape: tile sizes, warps, stages, transposition and programs first, then, for the fastest two, how finely
work is cut and reduced. Every run is a replay of a CUDA graph with the L2 cache flushed before it, and a tuning counts only if
sampled rows are within 1e-2 relative L2 of float32. What does not compile or does not fit is listed with its reason.
`OUT/triton-mla-tune.json` has a row for each shape and tuning; the last lines printed are the table for
`mla_serve/backends/triton_mla_tuning.py`: the tuning with the best geometric mean of its time over the best time of each shape.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from mla_serve.backends.base import Plan
from mla_serve.backends.triton_mla import TritonMLA, TritonState
from mla_serve.backends.triton_mla_tuning import Gpu, Tuning, choose, shared_bytes
from mla_serve.bench.grids import Case, cases
from mla_serve.bench.results import save_result, stamped
from mla_serve.selection.inputs import Call, limits_of, make_call
from mla_serve.selection.timing import CudaClock, capture
from mla_serve.shapes import AttentionShape

LEAST, FANS = (64, 128, 256, 512), (4, 8, 16)


@dataclass
class Trial:
    """What the clock needs."""

    label: str
    run: Any
    plan: Any


def decode_cases(only: str) -> list[Case]:
    """The decode rows of the full grid; `only` keeps those whose BATCHxHEADS begins so."""
    found = [case for case in cases("full") if case.shape.absorbed]
    return [case for case in found if f"{case.shape.batch}x{case.shape.heads}".startswith(only)]


def tile_tunings(shape: AttentionShape, gpu: Gpu, *, quick: bool) -> Iterator[Tuning]:
    """The table's own first, then all that fits."""
    own = choose(shape, gpu)
    yield own
    rows = shape.heads * shape.q_len
    heights = [m for m in (16, 32, 64) if m == 16 or rows > m // 2]
    stages, programs = ((2,), (1,)) if quick else ((2, 3, 4), (1, 2))
    for m, n, warps, stage, swap, many in product(heights, (16, 32, 64), (4, 8), stages, (False, True), programs):
        tuning = replace(own, block_m=m, block_n=n, warps=warps, stages=stage, swap=swap, programs=many)
        if m * n <= 4096 and tuning != own and shared_bytes(shape, tuning, gpu) * many <= gpu.shared_bytes:
            yield tuning


def ready(backend: TritonMLA, call: Call, tuning: Tuning) -> tuple[TritonState, Plan]:
    lens = list(call.batch.q_lens_host or ()), list(call.batch.kv_lens_host or ())
    state = backend.prepare(call.shape, limits_of(lens))
    state = replace(state, tuning=tuning, programs=backend.gpu().multiprocessors * tuning.programs)
    return state, backend.plan(state, call.batch, scale=call.scale)


def compile_one(shape: AttentionShape, tuning: Tuning) -> str | None:
    """Fills Triton's cache by one tiny call, in a process of its own; None or what was raised."""
    try:
        device = torch.device("cuda")
        backend = TritonMLA(device)
        small = replace(shape, batch=1, kv_len=64)
        call = make_call(small, [shape.q_len], [64], device, seed=1)
        call.run(backend, ready(backend, call, tuning)[1], need_lse=shape.lse)
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001  a tuning that cannot be compiled is a finding
        return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    return None


def wrong(call: Call, out: torch.Tensor) -> float:
    """The largest relative L2 of sampled rows against float32."""
    q_lens, kv_lens = call.batch.q_lens_host or (), call.batch.kv_lens_host or ()
    worst = 0.0
    for request in sorted({0, len(q_lens) // 2, kv_lens.index(max(kv_lens)), kv_lens.index(min(kv_lens))}):
        for row in {0, q_lens[request] - 1}:
            want, _ = call.expected_row(request, row)
            got = out[sum(q_lens[:request]) + row].float()
            worst = max(worst, float((got - want[0]).norm() / want.norm()))
    return worst


def timed(backend: TritonMLA, call: Call, tuning: Tuning, clock: CudaClock, rounds: int) -> dict[str, Any]:
    """A row's figures, or why there are none."""
    try:
        _, plan = ready(backend, call, tuning)
        run = capture(lambda: call.run(backend, plan, need_lse=call.shape.lse), backend.device)
        out, _ = run()
        torch.cuda.synchronize()
        error = wrong(call, out)
        if not error <= 1e-2:
            return {"us": None, "error": error, "why_not": "wrong"}
        us = median(clock(Trial("triton-mla", run, None), "run") * 1e3 for _ in range(rounds))
    except Exception as failure:  # noqa: BLE001  as above
        return {"us": None, "why_not": f"{type(failure).__name__}: {str(failure).splitlines()[0][:200]}"}
    return {"us": round(us, 2), "error": error}


def sweep(backend: TritonMLA, case: Case, clock: CudaClock, asked: argparse.Namespace, pool: ProcessPoolExecutor) -> list[dict]:
    """All rows of one shape, the fastest first."""
    shape = case.shape
    call = make_call(shape, case.q_lens, case.kv_lens, backend.device, seed=7)
    tunings = list(tile_tunings(shape, backend.gpu(), quick=asked.quick))
    failed = dict(zip(tunings, pool.map(compile_one, [shape] * len(tunings), tunings), strict=True))
    rows = []
    for tuning in tunings:
        figures = (
            timed(backend, call, tuning, clock, asked.rounds)
            if failed[tuning] is None
            else {"us": None, "why_not": failed[tuning]}
        )
        rows.append((tuning, figures))
    best = sorted((row for row in rows if row[1]["us"] is not None), key=lambda row: row[1]["us"])[:2]
    for tuning, _ in best:
        for least, fan in product(LEAST, FANS):
            finer = replace(tuning, least_keys=least, fan=fan)
            if all(finer != other for other, _ in rows):
                rows.append((finer, timed(backend, call, finer, clock, asked.rounds)))
    about = {
        "batch": shape.batch, "heads": shape.heads, "q_len": shape.q_len, "kv_len": shape.kv_len, "ragged": case.ragged,
        "cache_dtype": shape.cache_dtype or shape.dtype,
    }  # fmt: skip
    found = [{**about, **asdict(tuning), **figures} for tuning, figures in rows]
    return sorted(found, key=lambda row: math.inf if row["us"] is None else row["us"])


def proposal(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """For each height of a tile the tuning that is best over all shapes in which it was timed for most of them."""
    names = list(asdict(Tuning(16, 16, 4, 2, 1, 128, 8)))
    best: dict[str, float] = {}
    for row in rows:
        if row["us"] is not None:
            best[_shape(row)] = min(best.get(_shape(row), math.inf), row["us"])
    scores: dict[tuple, list[float]] = {}
    for row in rows:
        if row["us"] is not None:
            scores.setdefault(tuple(row[name] for name in names), []).append(row["us"] / best[_shape(row)])
    for height in (16, 32, 64):
        of_height = {tuning: score for tuning, score in scores.items() if tuning[0] == height}
        most = max((len(score) for score in of_height.values()), default=0)
        means = {t: math.exp(sum(map(math.log, s)) / len(s)) for t, s in of_height.items() if 2 * len(s) >= most}
        for tuning in sorted(means, key=lambda t: means[t])[:3]:
            said = ", ".join(f"{name}={value}" for name, value in zip(names, tuning, strict=True))
            yield f"{height}: Tuning({said}),  # {means[tuning]:.3f} of the best in {len(of_height[tuning])} shapes"


def _shape(row: dict[str, Any]) -> str:
    return f"{row['batch']} x {row['heads']} x {row['q_len']} on {row['kv_len']}" + (" ragged" if row["ragged"] else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "build/tune")))
    parser.add_argument("--only", default="", help="shapes whose BATCHxHEADS begins so")
    parser.add_argument("--quick", action="store_true", help="two stages and one program for each multiprocessor alone")
    parser.add_argument("--float8", action="store_true", help="with a float8 cache")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes that compile")
    asked = parser.parse_args()
    backend = TritonMLA(torch.device("cuda"))
    reason = backend.available() if torch.cuda.is_available() else "there is no CUDA device"
    if reason is not None:
        print(reason, file=sys.stderr)
        return 1
    clock = CudaClock(backend.device)
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(asked.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for case in decode_cases(asked.only):
            if asked.float8:
                case = replace(case, shape=replace(case.shape, cache_dtype="float8_e4m3fn"))
            found = sweep(backend, case, clock, asked, pool)
            rows += found
            own = choose(case.shape, backend.gpu())
            table = next((row["us"] for row in found if all(row[k] == v for k, v in asdict(own).items())), None)
            print(f"{_shape(found[0])}: table {table} us, best {found[0]['us']} us, {len(found)} tunings", flush=True)
            for row in found[:3]:
                print("   ", row["us"], {name: row[name] for name in asdict(own)}, flush=True)
            result = stamped({"rows": rows}, command=" ".join(["python", *sys.argv]))
            save_result(asked.out / "triton-mla-tune.json", result)  # after each shape: a run may be cut short
    print(*proposal(rows), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
