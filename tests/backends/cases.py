"""Random inputs for the laws: batches of any lengths, and the packed layouts that models hand to attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mla_serve.backends import Backend, BatchLayout, Limits, Plan, State, reference_decode, reference_prefill
from mla_serve.backends.base import torch_dtype
from mla_serve.shapes import AttentionShape

LIMITS = Limits(max_requests=64, max_tokens=1024, max_kv_tokens=8192)
SCALE = 0.0721688
Result = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class Case:
    """The tensors of one call in the order of the run method: q, k, v or q_nope, q_pe, cache."""

    shape: AttentionShape
    inputs: tuple[Tensor, Tensor, Tensor]
    batch: BatchLayout
    cache_scale: float = 1.0

    def run(self, backend: Backend, plan: Plan, *, need_lse: bool | None = None, out: Tensor | None = None) -> Result:
        """`need_lse` None asks for an LSE where the backend gives one."""
        need_lse = backend.gives_lse if need_lse is None else need_lse
        if not self.shape.absorbed:
            return backend.run_prefill(*self.inputs, plan, need_lse=need_lse, out=out)
        return backend.run_decode(*self.inputs, plan, cache_scale=self.cache_scale, need_lse=need_lse, out=out)

    def answer(
        self, backend: Backend, *, scale: float = SCALE, need_lse: bool | None = None, out: Tensor | None = None
    ) -> Result:
        """Prepares, plans and runs."""
        return self.run(backend, backend.plan(self.prepare(backend), self.batch, scale=scale), need_lse=need_lse, out=out)

    def prepare(self, backend: Backend) -> State:
        return backend.prepare(self.shape, LIMITS)

    def expected(self, scale: float = SCALE) -> tuple[Tensor, Tensor]:
        if not self.shape.absorbed:
            return reference_prefill(*self.inputs, self.batch, scale=scale, causal=self.shape.causal)
        return reference_decode(*self.inputs, self.batch, scale=scale, cache_scale=self.cache_scale)

    def blank(self) -> Tensor:
        """An output nobody has written yet: NaN."""
        q = self.inputs[0]
        return torch.full((q.shape[0], q.shape[1], self.shape.v), float("nan"), dtype=q.dtype, device=q.device)

    @property
    def storages(self) -> list[Tensor]:
        """All bytes behind the inputs, also those between and around the views."""
        return [storage_bytes(t) for t in self.inputs]


def storage_bytes(t: Tensor) -> Tensor:
    return torch.tensor([], dtype=torch.uint8, device=t.device).set_(t.untyped_storage())


def random(*size: int, shape: AttentionShape, device: torch.device) -> Tensor:
    return torch.randn(*size, device=device).to(torch_dtype(shape.dtype))


def make(shape: AttentionShape, q_lens: Sequence[int], kv_lens: Sequence[int], device: torch.device, **kwargs: float) -> Case:
    """A batch with these lengths in the shape's phase; `unread` and `spread` as `decode` takes them."""
    if shape.absorbed:
        return decode(shape, q_lens, kv_lens, device, **kwargs)
    tokens, keys = sum(q_lens), sum(kv_lens)
    widths = ((tokens, shape.qk), (keys, shape.qk), (keys, shape.v))
    q, k, v = (random(n, shape.heads, width, shape=shape, device=device) for n, width in widths)
    return Case(shape, (q * kwargs.get("spread", 1.0), k, v), BatchLayout.make(q_lens, kv_lens, device))


