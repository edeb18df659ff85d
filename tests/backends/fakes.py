"""Backends that are made to be awkward, so that the contract is not shaped by dense calls on a CPU."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mla_serve.backends import (
    AttentionError,
    Backend,
    BatchLayout,
    Kind,
    Plan,
    Reference,
    State,
    reference_decode,
    reference_prefill,
)
from mla_serve.shapes import AttentionShape

__all__ = ["FixedBatch", "FixedHeads", "PlanBound", "Watched", "WithoutLse"]


class FixedHeads(Reference):
    """Takes only some head counts, as kernels that specialise on them do (K05)."""

    def __init__(self, device: torch.device, head_counts: tuple[int, ...]) -> None:
        super().__init__(device)
        self.name = "heads-" + "-".join(map(str, head_counts))
        self.head_counts = head_counts

    def supports(self, shape: AttentionShape) -> str | None:
        assert self.head_counts is not None
        return None if shape.heads in self.head_counts else f"takes {self.head_counts} heads, not {shape.heads}"


@dataclass
class _Wrapper:
    """A library's object that is told everything once and then only run; its LSE is base 2."""

    batch: BatchLayout | None = None
    told: tuple[object, ...] = ()

    def plan(self, batch: BatchLayout, *, heads: int, dtype: torch.dtype, causal: bool, scale: float) -> None:
        """Keeps copies of the host lengths and of the page indices, as a plan in pinned memory does."""
        assert batch.q_lens_host is not None
        assert batch.kv_lens_host is not None
        table = None if batch.block_table is None else batch.block_table.clone()
        self.batch = BatchLayout.make(
            batch.q_lens_host, batch.kv_lens_host, batch.kv_lens.device, block_table=table, page_size=batch.page_size
        )
        self.told = (heads, dtype)
        self.causal, self.scale = causal, scale

    def run(self, q: Tensor, *rest: Tensor, absorbed: bool, cache_scale: float = 1.0) -> tuple[Tensor, Tensor]:
        assert self.batch is not None
        if (q.shape[1], q.dtype) != self.told:
            raise RuntimeError(f"planned for heads and dtype {self.told}, got {(q.shape[1], q.dtype)}")
        if absorbed:
            out, lse = reference_decode(q, *rest, self.batch, scale=self.scale, cache_scale=cache_scale)
        else:
            out, lse = reference_prefill(q, *rest, self.batch, scale=self.scale, causal=self.causal)
        return out, lse / math.log(2.0)


@dataclass(slots=True)
class _WrappedPlan(Plan):
    wrapper: _Wrapper = field(default_factory=_Wrapper)


class PlanBound(Backend):
    """Scale, heads and dtype only at plan; a wrapper for each live Plan; log2 LSE; needs host lengths."""

    name = "plan-bound"
    needs_host_lens = True
    takes_cache_scale = True

    def kind(self, shape: AttentionShape) -> Kind:
        return Kind.FUSED

    def available(self) -> str | None:
        return None

    def supports(self, shape: AttentionShape) -> str | None:
        return None

    def plan(self, state: State, batch: BatchLayout, *, scale: float, reuse: Plan | None = None) -> Plan:
        super().plan(state, batch, scale=scale)
        plan = reuse if isinstance(reuse, _WrappedPlan) else _WrappedPlan(state, batch, scale)
        plan.state, plan.batch, plan.scale = state, batch, scale
        shape = state.shape
        plan.wrapper.plan(
            batch, heads=shape.heads, dtype=getattr(torch, shape.dtype), causal=shape.causal, scale=scale
        )  # fmt: skip
        return plan

    def run_prefill(self, q, k, v, plan, *, need_lse, out=None):
        return self._finish(*plan.wrapper.run(q, k, v, absorbed=False), q, need_lse, out)

    def run_decode(self, q_nope, q_pe, cache, plan, *, cache_scale=1.0, need_lse, out=None):
        result = plan.wrapper.run(q_nope, q_pe, cache, absorbed=True, cache_scale=cache_scale)
        return self._finish(*result, q_nope, need_lse, out)

    def _finish(self, result: Tensor, lse2: Tensor, q: Tensor, need_lse: bool, out: Tensor | None):
        result = result.to(q.dtype) if out is None else out.copy_(result)
        return result, lse2 * math.log(2.0) if need_lse else None


@dataclass(slots=True)
class _Captured(Plan):
    """Persistent buffers: everything that a replayed kernel may know about a step."""

    table: Tensor
    kv_lens: Tensor
    q_lens: Tensor
    factor: Tensor


