"""Concrete inputs for one attention call: random tensors laid out as an engine does, with traps where nobody may read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_serve.backends.base import Backend, BatchLayout, Limits, Plan, torch_dtype
from mla_serve.backends.reference import reference_decode, reference_prefill
from mla_serve.shapes import AttentionShape

GARBAGE = 1e4
CACHE_SCALE = 0.5
"""What a float8 cache's values are multiplied by; a power of two that is not 1, so that a kernel that drops it is seen."""

_SCALE = 2.2  # times qk ** -0.5: far enough from every usual width's, so that a scale taken from a tensor is seen
_TILE = 4_194_301  # a prime: repeated random values never line up with pages or heads


@dataclass(frozen=True, slots=True)
class Call:
    """One call: its batch, its tensors and the buffers behind them, which a kernel must leave as they are.

    `tensors` is (q, k, v) of the un-absorbed form, v a view of the packed [tokens, heads, nope + v] as it is served, or
    (q_nope, q_pe, cache) of the absorbed one. `unread` are views of all that no kernel may read.
    """

    shape: AttentionShape
    batch: BatchLayout
    scale: float
    tensors: tuple[Tensor, Tensor, Tensor]
    buffers: tuple[Tensor, ...]
    unread: tuple[Tensor, ...]
    cache_scale: float = 1.0

    def run(self, backend: Backend, plan: Plan, *, need_lse: bool, out: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        if self.shape.absorbed:
            return backend.run_decode(*self.tensors, plan, cache_scale=self.cache_scale, need_lse=need_lse, out=out)
        return backend.run_prefill(*self.tensors, plan, need_lse=need_lse, out=out)

    def expected(self) -> tuple[Tensor, Tensor]:
        """out [tokens, heads, v] and LSE [tokens, heads] of the float32 reference."""
        if self.shape.absorbed:
            return reference_decode(*self.tensors, self.batch, scale=self.scale, cache_scale=self.cache_scale)
        return reference_prefill(*self.tensors, self.batch, scale=self.scale, causal=self.shape.causal)

    def expected_row(self, request: int, row: int) -> tuple[Tensor, Tensor]:
        """The same for one query of one request: out [1, heads, v], LSE [1, heads]; cheap at any length."""
        q_lens, kv_lens = self.batch.q_lens_host or (), self.batch.kv_lens_host or ()
        seen = max(0, kv_lens[request] - (q_lens[request] - row - 1 if self.shape.causal else 0))
        at, first = sum(q_lens[:request]) + row, sum(kv_lens[:request])
        device = self.tensors[0].device
        if not self.shape.absorbed:
            q, k, v = self.tensors
            alone = BatchLayout.make([1], [seen], device)
            keys = slice(first, first + seen)
            return reference_prefill(q[at : at + 1], k[keys], v[keys], alone, scale=self.scale, causal=False)
        assert self.batch.block_table is not None
        table = self.batch.block_table[request : request + 1]
        alone = BatchLayout.make([1], [seen], device, block_table=table, page_size=self.batch.page_size)
        q_nope, q_pe, cache = self.tensors
        rows = slice(at, at + 1)
        return reference_decode(q_nope[rows], q_pe[rows], cache, alone, scale=self.scale, cache_scale=self.cache_scale)

    def empty_output(self, fill: float) -> Tensor:
        """An output tensor [tokens, heads, v] of the call's dtype, full of `fill`."""
        size = (self.batch.num_tokens, self.shape.heads, self.shape.v)
        return torch.full(size, fill, dtype=torch_dtype(self.shape.dtype), device=self.tensors[0].device)


def limits_of(*sizes: tuple[Sequence[int], Sequence[int]]) -> Limits:
    """Limits that hold every batch of (query lengths, key lengths)."""
    return Limits(
        max_requests=max(len(q) for q, _ in sizes),
        max_tokens=max(1, max(sum(q) for q, _ in sizes)),
        max_kv_tokens=max(1, max(sum(kv) for _, kv in sizes)),
    )


def full_size(shape: AttentionShape) -> tuple[list[int], list[int]]:
    """Query and key lengths of a batch of exactly `shape`; a ragged one has one request of three times the mean."""
    q_lens, kv_lens = [shape.q_len] * shape.batch, [shape.kv_len] * shape.batch
    if shape.ragged and shape.batch > 3:
        short = max(shape.q_len, shape.kv_len * (shape.batch - 3) // (shape.batch - 1))
        kv_lens = [3 * shape.kv_len, *([short] * (shape.batch - 1))]
    return q_lens, kv_lens


def make_call(
    shape: AttentionShape, q_lens: Sequence[int], kv_lens: Sequence[int], device: torch.device, *, seed: int, max_kv: int = 0
) -> Call:
    """A call of `shape`'s kind with these lengths, GARBAGE in all that must not be read. `max_kv` widens the block table."""
    generator = torch.Generator(device).manual_seed(seed)
    if shape.absorbed:
        call = _absorbed(shape, q_lens, kv_lens, device, generator, max_kv)
    else:
        call = _unabsorbed(shape, q_lens, kv_lens, device, generator)
    poison(call, GARBAGE)
    return call


def poison(call: Call, garbage: float) -> None:
    """Overwrites everything that no kernel may read with -garbage and +garbage in turn, or with NaN."""
    for view in call.unread:
        highest = torch.finfo(view.dtype).max
        row = torch.full((view.shape[-1],), garbage, device=view.device).clamp(max=highest)  # NaN stays NaN
        row[::2] *= -1
        view.copy_(row.to(view.dtype).expand_as(view))


def _unabsorbed(
    shape: AttentionShape, q_lens: Sequence[int], kv_lens: Sequence[int], device: torch.device, generator: torch.Generator
) -> Call:
    dtype, tokens, kv_tokens = torch_dtype(shape.dtype), sum(q_lens), sum(kv_lens)
    nope = max(shape.qk - shape.rope, 0)
    # One row more than is used, before the others: what is read from the base pointer of a buffer is a trap.
    q = _random((1 + tokens, shape.heads, shape.qk), dtype, generator)
    packed = _random((1 + kv_tokens, shape.heads, nope + shape.v), dtype, generator)  # as an up-projection gives it
    k = _random((1 + kv_tokens, shape.heads, shape.qk), dtype, generator)
    batch = BatchLayout.make(q_lens, kv_lens, device)
    unread = (q[:1], k[:1], packed[:1], *((packed[..., :nope],) if nope else ()))
    return Call(shape, batch, _SCALE * shape.qk**-0.5, (q[1:], k[1:], packed[1:, :, nope:]), (q, k, packed), unread)


def _absorbed(
    shape: AttentionShape, q_lens: Sequence[int], kv_lens: Sequence[int], device: torch.device, generator: torch.Generator,
    max_kv: int,
) -> Call:  # fmt: skip
    assert shape.page_size is not None
    page, tokens, needs = shape.page_size, sum(q_lens), [math.ceil(kv / shape.page_size) for kv in kv_lens]
    width, used = max(1, math.ceil(max_kv / page), *needs), sum(needs)
    pages = used + 2  # two pages of nobody: what lies in them must not matter
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(generator.initial_seed()), dtype=torch.int32)
    table = order[-1].repeat(len(needs), width)
    layers = _random((pages + 1, page, shape.qk), torch_dtype(shape.dtype), generator)
    scale = 1.0
    if shape.cache_dtype is not None and shape.cache_dtype != shape.dtype:
        layers, scale = layers.to(torch_dtype(shape.cache_dtype)), CACHE_SCALE
    cache = layers[1:]  # a layer's cache does not start where the buffer does
    unread, at = [layers[0], *(cache[int(page_id)] for page_id in order[used:])], 0
    for request, (need, kv_len) in enumerate(zip(needs, kv_lens, strict=True)):
        table[request, :need] = order[at : at + need]
        if kv_len % page:
            unread.append(cache[int(order[at + need - 1]), kv_len % page :])
        at += need
    table = table.to(device)
    batch = BatchLayout.make(q_lens, kv_lens, device, block_table=table, page_size=page)
    q_nope = _random((tokens, shape.heads, shape.v), torch_dtype(shape.dtype), generator)
    q_pe = _random((tokens, shape.heads, shape.qk - shape.v), torch_dtype(shape.dtype), generator)
    buffers = (q_nope, q_pe, layers, table)
    logits = _SCALE * shape.qk**-0.5 / scale
    return Call(shape, batch, logits, (q_nope, q_pe, cache), buffers, tuple(unread), cache_scale=scale)


def _random(size: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Normal values; a large tensor's repeat after a prime number, since drawing them all would take longer than the run."""
    count = math.prod(size)
    tile = torch.randn(min(count, _TILE), generator=generator, device=generator.device).to(dtype)
    if count <= _TILE:
        return tile.view(size)
    return tile.repeat(-(-count // _TILE))[:count].view(size)
