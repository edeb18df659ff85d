"""Paged absorbed decode in plain torch: gather the latents a batch reads, two batched products, no loop over requests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_serve.backends.base import AttentionError, Backend, BatchLayout, Kind, Plan, State
from mla_serve.shapes import AttentionShape

__all__ = ["TorchMLA"]


@dataclass(slots=True)
class MLAPlan(Plan):
    """Where the latents of each request lie and which of them each query sees, computed once for all layers.

    `rows` [requests, keys] int64 indexes the cache's tokens. A slot past a request's end points at its last token (at the
    first of the cache where it has none), so that no slot nobody wrote is ever read. `hidden` [requests, max_q, 1, keys] and
    `blind` [requests, max_q] are True where a query must not see a key, and where it sees none. `slots` [tokens] places ragged
    query rows in [requests * max_q]; None where every request has max_q of them, or none at all behind the last live one.
    """

    max_q: int
    rows: Tensor
    hidden: Tensor
    blind: Tensor
    slots: Tensor | None = None


class TorchMLA(Backend):
    """Absorbed attention on any device. The last resort of decode, and a CPU server's main kernel."""

    name = "torch-mla"
    capturable = True
    takes_cache_scale = True

    def kind(self, shape: AttentionShape) -> Kind:
        return Kind.UNFUSED

    def available(self) -> str | None:
        return None

    def supports(self, shape: AttentionShape) -> str | None:
        if not shape.absorbed:
            return "takes the absorbed form only"
        if shape.dtype not in ("float32", "bfloat16", "float16"):
            return f"takes float32, bfloat16 and float16, not {shape.dtype}"
        return None

    def plan(self, state: State, batch: BatchLayout, *, scale: float, reuse: Plan | None = None) -> MLAPlan:
        table, page = batch.block_table, batch.page_size
        if table is None or page is None:
            raise AttentionError(f"{self.name} needs a block table and a page size in its BatchLayout")
        graph = state.shape.graph
        # A captured graph has the sizes of its first plan, so that one must cover whatever the block table can hold.
        keys = table.shape[1] * page if graph else max(1, batch.max_kv)
        max_q = state.shape.q_len if graph else max(1, batch.max_q)
        kv_lens = batch.kv_lens.long()
        q_lens = batch.query_start_loc.diff()
        slot = torch.minimum(torch.arange(keys, device=table.device), (kv_lens - 1).clamp_min(0).unsqueeze(1))
        rows = table.long().gather(1, slot // page) * page + slot % page
        rows = rows.masked_fill((kv_lens == 0).unsqueeze(1), 0)
        # Bottom-right causal: the last query of a request sees all kv_len keys, the one before it one fewer.
        seen = (kv_lens - q_lens + 1).unsqueeze(1) + torch.arange(max_q, device=table.device)
        hidden = (torch.arange(keys, device=table.device) >= seen.unsqueeze(-1)).unsqueeze(2)
        fresh = MLAPlan(state, batch, scale, max_q, rows, hidden, seen <= 0, self._slots(batch, max_q, graph=graph))
        if not isinstance(reuse, MLAPlan):
            return fresh
        return _refresh(reuse, fresh, graph=graph)

    def _slots(self, batch: BatchLayout, max_q: int, *, graph: bool) -> Tensor | None:
        """The `slots` of a plan. Even batches are told by their counts, or by host lengths, never by asking the device."""
        if batch.num_tokens == batch.num_requests * max_q:
            return None
        host = batch.q_lens_host if batch.host_lens_exact else None
        if host is not None:
            live = batch.num_tokens // max_q
            if host == (max_q,) * live + (0,) * (len(host) - live):
                return None
        if graph:
            raise AttentionError(f"{self.name} replays a graph with {max_q} query tokens for each live request, no mixture")
        token = torch.arange(batch.num_tokens, device=batch.query_start_loc.device, dtype=torch.int32)
        owner = torch.searchsorted(batch.query_start_loc, token, right=True) - 1
        return owner * max_q + token - batch.query_start_loc[owner]

    def run_decode(
        self,
        q_nope: Tensor,
        q_pe: Tensor,
        cache: Tensor,
        plan: Plan,
        *,
        cache_scale: float = 1.0,
        need_lse: bool,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As the contract says. Products, softmax and LSE are float32 whatever the dtypes of queries and cache."""
        assert isinstance(plan, MLAPlan)
        tokens, heads, latent = q_nope.shape
        q = torch.cat([q_nope, q_pe], dim=-1).float() * (plan.scale * cache_scale)
        u = plan.max_q
        if plan.slots is None:
            n = tokens // u
            q = q.view(n, u * heads, -1)
        else:
            n = plan.rows.shape[0]
            spread = q.new_zeros(n * u, heads, q.shape[-1])
            spread[plan.slots] = q
            q = spread.view(n, u * heads, -1)
        rows, keys = plan.rows[:n], plan.rows.shape[1]
        k = cache.flatten(0, 1).index_select(0, rows.flatten()).float().view(n, keys, -1)
        scores = torch.bmm(q, k.transpose(1, 2)).view(n, u, heads, keys)
        scores.masked_fill_(plan.hidden[:n], float("-inf"))
        blind = plan.blind[:n].unsqueeze(-1)
        lse = scores.logsumexp(-1)  # [n, u, heads]
        weights = scores.sub_(lse.masked_fill(blind, 0.0).unsqueeze(-1)).exp_()
        result = torch.bmm(weights.view(n, u * heads, keys), k[..., :latent]).view(n, u, heads, latent)
        result = result.mul_(cache_scale).masked_fill_(blind.unsqueeze(-1), 0.0)
        result, lse = result.view(n * u, heads, latent), lse.view(n * u, heads)
        if plan.slots is not None:
            result, lse = result[plan.slots], lse[plan.slots]
        return result.to(q_nope.dtype) if out is None else out.copy_(result), lse if need_lse else None


def _refresh(plan: MLAPlan, fresh: MLAPlan, *, graph: bool) -> MLAPlan:
    """Moves a new step into an old plan: into the same storage where a graph was captured from it."""
    if graph:
        if plan.rows.shape != fresh.rows.shape or plan.max_q != fresh.max_q:
            raise AttentionError(
                f"a graph captured for {list(plan.rows.shape)} requests and keys cannot replay {list(fresh.rows.shape)}"
            )
        plan.rows.copy_(fresh.rows)
        plan.hidden.copy_(fresh.hidden)
        plan.blind.copy_(fresh.blind)
    else:
        plan.max_q, plan.rows, plan.hidden, plan.blind, plan.slots = (
            fresh.max_q, fresh.rows, fresh.hidden, fresh.blind, fresh.slots,
        )  # fmt: skip
    plan.state, plan.batch, plan.scale = fresh.state, fresh.batch, fresh.scale
    return plan
