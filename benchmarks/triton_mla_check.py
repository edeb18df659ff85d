"""Runs `triton-mla` on random calls until something is wrong or the count is reached.

    python benchmarks/triton_mla_check.py --calls 10000
    compute-sanitizer --tool memcheck python benchmarks/triton_mla_check.py --three
    compute-sanitizer --tool racecheck python benchmarks/triton_mla_check.py --three

Each call draws widths, heads, page size, dtypes, query and key lengths, and how often a plan is run again; every output is
compared with the float32 reference, the counters must be back at zero. On a CPU it needs TRITON_INTERPRET=1. A hang is for the
caller's timeout to find. `--three` runs one small call of each way through the kernel: tiles in one piece, reduced at once, and
reduced in two levels. Exit status 1 after the first failure, which is printed with its seed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import replace

import torch

from mla_serve.backends import BatchLayout, Limits, reference_decode
from mla_serve.backends.triton_mla import TritonMLA, TritonPlan
from mla_serve.shapes import AttentionShape, MLADims

WIDTHS = ((512, 64), (512, 64), (256, 32), (512, 0), (80, 24), (64, 16))  # latent, rope
THREE = (((2, 1), (40, 90)), ((1,), (700,)), ((8, 1), (4096, 5000)))  # query and key lengths


class Wrong(Exception):
    pass


def one_call(backend: TritonMLA, shape: AttentionShape, q_lens: list[int], kv_lens: list[int], runs: int) -> None:
    """Raises Wrong if an answer is not within the contract's tolerance of the reference, or a counter is left over."""
    device, page = backend.device, shape.page_size
    assert page is not None
    needed = [-(-n // page) for n in kv_lens]
    pages = sum(needed) + 2
    table = torch.full((len(kv_lens), max(1, *needed)), -1, dtype=torch.int32)
    order = torch.randperm(pages, dtype=torch.int32)
    pool = torch.full((pages * page, shape.qk), float("nan"))
    at = 0
    for request, (count, kv_len) in enumerate(zip(needed, kv_lens, strict=True)):
        table[request, :count] = order[at : at + count]
        slots = (order[at : at + count, None].long() * page + torch.arange(page)).flatten()[:kv_len]
        pool[slots] = torch.randn(kv_len, shape.qk)
        at += count
    dtype = getattr(torch, shape.dtype)
    cache = pool.to(device).to(getattr(torch, shape.cache_dtype or shape.dtype)).view(pages, page, shape.qk)
    tokens = sum(q_lens)
    q_nope = torch.randn(tokens, shape.heads, shape.v, device=device).to(dtype)
    q_pe = torch.randn(tokens, shape.heads, shape.rope, device=device).to(dtype)
    batch = BatchLayout.make(q_lens, kv_lens, device, block_table=table.to(device), page_size=page)
    limits = Limits(max_requests=len(q_lens), max_tokens=max(1, tokens), max_kv_tokens=max(1, *kv_lens))
    plan = backend.plan(backend.prepare(shape, limits), batch, scale=0.07)
    assert isinstance(plan, TritonPlan)
    want, want_lse = reference_decode(q_nope, q_pe, cache, batch, scale=0.07, cache_scale=0.5)
    allowed = 1e-5 if shape.dtype == "float32" else 1e-2
    for run in range(runs):
        out, lse = backend.run_decode(q_nope, q_pe, cache, plan, cache_scale=0.5, need_lse=True)
        assert lse is not None
        error = float((out.float() - want).norm() / want.norm().clamp_min(1e-30))
        empty = want_lse == float("-inf")
        off = float((lse - want_lse)[~empty].abs().max()) if bool((~empty).any()) else 0.0
        if not error <= allowed or not off <= 2e-3 + 1e-5 * 100 or not bool((lse[empty] == float("-inf")).all()):
            raise Wrong(f"run {run}: output off by {error:.3g}, LSE by {off:.3g}")
        if bool(plan.counters.any()):
            raise Wrong(f"run {run}: a counter is left over")


def drawn(draw: random.Random, longest: int, float8: bool) -> tuple[AttentionShape, list[int], list[int]]:
    latent, rope = draw.choice(WIDTHS)
    dims = MLADims(heads=draw.choice((1, 3, 8, 16, 16, 20, 40, 128)), nope=32, rope=rope, v=32, latent=latent)
    count = draw.choice((1, 1, 2, 3, 8, 20))
    q_lens = [draw.choice((1, 1, 1, 2, 5, 8, 0)) for _ in range(count)] if draw.random() < 0.8 else [draw.randrange(9, 65)]
    kv_lens = [0 if draw.random() < 0.1 else round(longest ** draw.random()) for _ in q_lens]
    dtype = draw.choice(("bfloat16", "bfloat16", "float16", "float32"))
    shape = AttentionShape.decode(
        dims, batch=len(q_lens), kv_len=max(1, *kv_lens), q_len=max(1, *q_lens), dtype=dtype, lse=True,
        page_size=draw.choice((1, 16, 32, 64, 64, 48, 128)),
        cache_dtype="float8_e4m3fn" if float8 and draw.random() < 0.25 else None,
    )  # type: ignore[arg-type]  # fmt: skip
    return shape, q_lens, kv_lens


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--three", action="store_true")
    parser.add_argument("--longest", type=int, default=20_000, help="keys of a request, at most")
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked = parser.parse_args()
    backend = TritonMLA(torch.device(asked.device))
    if (reason := backend.available()) is not None:
        print(reason, file=sys.stderr)
        return 1
    began = time.monotonic()
    if asked.three:
        torch.manual_seed(asked.seed)
        dims = MLADims(heads=16, nope=128, rope=64, v=128, latent=512)
        for q_lens, kv_lens in THREE:
            shape = AttentionShape.decode(dims, batch=1, kv_len=64, dtype="bfloat16", page_size=64, lse=True)
            one_call(backend, replace(shape, q_len=max(q_lens)), list(q_lens), list(kv_lens), 2)
        print(f"3 calls right in {time.monotonic() - began:.1f} s")
        return 0
    for number in range(asked.calls):
        seed = asked.seed + number
        draw = random.Random(seed)
        torch.manual_seed(seed)
        shape, q_lens, kv_lens = drawn(draw, asked.longest, True)
        if backend.supports(shape) is not None:
            shape = replace(shape, cache_dtype=None)
        try:
            one_call(backend, shape, q_lens, kv_lens, draw.choice((1, 1, 3)))
        except Wrong as error:
            print(f"call {number} (--calls 1 --seed {seed}): {shape}, {q_lens} queries on {kv_lens} keys: {error}")
            return 1
        if (number + 1) % 500 == 0:
            print(f"{number + 1} calls right in {time.monotonic() - began:.0f} s", flush=True)
    print(f"{asked.calls} calls right in {time.monotonic() - began:.0f} s, seed {asked.seed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
