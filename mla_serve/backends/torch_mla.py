"""Paged absorbed decode in plain torch: gather the latents a batch reads, attend to them in one call, no loop over requests.

Absorbed attention has one key head, and its values are the first columns of its keys. So a batch of gathered latents is a
dense batch in which the query heads are the rows of one matrix: on a CPU torch's flash operator reads each latent once for
both products (values as wide as keys, the rope columns of the output cut off); on other devices two batched products do it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mla_serve.backends.alone import AlonePlan, plan_alone, run_alone
from mla_serve.backends.base import AttentionError, Backend, BatchLayout, Kind, Limits, Plan, State, torch_dtype
from mla_serve.shapes import AttentionShape

__all__ = ["TorchMLA"]

_BUFFER_BYTES = 16 << 20  # gathered latents of one call on a CPU: more would leave the last-level cache between gather and use
_SPLIT = 256  # keys of an item where a request is split


@dataclass(slots=True)
class MLAState(State):
    """On a CPU the buffer that latents are gathered into, [rows, latent + rope]; a fresh one per call would be page faults.

    It is written and read inside one run call, so all Plans may use it as long as their runs are on one thread. On other
    devices None: their allocators give memory out in stream order.
    """

    buffer: Tensor | None


@dataclass(slots=True)
class MLAPlan(Plan):
    """Items of attention, computed once for all layers: item i is request `owner[i]` on up to `rows.shape[1]` of its keys.

    `rows` [items, keys] int64 indexes the cache's tokens; a slot past a request's end repeats its last token (the cache's
    first where it has none), so nothing that nobody wrote is read. `bias` [items, max_q, 1, keys] float32 is -inf where a
    query must not see a key, `blind` [items, max_q, 1] True where it sees none. `owner` is None where item i is request i.
    `slots` [tokens] places ragged query rows in [requests * max_q]; None where the live requests, which come first, have
    max_q each.
    """

    max_q: int
    rows: Tensor
    bias: Tensor
    blind: Tensor
    owner: Tensor | None = None
    slots: Tensor | None = None


class TorchMLA(Backend):
    """Absorbed attention on any device: the last resort of a GPU's decode, and a CPU server's main kernel.

    How a batch is padded and split depends on all its requests; for batch invariance each one is planned and run by itself.
    """

    name = "torch-mla"
    capturable = True
    takes_cache_scale = True
    batch_invariant = True

    def kind(self, shape: AttentionShape) -> Kind:
        return Kind.UNFUSED

    def available(self) -> str | None:
        return None

    def supports(self, shape: AttentionShape) -> str | None:
        if not shape.absorbed:
            return "takes the absorbed form only"
        if shape.dtype not in ("float32", "bfloat16", "float16"):
            return f"takes float32, bfloat16 and float16, not {shape.dtype}"
        if shape.batch_invariant and shape.graph:
            return "runs each request by itself for batch invariance, which a captured graph cannot replay with others"
        return None

    def prepare(self, shape: AttentionShape, limits: Limits) -> MLAState:
        self.require(shape)
        if self.device.type != "cpu":
            return MLAState(shape, limits, None)
        dtype = torch_dtype(shape.cache_dtype or shape.dtype)
        rows = max(_SPLIT, _BUFFER_BYTES // (shape.qk * dtype.itemsize))
        with torch.inference_mode(False):  # a tensor made in inference mode could not be written outside it
            return MLAState(shape, limits, torch.empty(rows, shape.qk, dtype=dtype))

    def plan(self, state: State, batch: BatchLayout, *, scale: float, reuse: Plan | None = None) -> Plan:
        assert isinstance(state, MLAState)
        if state.shape.batch_invariant:
            one = partial(self._plan, state, scale=scale, reuse=None)
            return plan_alone(one, state, batch, name=self.name, scale=scale, reuse=reuse)
        return self._plan(state, batch, scale=scale, reuse=reuse)

    def _plan(self, state: MLAState, batch: BatchLayout, *, scale: float, reuse: Plan | None) -> MLAPlan:
        table, page, graph = batch.block_table, batch.page_size, state.shape.graph
        if table is None or page is None:
            raise AttentionError(f"{self.name} needs a block table and a page size in its BatchLayout")
        device = table.device
        max_q = state.shape.q_len if graph else max(1, batch.max_q)
        kv_lens, q_lens = batch.kv_lens.long(), batch.query_start_loc.diff()
        owner, start, keys = self._items(state, batch, max_q)
        ends, pages = kv_lens.unsqueeze(1), table  # [items, 1], [items, max pages]
        # Bottom-right causal: the last query of a request sees all kv_len keys, the one before it one fewer.
        seen = ends - q_lens.unsqueeze(1) + torch.arange(1, max_q + 1, device=device)
        if owner is not None:
            ends, pages, seen = ends[owner], pages[owner], seen[owner] - start
        at = torch.minimum(torch.arange(keys, device=device) + start, (ends - 1).clamp_min(0))
        rows = pages.gather(1, at // page).long() * page + at % page
        rows.masked_fill_(ends == 0, 0)
        hidden = torch.arange(keys, device=device) >= seen.unsqueeze(-1)
        bias = torch.zeros(hidden.shape, device=device).masked_fill_(hidden, float("-inf")).unsqueeze(2)
        blind = (seen <= 0).unsqueeze(2)
        fresh = MLAPlan(state, batch, scale, max_q, rows, bias, blind, owner, self._slots(batch, max_q, graph=graph))
        return _refresh(reuse, fresh, graph=graph) if isinstance(reuse, MLAPlan) else fresh

    def _items(self, state: MLAState, batch: BatchLayout, max_q: int) -> tuple[Tensor | None, Tensor | int, int]:
        """Each item's request (None: one each), first key [items, 1], and the number of keys per item.

        Requests are split where lengths differ much (short ones would be padded to the longest), where one call's latents
        outgrow the buffer, and where there are fewer requests than threads. That needs host lengths and a CPU.
        """
        if state.shape.graph:  # has the sizes of its first plan, so that one must cover whatever the table can hold
            assert batch.block_table is not None
            assert batch.page_size is not None
            return None, 0, batch.block_table.shape[1] * batch.page_size
        longest, lens = max(1, batch.max_kv), batch.kv_lens_host
        if state.buffer is None or lens is None or not batch.host_lens_exact:
            return None, 0, longest
        padded = longest * len(lens)
        busy = len(lens) * max_q >= torch.get_num_threads() or longest <= 2 * _SPLIT
        if busy and padded <= min(2 * sum(lens), state.buffer.shape[0]):
            return None, 0, longest
        keys = min(longest, _SPLIT)
        counts = (batch.kv_lens.long() + (keys - 1)) // keys * (batch.query_start_loc.diff() > 0)
        owner = torch.repeat_interleave(torch.arange(len(lens)), counts)
        if not owner.numel():
            return None, 0, longest
        start = torch.arange(owner.shape[0]) - (counts.cumsum(0) - counts)[owner]  # which item of its request, from 0
        return owner, start.unsqueeze(1) * keys, keys

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
        """As the contract says; not differentiable. Scores, softmax, sums and LSE are float32 whatever the inputs' dtypes."""
        if isinstance(plan, AlonePlan):
            return run_alone(self, q_nope, q_pe, cache, plan, cache_scale=cache_scale, need_lse=need_lse, out=out)
        assert isinstance(plan, MLAPlan)
        assert isinstance(plan.state, MLAState)
        tokens, heads, latent = q_nope.shape
        q = torch.cat([q_nope, q_pe], dim=-1)
        if plan.slots is not None:
            spread = q.new_zeros(plan.batch.num_requests * plan.max_q, heads, q.shape[2])
            spread[plan.slots] = q[: plan.slots.shape[0]]
            q = spread
        q = q.view(-1, plan.max_q, heads, q.shape[2])  # [requests, max_q, heads, latent + rope]
        state, lse = _attend(q, cache, plan, plan.state.buffer, scale=plan.scale * cache_scale, latent=latent)
        state, lse = state.flatten(0, 1), lse.flatten(0, 1)
        if plan.slots is not None:
            rest = tokens - plan.slots.shape[0]  # rows of no request
            state = torch.cat([state[plan.slots], state.new_zeros(rest, heads, latent)])
            lse = torch.cat([lse[plan.slots], lse.new_full((rest, heads), float("-inf"))])
        if cache_scale != 1.0:
            state.mul_(cache_scale)
        result = state.to(q_nope.dtype).contiguous() if out is None else out.copy_(state)
        return result, lse if need_lse else None


