"""The kernel of `triton-mla`: absorbed paged decode in one launch. Imported only where Triton is there and usable.

Words. A tile is BLOCK_M rows of one request, a row being a (query token, head) pair. A block is BLOCK_N keys. The work of a
tile is its request's blocks, one after another; the work of a step is that of all tiles, request by request. Each program takes
`share` consecutive blocks of it, so a tile may be cut into pieces that lie in neighbouring programs; `triton_mla_schedule` says
which. A program has at most two pieces that are no whole tile: the end of one tile (which may also be its middle) and the
beginning of another. So two slots of the workspace are enough for it: 2 * program for a piece that does not begin its tile,
2 * program + 1 for one that does.

Memory order. A piece is handed over in four steps: (1) all threads of its program store the partial state, plain stores;
(2) `debug_barrier` (bar.sync) orders these before what any thread of the program does afterwards; (3) one thread adds to the
group's counter with acquire-release semantics at GPU scope. Release is cumulative over the barrier, so whoever observes the sum
also observes the stores of (1). Additions to one counter form one release sequence, hence (4) the program that finds all others
counted has acquired the stores of all of them; Triton hands the sum to that program's other threads through shared memory and
a barrier, a second `debug_barrier` keeps the loads behind it, and they bypass L1 (".cg"), which is not coherent. Nobody waits
for anybody, so the programs may run in any order and not all at once. The reducer alone touches the counter after that, in this
launch, and stores 0; the next launch of the stream sees it, as kernels of a stream follow one another.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["decode_kernel"]


@triton.jit
def _operand(x, INTERPRETED: tl.constexpr):
    """An operand of a product; the interpreter multiplies bfloat16 as the integers that it keeps them in."""
    return x.to(tl.float32) if INTERPRETED else x


@triton.jit
def _along(x, SWAP: tl.constexpr, KEYS: tl.constexpr):
    """A vector over keys (KEYS) or rows, spread over the matrix of scores: [rows, keys], or its transpose with SWAP."""
    return x[:, None] if SWAP == KEYS else x[None, :]


@triton.jit
def _place(pages, first, kv_len, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Page, one or [N], and slot [N] of the keys from `first` on; page 0 for those that are not there."""
    key = first + tl.arange(0, BLOCK_N)
    if PAGE % BLOCK_N == 0:  # a block lies in one page
        page = tl.load(pages + first // PAGE, mask=first < kv_len, other=0).to(tl.int64)
        slot = first % PAGE + tl.arange(0, BLOCK_N)
    else:
        page = tl.load(pages + key // PAGE, mask=key < kv_len, other=0).to(tl.int64)
        slot = key % PAGE
    return page, slot


@triton.jit
def _attend(
    q, q_pe, cache, pages, kv_len, limit, begin, end, stride_page, stride_slot, logit_scale,
    LATENT: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr, SWAP: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One tile's rows on the blocks from `begin` to `end`: normalised output and base-2 LSE. `limit` [M]: keys a row sees.

    With SWAP both products are computed transposed, so that the latents are the tall operand, whose height tensor cores of
    Hopper want to be 64, and the few rows of queries the narrow one.
    """
    column = tl.arange(0, BLOCK_L)
    rope_column = tl.arange(0, BLOCK_R)
    acc = tl.zeros([BLOCK_L, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_L], dtype=tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    # Looked up one block ahead, so that no load of latents waits for its address.
    page, slot = _place(pages, begin * BLOCK_N, kv_len, PAGE, BLOCK_N)
    for block in range(begin, end):
        key = block * BLOCK_N + tl.arange(0, BLOCK_N)
        readable = (key < kv_len)[:, None]
        row = (page * stride_page + slot * stride_slot)[:, None]
        page, slot = _place(pages, (block + 1) * BLOCK_N, kv_len, PAGE, BLOCK_N)
        # What must not be read becomes 0 here, so a NaN in it reaches neither product.
        inside = readable if LATENT == BLOCK_L else readable & (column < LATENT)[None, :]
        latent = tl.load(cache + row + column[None, :], mask=inside, other=0.0)
        latent = _operand(latent.to(q.dtype), INTERPRETED)
        if SWAP:
            scores = tl.dot(latent, tl.trans(_operand(q, INTERPRETED)), input_precision="ieee")
        else:
            scores = tl.dot(_operand(q, INTERPRETED), tl.trans(latent), input_precision="ieee")
        if ROPE > 0:
            inside = readable if ROPE == BLOCK_R else readable & (rope_column < ROPE)[None, :]
            rope = tl.load(cache + row + LATENT + rope_column[None, :], mask=inside, other=0.0)
            rope = _operand(rope.to(q.dtype), INTERPRETED)
            if SWAP:
                scores = tl.dot(rope, tl.trans(_operand(q_pe, INTERPRETED)), scores, input_precision="ieee")
            else:
                scores = tl.dot(_operand(q_pe, INTERPRETED), tl.trans(rope), scores, input_precision="ieee")
        seen = _along(key, SWAP, True) < _along(limit, SWAP, False)
        scores = tl.where(seen, scores * logit_scale, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 0 if SWAP else 1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # -inf less -inf would be NaN
        weights = tl.math.exp2(scores - _along(shift, SWAP, False))
        fade = tl.math.exp2(peak - shift)
        total = total * fade + tl.sum(weights, 0 if SWAP else 1)
        acc = acc * _along(fade, SWAP, False)
        weights = _operand(weights.to(q.dtype), INTERPRETED)
        if SWAP:
            acc = tl.dot(tl.trans(latent), weights, acc, input_precision="ieee")
        else:
            acc = tl.dot(weights, latent, acc, input_precision="ieee")
        peak = higher
    divisor = tl.where(total == 0.0, 1.0, total)  # a row that sees no key: 0 and -inf
    acc = acc / _along(divisor, SWAP, False)
    return tl.trans(acc) if SWAP else acc, tl.where(total == 0.0, float("-inf"), peak + tl.math.log2(divisor))


@triton.jit
def _slot(program, piece):
    """Where the workspace has the `piece`-th piece of the tile that begins in `program`."""
    return 2 * (program + piece) + tl.where(piece == 0, 1, 0)


@triton.jit
def _arrived_last(counter, expected):
    """Counts this program's partial state in; True for the one that completes `expected`, which also resets the counter."""
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == expected - 1
    if last:
        tl.store(counter, 0)
    tl.debug_barrier()
    return last


@triton.jit
def _union_lse(state_lse, program, begin, end, step, BLOCK_M: tl.constexpr):
    """The base-2 LSE [M] over the pieces begin, begin + step, ... before `end` of the tile that begins in `program`."""
    row = tl.arange(0, BLOCK_M)
    peak = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    for piece in range(begin, end, step):
        lse = tl.load(state_lse + _slot(program, piece) * BLOCK_M + row, cache_modifier=".cg")
        higher = tl.maximum(peak, lse)
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.math.exp2(peak - shift) + tl.math.exp2(lse - shift)
        peak = higher
    return tl.where(total == 0.0, float("-inf"), peak + tl.math.log2(tl.where(total == 0.0, 1.0, total)))


@triton.jit
def _union_part(
    state, state_lse, whole_lse, program, begin, end, first_column, step,
    BLOCK_M: tl.constexpr, BLOCK_L: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """The output of the same pieces, PART columns of it. A tile's whole width twice over would not fit in registers."""
    row = tl.arange(0, BLOCK_M)
    inside = row[:, None] * BLOCK_L + first_column + tl.arange(0, PART)[None, :]
    shift = tl.where(whole_lse == float("-inf"), 0.0, whole_lse)
    acc = tl.zeros([BLOCK_M, PART], dtype=tl.float32)
    for piece in range(begin, end, step):
        slot = _slot(program, piece)
        weight = tl.math.exp2(tl.load(state_lse + slot * BLOCK_M + row, cache_modifier=".cg") - shift)
        result = tl.load(state + slot.to(tl.int64) * (BLOCK_M * BLOCK_L) + inside, cache_modifier=".cg")
        acc += result * weight[:, None]
    return acc


@triton.jit
def _put(
    out, out_lse, result, lse, first_column, token, head, real, stride_token, stride_head, cache_scale,
    NEED_LSE: tl.constexpr, HEADS: tl.constexpr, LATENT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Writes a tile's final answer, WIDTH columns of it: output in the values' own scale, natural-log LSE."""
    column = first_column + tl.arange(0, WIDTH)
    place = token.to(tl.int64) * stride_token + head * stride_head
    inside = real[:, None] & (column < LATENT)[None, :]
    tl.store(out + place[:, None] + column[None, :], (result * cache_scale).to(out.dtype.element_ty), mask=inside)
    if NEED_LSE:
        tl.store(out_lse + token.to(tl.int64) * HEADS + head, lse * 0.6931471805599453, mask=real)


@triton.jit(do_not_specialize=["num_tokens", "fan"])
def decode_kernel(
    q_nope, q_pe, cache, out, out_lse, table, schedule, requests, starts, state, state_lse, counters,
    num_tokens, stride_nope_token, stride_nope_head, stride_pe_token, stride_pe_head, stride_page, stride_slot,
    stride_out_token, stride_out_head, stride_table, logit_scale, cache_scale, fan,
    NEED_LSE: tl.constexpr, HEADS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr,
    PART: tl.constexpr, SWAP: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One step of one layer.

    `schedule` [share, total, tokens of requests], `requests` [requests, 5] (first block, end, first token, query tokens, keys),
    `starts` [programs] (the request in which a program begins), all int32. `state` [2 * programs, BLOCK_M, BLOCK_L] and
    `state_lse` float32; `counters` [2, 2 * programs] int32, 0 before and after. `logit_scale` makes logits base 2.
    Tiles of more than `fan` pieces are reduced in two levels: groups of `fan` by the last program of each, then the groups by
    the last of these programs.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    share = tl.load(schedule)
    total = tl.load(schedule + 1)
    request = tl.load(starts + program)
    position = program * share
    stop = tl.minimum(position + share, total)
    while position < stop:
        while tl.load(requests + request * 5 + 1) <= position:
            request += 1
        about = requests + request * 5
        first_token = tl.load(about + 2)
        q_len = tl.load(about + 3)
        kv_len = tl.load(about + 4)
        done = position - tl.load(about)
        blocks = tl.maximum(tl.cdiv(kv_len, BLOCK_N), 1)
        tile = done // blocks
        begin = done - tile * blocks
        tile_begin = position - begin
        end = tl.minimum(blocks, stop - tile_begin)

        row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        real = row < q_len * HEADS
        token = row // HEADS
        head = row - token * HEADS
        limit = kv_len - q_len + token + 1  # bottom-right: the last query token sees all keys
        token += first_token
        column = tl.arange(0, BLOCK_L)
        place = token.to(tl.int64) * stride_nope_token + head * stride_nope_head
        inside = real[:, None] & (column < LATENT)[None, :]
        q = tl.load(q_nope + place[:, None] + column[None, :], mask=inside, other=0.0)
        q_rope = q
        if ROPE > 0:
            rope_column = tl.arange(0, BLOCK_R)
            place = token.to(tl.int64) * stride_pe_token + head * stride_pe_head
            inside = real[:, None] & (rope_column < ROPE)[None, :]
            q_rope = tl.load(q_pe + place[:, None] + rope_column[None, :], mask=inside, other=0.0)
        result, lse = _attend(
            q, q_rope, cache, table + request.to(tl.int64) * stride_table, kv_len, limit, begin, end, stride_page, stride_slot,
            logit_scale, LATENT, ROPE, PAGE, BLOCK_M, BLOCK_N, BLOCK_L, BLOCK_R, SWAP, INTERPRETED,
        )  # fmt: skip

        if end - begin == blocks:
            _put(
                out, out_lse, result, lse, 0, token, head, real, stride_out_token, stride_out_head, cache_scale,
                NEED_LSE, HEADS, LATENT, BLOCK_L,
            )  # fmt: skip
        else:
            # Which programs have a piece of this tile follows from its place in the work.
            first_program = tile_begin // share
            pieces = (tile_begin + blocks - 1) // share - first_program + 1
            piece = program - first_program
            group = piece // fan * fan
            group_end = tl.minimum(group + fan, pieces)
            slot = _slot(first_program, piece)
            lane = tl.arange(0, BLOCK_M)
            columns = lane[:, None] * BLOCK_L + column[None, :]
            tl.store(state + slot.to(tl.int64) * (BLOCK_M * BLOCK_L) + columns, result)
            tl.store(state_lse + slot * BLOCK_M + lane, lse)
            slot = _slot(first_program, group)
            if _arrived_last(counters + slot, group_end - group):
                whole_lse = _union_lse(state_lse, first_program, group, group_end, 1, BLOCK_M)
                if pieces <= fan:
                    for part in range(0, LATENT, PART):
                        whole = _union_part(
                            state, state_lse, whole_lse, first_program, group, group_end, part, 1, BLOCK_M, BLOCK_L, PART
                        )
                        _put(
                            out, out_lse, whole, whole_lse, part, token, head, real, stride_out_token, stride_out_head,
                            cache_scale, NEED_LSE, HEADS, LATENT, PART,
                        )  # fmt: skip
                else:
                    # The group's pieces have been counted, so this program alone reads them, and may put the union in the
                    # slot of the first, column by column as it goes and the LSE at the end.
                    for part in range(0, LATENT, PART):
                        whole = _union_part(
                            state, state_lse, whole_lse, first_program, group, group_end, part, 1, BLOCK_M, BLOCK_L, PART
                        )
                        tl.debug_barrier()
                        some = lane[:, None] * BLOCK_L + part + tl.arange(0, PART)[None, :]
                        tl.store(state + slot.to(tl.int64) * (BLOCK_M * BLOCK_L) + some, whole)
                    tl.debug_barrier()
                    tl.store(state_lse + slot * BLOCK_M + lane, whole_lse)
                    if _arrived_last(counters + 2 * programs + _slot(first_program, 0), tl.cdiv(pieces, fan)):
                        whole_lse = _union_lse(state_lse, first_program, 0, pieces, fan, BLOCK_M)
                        for part in range(0, LATENT, PART):
                            whole = _union_part(
                                state, state_lse, whole_lse, first_program, 0, pieces, part, fan, BLOCK_M, BLOCK_L, PART
                            )
                            _put(
                                out, out_lse, whole, whole_lse, part, token, head, real, stride_out_token, stride_out_head,
                                cache_scale, NEED_LSE, HEADS, LATENT, PART,
                            )  # fmt: skip
        position = tile_begin + end

    # Tokens of no request, behind those of all requests.
    every = tl.arange(0, BLOCK_L)
    spare = tl.load(schedule + 2) + program
    while spare < num_tokens:
        for number in range(HEADS):
            start = spare.to(tl.int64) * stride_out_token + number * stride_out_head
            tl.store(out + start + every, tl.zeros([BLOCK_L], dtype=out.dtype.element_ty), mask=every < LATENT)
            if NEED_LSE:
                tl.store(out_lse + spare.to(tl.int64) * HEADS + number, float("-inf"))
        spare += programs
