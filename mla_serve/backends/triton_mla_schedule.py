"""The schedule of `triton-mla`: cuts a step's work into equal shares, on the device, in one launch of one program.

The work of request r is tiles(r) * blocks(r) blocks: tiles of BLOCK_M rows (query tokens times heads), blocks of BLOCK_N
keys, at least one block where there are query tokens, so that a request without keys gets its zeros written. Program p of the
decode kernel takes blocks p * share to (p + 1) * share of all this. `share` is what spreads it over all programs, but at least
`least`: a piece that is too small costs more in the reduction than it saves. Everything follows from the lengths on the device,
so a captured graph replays with whatever the last plan left here.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["plan_kernel"]


@triton.jit(do_not_specialize=["num_requests"])
def plan_kernel(
    query_start, kv_lens, schedule, requests, starts, counters, num_requests, least,
    HEADS: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_REQUESTS: tl.constexpr, BLOCK_PROGRAMS: tl.constexpr, LOG_REQUESTS: tl.constexpr,
):  # fmt: skip
    """Fills `schedule`, `requests` and `starts` as `decode_kernel` reads them, and sets its counters to 0.

    BLOCK_REQUESTS = 2 ** LOG_REQUESTS >= num_requests and BLOCK_PROGRAMS >= PROGRAMS are powers of two.
    """
    request = tl.arange(0, BLOCK_REQUESTS)
    real = request < num_requests
    first = tl.load(query_start + request, mask=real, other=0)
    q_len = tl.load(query_start + request + 1, mask=real, other=0) - first
    kv_len = tl.load(kv_lens + request, mask=real, other=0)
    work = tl.cdiv(q_len * HEADS, BLOCK_M) * tl.maximum(tl.cdiv(kv_len, BLOCK_N), 1)
    end = tl.cumsum(work, 0)
    total = tl.sum(work, 0)
    share = tl.maximum(tl.cdiv(total, PROGRAMS), least)
    about = requests + request * 5
    tl.store(about, end - work, mask=real)
    tl.store(about + 1, end, mask=real)
    tl.store(about + 2, first, mask=real)
    tl.store(about + 3, q_len, mask=real)
    tl.store(about + 4, kv_len, mask=real)
    tl.store(schedule, share)
    tl.store(schedule + 1, total)
    tl.store(schedule + 2, tl.sum(q_len, 0))

    program = tl.arange(0, BLOCK_PROGRAMS)
    used = program < PROGRAMS
    for quarter in tl.static_range(4):
        tl.store(counters + quarter * PROGRAMS + program, tl.zeros_like(program), mask=used)

    # The request of a program's first block: how many requests end at or before it, found by halving.
    tl.debug_barrier()  # `requests` was written by other threads of this program
    before = tl.zeros_like(program)
    for bit in tl.static_range(LOG_REQUESTS, -1, -1):
        probe = before + (1 << bit)
        inside = used & (probe <= num_requests)
        end_of = tl.load(requests + (probe - 1) * 5 + 1, mask=inside, other=0)
        before = tl.where(inside & (end_of <= program * share), probe, before)
    tl.store(starts + program, before, mask=used)
