"""Absorbed batches request by request, for kernels whose padding, splits or tiles depend on the batch as a whole.

It is the plainest way to batch invariance: a request that is planned and run by itself cannot see who else is there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_serve.backends.base import AttentionError, Backend, BatchLayout, Plan, State

__all__ = ["AlonePlan", "plan_alone", "run_alone"]


@dataclass(slots=True)
class AlonePlan(Plan):
    """The rows of each request that has queries, and its own plan."""

    parts: tuple[tuple[slice, Plan], ...] = ()


def plan_alone(
    plan: Callable[[BatchLayout], Plan], state: State, batch: BatchLayout, *, name: str, scale: float, reuse: Plan | None
) -> AlonePlan:
    """`plan` makes the plan of a batch of one request. Raises AttentionError without exact host lengths or a block table."""
    q_lens, kv_lens, table, page = batch.q_lens_host, batch.kv_lens_host, batch.block_table, batch.page_size
    if q_lens is None or kv_lens is None or not batch.host_lens_exact:
        raise AttentionError(f"{name} needs exact host lengths to run each request by itself, and this batch has none")
    if table is None or page is None:
        raise AttentionError(f"{name} needs a block table and a page size in its BatchLayout")
    parts, row = [], 0
    for i, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        if q_len:
            pages = table[i : i + 1, : max(1, -(-kv_len // page))]
            own = BatchLayout.make([q_len], [kv_len], table.device, block_table=pages, page_size=page)
            parts.append((slice(row, row + q_len), plan(own)))
        row += q_len
    if not isinstance(reuse, AlonePlan):
        return AlonePlan(state, batch, scale, tuple(parts))
    reuse.state, reuse.batch, reuse.scale, reuse.parts = state, batch, scale, tuple(parts)
    return reuse


def run_alone(
    backend: Backend, q_nope: Tensor, q_pe: Tensor, cache: Tensor, plan: AlonePlan, *, cache_scale: float, need_lse: bool,
    out: Tensor | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`Backend.run_decode` request by request; rows of no request are 0 and -inf."""
    result = torch.zeros_like(q_nope, memory_format=torch.contiguous_format) if out is None else out.zero_()
    lse = torch.full(q_nope.shape[:2], float("-inf"), device=q_nope.device) if need_lse else None
    for rows, own in plan.parts:
        _, own_lse = backend.run_decode(
            q_nope[rows], q_pe[rows], cache, own, cache_scale=cache_scale, need_lse=need_lse, out=result[rows]
        )
        if lse is not None and own_lse is not None:
            lse[rows] = own_lse
    return result, lse