class FixedBatch(Backend):
    """Knows only its persistent buffers, as a captured graph does; refreshed in place with other lengths, fewer live rows."""

    name = "fixed-batch"
    capturable = True
    takes_cache_scale = True

    def kind(self, shape: AttentionShape) -> Kind:
        return Kind.FLASH

    def available(self) -> str | None:
        return None

    def supports(self, shape: AttentionShape) -> str | None:
        return None if shape.absorbed else "takes the absorbed form only"

    def plan(self, state: State, batch: BatchLayout, *, scale: float, reuse: Plan | None = None) -> Plan:
        assert batch.block_table is not None
        held = batch.block_table, batch.kv_lens, batch.query_start_loc.diff(), torch.tensor(scale, device=self.device)
        if not isinstance(reuse, _Captured):
            return _Captured(state, batch, scale, *(t.clone() for t in held))
        if reuse.table.shape != held[0].shape:
            if state.shape.graph:
                raise AttentionError(f"{self.name} was captured for {list(reuse.table.shape)}, not {list(held[0].shape)}")
            reuse.table, reuse.kv_lens, reuse.q_lens, reuse.factor = (t.clone() for t in held)
        for buffer, value in zip((reuse.table, reuse.kv_lens, reuse.q_lens, reuse.factor), held, strict=True):
            buffer.copy_(value)
        return reuse  # its batch stays the first one: what a replay may not look at

    def run_decode(self, q_nope, q_pe, cache, plan, *, cache_scale=1.0, need_lse, out=None):
        tokens, latent, requests = q_nope.shape[0], q_nope.shape[2], plan.kv_lens.shape[0]
        q = torch.cat([q_nope, q_pe], dim=-1).float()
        starts = plan.q_lens.cumsum(0) - plan.q_lens
        token = torch.arange(tokens, device=q.device)
        owner = (token.unsqueeze(1) >= starts + plan.q_lens).sum(1).clamp_max(requests - 1)
        seen = plan.kv_lens[owner] - plan.q_lens[owner] + 1 + token - starts[owner]
        seen = torch.where(token < plan.q_lens.sum(), seen, 0)
        keys = cache[plan.table.clamp_min(0).long()].flatten(1, 2)[owner].float() * cache_scale  # [tokens, keys, width]
        hidden = torch.arange(keys.shape[1], device=q.device) >= seen.unsqueeze(1)
        keys = keys.masked_fill(hidden.unsqueeze(-1), 0.0)
        scores = torch.einsum("thd,tkd->thk", q, keys) * plan.factor
        scores = scores.masked_fill(hidden.unsqueeze(1), float("-inf"))
        lse = scores.logsumexp(-1)
        weights = (scores - lse.nan_to_num(neginf=0.0).unsqueeze(-1)).exp()
        result = torch.einsum("thk,tkd->thd", weights, keys[..., :latent])
        result = result.to(q_nope.dtype) if out is None else out.copy_(result)
        return result, lse if need_lse else None


class WithoutLse(Reference):
    """Gives no LSE and takes new tokens only, as Transformer Engine does."""

    name = "without-lse"
    gives_lse = False

    def supports(self, shape: AttentionShape) -> str | None:
        if shape.absorbed or shape.lse:
            return "takes un-absorbed calls that need no LSE"
        return super().supports(shape)

    def run_prefill(self, q, k, v, plan, *, need_lse, out=None):
        if need_lse:
            raise AttentionError(f"{self.name} gives no LSE")
        return super().run_prefill(q, k, v, plan, need_lse=False, out=out)


class Watched(Backend):
    """Passes everything on to `inner`, and looks at what a padded form hands over: padded parts zero, in memory of its own.

    Afterwards it writes NaN into every padded input, as a kernel that uses its inputs as scratch would. `places` holds the
    addresses at which padded inputs arrived, by argument.
    """

    def __init__(self, inner: Backend, native: AttentionShape) -> None:
        super().__init__(inner.device)
        self.inner, self.native = inner, native
        self.name = inner.name
        self.needs_host_lens, self.capturable = inner.needs_host_lens, inner.capturable
        self.takes_cache_scale, self.head_counts, self.gives_lse = inner.takes_cache_scale, inner.head_counts, inner.gives_lse
        self.faults: list[str] = []
        self.places: dict[str, set[int]] = {}

    def kind(self, shape: AttentionShape) -> Kind:
        return self.inner.kind(shape)

    def available(self) -> str | None:
        return self.inner.available()

    def supports(self, shape: AttentionShape) -> str | None:
        return self.inner.supports(shape)

    def prepare(self, shape, limits):
        return self.inner.prepare(shape, limits)

    def plan(self, state, batch, *, scale, reuse=None):
        return self.inner.plan(state, batch, scale=scale, reuse=reuse)

    def run_prefill(self, q, k, v, plan, *, need_lse, out=None):
        padded = [
            self._look(name, t, width)
            for name, t, width in (("q", q, self.native.qk), ("k", k, self.native.qk), ("v", v, self.native.v))
        ]
        return self._after(padded, self.inner.run_prefill(q, k, v, plan, need_lse=need_lse, out=out))

    def run_decode(self, q_nope, q_pe, cache, plan, *, cache_scale=1.0, need_lse, out=None):
        padded = [self._look("q_nope", q_nope, self.native.v), self._look("q_pe", q_pe, self.native.rope)]
        result = self.inner.run_decode(q_nope, q_pe, cache, plan, cache_scale=cache_scale, need_lse=need_lse, out=out)
        return self._after(padded, result)

    def _look(self, name: str, t: Tensor, width: int) -> Tensor | None:
        if t.shape[1] == self.native.heads and t.shape[2] == width:
            return None
        self.places.setdefault(name, set()).add(t.data_ptr())
        if t[:, self.native.heads :].any() or t[..., width:].any():
            self.faults.append(f"padded part of {name} is not zero")
        return t

    def _after(self, padded, result):
        result = tuple(None if t is None else t.clone() for t in result)
        for t in padded:
            if t is not None:
                t.fill_(float("nan"))
        return result
