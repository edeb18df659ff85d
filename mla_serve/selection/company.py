"""Whether a request's bits change with its batch mates: tested, never believed."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mla_serve.backends.base import Backend, BatchLayout
from mla_serve.selection.inputs import Call, limits_of, make_call
from mla_serve.shapes import AttentionShape

__all__ = ["changed_by_company"]

# Past a tile's border, past a split's, and several of one length: where kernels let the batch decide.
_SHORT = [70, 9, 9, 200, 1]
_LONG = [700, 40, 40, 300, 1]


def changed_by_company(backend: Backend, shape: AttentionShape, *, seed: int) -> str | None:
    """Requests by themselves against a batch of all: None if all outputs and LSEs are equal bit for bit, else what differs.

    The lone runs are made with and without an LSE, where the backend gives one: that may not matter either.
    """
    q_lens = [shape.q_len] * len(_LONG) if shape.absorbed else _SHORT
    kv_lens = [max(shape.q_len, n) for n in _LONG] if shape.absorbed else _SHORT if shape.causal else _LONG
    state = backend.prepare(shape, limits_of((q_lens, kv_lens)))
    call = make_call(shape, q_lens, kv_lens, backend.device, seed=seed)

    def run(part: Call, need_lse: bool) -> tuple[Tensor, Tensor | None]:
        return part.run(backend, backend.plan(state, part.batch, scale=part.scale), need_lse=need_lse)

    out, lse = run(call, shape.lse)
    row = 0
    for request, q_len in enumerate(q_lens):
        rows = slice(row, row + q_len)
        row += q_len
        for need_lse in {shape.lse, backend.gives_lse}:
            own, own_lse = run(_alone(call, request), need_lse)
            same = torch.equal(own, out[rows])
            if own_lse is not None and lse is not None:
                same = same and torch.equal(own_lse, lse[rows])
            if not same:
                return f"the bits of a request with {kv_lens[request]} keys changed with its batch mates"
    return None


def _alone(call: Call, request: int) -> Call:
    """The same tensors of one request."""
    batch, device = call.batch, call.tensors[0].device
    assert batch.q_lens_host is not None
    assert batch.kv_lens_host is not None
    q_len, kv_len = batch.q_lens_host[request], batch.kv_lens_host[request]
    q_at, k_at = sum(batch.q_lens_host[:request]), sum(batch.kv_lens_host[:request])
    rows, keys = slice(q_at, q_at + q_len), slice(k_at, k_at + kv_len)
    a, b, c = call.tensors
    if not call.shape.absorbed:
        own = BatchLayout.make([q_len], [kv_len], device)
        return replace(call, batch=own, tensors=(a[rows], b[keys], c[keys]))
    assert batch.block_table is not None
    table = batch.block_table[request : request + 1]
    own = BatchLayout.make([q_len], [kv_len], device, block_table=table, page_size=batch.page_size)
    return replace(call, batch=own, tensors=(a[rows], b[rows], c))