def _attend(
    q: Tensor, cache: Tensor, plan: MLAPlan, buffer: Tensor | None, *, scale: float, latent: int
) -> tuple[Tensor, Tensor]:
    """All items, then the union of each request's: out [requests, max_q, heads, latent], lse [requests, max_q, heads]."""
    n = q.shape[0]
    flat = cache.flatten(0, 1)  # [tokens of the pool, latent + rope]; a view of any pool
    if plan.owner is None:
        q_items, rows, bias, blind = q, plan.rows[:n], plan.bias[:n], plan.blind[:n]
    else:
        q_items, rows, bias, blind = q[plan.owner], plan.rows, plan.bias, plan.blind
    step = rows.shape[0] if buffer is None else max(1, buffer.shape[0] // rows.shape[1])
    outs, lses = [], []
    for i in range(0, rows.shape[0], step):
        part = slice(i, i + step)
        k = _gather(flat, rows[part], buffer).to(q.dtype)
        out, lse = (_flash if q.device.type == "cpu" else _products)(q_items[part], k, bias[part], scale, latent)
        outs.append(out.masked_fill_(blind[part].unsqueeze(-1), 0.0))
        lses.append(lse.masked_fill_(blind[part], float("-inf")))
    out, lse = (outs[0], lses[0]) if len(outs) == 1 else (torch.cat(outs), torch.cat(lses))
    return (out, lse) if plan.owner is None else _union(out, lse, plan.owner, n)


def _gather(flat: Tensor, rows: Tensor, buffer: Tensor | None) -> Tensor:
    """The cache's tokens at `rows` [items, keys], in `buffer` where they fit, else in memory of their own."""
    count, width = rows.numel(), flat.shape[1]
    if buffer is None or count > buffer.shape[0]:
        found = flat.index_select(0, rows.flatten())
    else:
        found = torch.index_select(flat, 0, rows.flatten(), out=buffer[:count])
    return found.view(*rows.shape, width)


def _flash(q: Tensor, k: Tensor, bias: Tensor, scale: float, latent: int) -> tuple[Tensor, Tensor]:
    """q [items, max_q, heads, width] on k [items, keys, width]; each query token takes the place of an operator's head."""
    keys = k.unsqueeze(1).expand(-1, q.shape[1], -1, -1)
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = op(q, keys, keys, 0.0, False, attn_mask=bias, scale=scale)
    return out[..., :latent], lse


def _products(q: Tensor, k: Tensor, bias: Tensor, scale: float, latent: int) -> tuple[Tensor, Tensor]:
    """The same as `_flash` by two batched products that sum in float32."""
    n, max_q, heads, width = q.shape
    scores = _bmm(q.reshape(n, max_q * heads, width), k.transpose(1, 2)).view(n, max_q, heads, -1)
    scores = scores.mul_(scale).add_(bias)
    lse = scores.logsumexp(-1)
    # A row of -inf alone has no softmax: its weights would be NaN, and become 0.
    weights = scores.sub_(lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1)).exp_().to(q.dtype)
    out = _bmm(weights.view(n, max_q * heads, -1), k[..., :latent])
    return out.view(n, max_q, heads, latent), lse


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    """a @ b per item, summed and returned in float32."""
    return torch.bmm(a, b) if a.dtype == torch.float32 else torch.bmm(a, b, out_dtype=torch.float32)