def decode(
    shape: AttentionShape, q_lens: Sequence[int], kv_lens: Sequence[int], device: torch.device, *,
    unread: float = float("nan"), spread: float = 1.0, table_width: int | None = None,
) -> Case:  # fmt: skip
    """Pages in random order in a pool with spare ones; every slot that must not be read holds `unread`, and so do table entries
    past a request's last page: they point nowhere."""
    page = shape.page_size
    assert page is not None
    needed = [-(-n // page) for n in kv_lens]
    pages = sum(needed) + 3
    pool = torch.full((pages * page, shape.qk), unread, device=device)
    table = torch.full((len(kv_lens), table_width or max(1, *needed)), -1, dtype=torch.int32)
    order = torch.randperm(pages)
    at = 0
    for i, kv_len in enumerate(kv_lens):
        table[i, : needed[i]] = order[at : at + needed[i]]
        rows = (order[at : at + needed[i]].unsqueeze(1) * page + torch.arange(page)).flatten()[:kv_len]
        pool[rows.to(device)] = torch.randn(kv_len, shape.qk, device=device)
        at += needed[i]
    cache = pool.to(torch_dtype(shape.cache_dtype or shape.dtype)).view(pages, page, shape.qk)
    tokens = sum(q_lens)
    q_nope = random(tokens, shape.heads, shape.v, shape=shape, device=device) * spread
    q_pe = random(tokens, shape.heads, shape.rope, shape=shape, device=device) * spread
    batch = BatchLayout.make(
        q_lens, kv_lens, device, block_table=table.to(device), page_size=page, live_requests=sum(n > 0 for n in kv_lens)
    )
    return Case(shape, (q_nope, q_pe, cache), batch)


def packed(shape: AttentionShape, device: torch.device) -> Iterator[tuple[str, Case]]:
    """The layouts in which K and V arrive as views of one buffer (K02), with NaN around what is to be read."""
    heads, qk, v = shape.heads, shape.qk, shape.v
    lengths, requests = [6, 6], 2
    tokens = sum(lengths)

    def buffer(*size: int) -> Tensor:
        return random(*size, shape=shape, device=device)

    def case(q: Tensor, k: Tensor, v: Tensor) -> Case:
        return Case(shape, (q, k, v), BatchLayout.make(lengths, lengths, device))

    if shape.absorbed:
        layers = decode(shape, [1, 1], [5, 37], device)
        pool = torch.stack([torch.full_like(layers.inputs[2], float("nan")), layers.inputs[2]])
        queries = buffer(3, 2, heads, qk)[1]
        yield "one layer of a pool, q_nope and q_pe of one buffer", Case(
            shape, (queries[..., :v], queries[..., v:], pool[1]), layers.batch
        )  # fmt: skip
        return
    if qk == v:
        for name, axis in (("[B, S, 3, H, D]", 2), ("[B, S, H, 3, D]", 3)):
            size = [requests, lengths[0], heads, v]
            size.insert(axis, 3)
            yield name, case(*(t.flatten(0, 1) for t in buffer(*size).unbind(axis)))
        fused = buffer(lengths[0], requests, heads, 3 * v)  # [S, B, H, 3D], one request: its rows are a step of B apart
        yield (
            "[S, B, H, 3D]",
            Case(shape, tuple(t[:, 1] for t in fused.split(v, -1)), BatchLayout.make(lengths[:1], lengths[:1], device)),
        )
        keys, values = buffer(tokens, 2, heads, v).unbind(1)
        yield "packed KV", case(buffer(tokens, heads, qk), keys, values)
    kv = buffer(tokens, heads, qk + v)
    yield "k and v of [T, H, qk + v]", case(buffer(tokens, heads, qk), kv[..., :qk], kv[..., qk:])
    yield "v before k in [T, H, v + qk]", case(buffer(tokens, heads, qk), kv[..., v:], kv[..., :v])
    up = buffer(tokens, heads, qk - shape.rope + v)  # kv_b's output, [T, H, nope + v]
    k = torch.cat([up[..., : qk - shape.rope], buffer(tokens, 1, shape.rope).expand(-1, heads, -1)], dim=-1)
    yield "v of [T, H, nope + v]", case(buffer(tokens, heads, qk), k, up[..., qk - shape.rope :])
    if qk > v:  # as the latent 512 of 576: values are the first columns of the keys
        row = buffer(tokens, heads, qk)
        yield "v the first columns of k", case(buffer(tokens, heads, qk), row, row[..., :v])


def with_batch(case: Case, **changes: object) -> Case:
    return replace(case, batch=replace(case.batch, **changes))  # type: ignore[arg-type]