def _union(out: Tensor, lse: Tensor, owner: Tensor, requests: int) -> tuple[Tensor, Tensor]:
    """Merges the states of each request's items: out [items, max_q, heads, latent], lse [items, max_q, heads]."""
    shape = (requests, *lse.shape[1:])
    peak = lse.new_full(shape, float("-inf"))
    peak.scatter_reduce_(0, owner.view(-1, 1, 1).expand_as(lse), lse, "amax")
    peak.masked_fill_(peak == float("-inf"), 0.0)  # a query without keys: all its weights are exp(-inf)
    weights = (lse - peak[owner]).exp_()
    total = lse.new_zeros(shape).index_add_(0, owner, weights)
    merged = lse.new_zeros(*shape, out.shape[-1]).index_add_(0, owner, out * weights.unsqueeze(-1))
    return merged.div_(total.masked_fill(total == 0, 1.0).unsqueeze(-1)), peak + total.log()


def _refresh(plan: MLAPlan, fresh: MLAPlan, *, graph: bool) -> MLAPlan:
    """Moves a new step into an old plan: into the same storage where a graph was captured from it."""
    if graph:
        if plan.rows.shape != fresh.rows.shape or plan.max_q != fresh.max_q:
            raise AttentionError(
                f"a graph captured for {list(plan.rows.shape)} requests and keys cannot replay {list(fresh.rows.shape)}"
            )
        plan.rows.copy_(fresh.rows)
        plan.bias.copy_(fresh.bias)
        plan.blind.copy_(fresh.blind)
    else:
        plan.max_q, plan.rows, plan.bias, plan.blind = fresh.max_q, fresh.rows, fresh.bias, fresh.blind
        plan.owner, plan.slots = fresh.owner, fresh.slots
    plan.state, plan.batch, plan.scale = fresh.state, fresh.batch, fresh.scale
    return plan
