"""Backends that are wrong in one way each, as real kernels have been. `law` names the law that must catch it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mla_serve.backends import BatchLayout, Limits, Padded, Plan, Reference, State
from mla_serve.shapes import AttentionShape

__all__ = ["MUTANTS", "PADDED_MUTANTS"]


class WrongScale(Reference):
    """Takes the softmax scale from the width it sees."""

    name, law = "wrong-scale", "scale"

    def run_prefill(self, q, k, v, plan, **kwargs):
        return super().run_prefill(q, k, v, replace(plan, scale=q.shape[-1] ** -0.5), **kwargs)

    def run_decode(self, q_nope, q_pe, cache, plan, **kwargs):
        return super().run_decode(q_nope, q_pe, cache, replace(plan, scale=cache.shape[-1] ** -0.5), **kwargs)


class Log2Lse(Reference):
    """Returns the kernel's base-2 LSE as it is."""

    name, law = "log2-lse", "lse"

    def run_prefill(self, q, k, v, plan, **kwargs):
        return self._base_2(*super().run_prefill(q, k, v, plan, **kwargs))

    def run_decode(self, q_nope, q_pe, cache, plan, **kwargs):
        return self._base_2(*super().run_decode(q_nope, q_pe, cache, plan, **kwargs))

    def _base_2(self, out: Tensor, lse: Tensor | None):
        return out, None if lse is None else lse / math.log(2.0)


class TopLeftCausal(Reference):
    """Aligns the causal diagonal with the first key: query i sees keys up to i, which is a square of the first keys."""

    name, law = "top-left-causal", "causal"
    needs_host_lens = True

    def run_prefill(self, q, k, v, plan, **kwargs):
        if not plan.state.shape.causal:
            return super().run_prefill(q, k, v, plan, **kwargs)
        batch = plan.batch
        starts = batch.kv_start_loc.tolist()
        squares = [min(n, m) for n, m in zip(batch.q_lens_host, batch.kv_lens_host, strict=True)]
        keep = [start + i for start, n in zip(starts, squares, strict=False) for i in range(n)]
        square = replace(plan, batch=BatchLayout.make(batch.q_lens_host, squares, q.device))
        return super().run_prefill(q, k[keep], v[keep], square, **kwargs)

    def run_decode(self, q_nope, q_pe, cache, plan, **kwargs):
        return super().run_decode(q_nope, q_pe, cache, replace(plan, batch=self._first_keys(plan.batch)), **kwargs)

    def _first_keys(self, batch: BatchLayout) -> BatchLayout:
        """As many keys as queries where there are several queries; with one, all (a decode kernel's usual exception)."""
        q_lens = batch.query_start_loc.diff().tolist()
        kv_lens = [n if m == 1 else min(n, m) for m, n in zip(q_lens, batch.kv_lens.tolist(), strict=True)]
        table = {"block_table": batch.block_table, "page_size": batch.page_size}
        return BatchLayout.make(q_lens, kv_lens, self.device, **table)


class UntrimmedColumn(Reference):
    """Pads and cuts one column too late, so that a column of zeros is returned (or one too many, where no `out` is given)."""

    name, law = "untrimmed-column", "output"

    def run_prefill(self, q, k, v, plan, *, need_lse, out=None):
        result, lse = super().run_prefill(q, k, v, plan, need_lse=need_lse)
        return self._cut(result, out), lse

    def run_decode(self, q_nope, q_pe, cache, plan, *, cache_scale=1.0, need_lse, out=None):
        result, lse = super().run_decode(q_nope, q_pe, cache, plan, cache_scale=cache_scale, need_lse=need_lse)
        return self._cut(result, out), lse

    def _cut(self, result: Tensor, out: Tensor | None) -> Tensor:
        wide = torch.nn.functional.pad(result, (0, 1))
        return wide if out is None else out.copy_(wide[..., 1:])


class NanFromUnreadSlot(Reference):
    """Reads whole pages and trusts a weight of 0 to silence whatever lies behind a request's end."""

    name, law = "nan-from-unread-slot", "unread"

    def run_decode(self, q_nope, q_pe, cache, plan, *, cache_scale=1.0, need_lse, out=None):
        result, lse = super().run_decode(
            q_nope, q_pe, cache, plan, cache_scale=cache_scale, need_lse=need_lse, out=out
        )  # fmt: skip
        batch, page = plan.batch, cache.shape[1]
        starts = batch.query_start_loc.tolist()
        for i, kv_len in enumerate(batch.kv_lens.tolist()):
            if kv_len % page:
                tail = cache[batch.block_table[i, kv_len // page], kv_len % page :, : q_nope.shape[2]]
                result[starts[i] : starts[i + 1]] += 0.0 * tail.sum()
        return result, lse


class AliasedWrite(Reference):
    """Scales its queries in place."""

    name, law = "aliased-write", "inputs"

    def run_prefill(self, q, k, v, plan, **kwargs):
        result = super().run_prefill(q, k, v, plan, **kwargs)
        q.mul_(plan.scale)
        return result

    def run_decode(self, q_nope, q_pe, cache, plan, **kwargs):
        result = super().run_decode(q_nope, q_pe, cache, plan, **kwargs)
        q_pe.mul_(plan.scale)
        return result


class StalePlan(Reference):
    """Refreshing a plan leaves the old step in it."""

    name, law = "stale-plan", "plans"

    def plan(self, state: State, batch: BatchLayout, *, scale: float, reuse: Plan | None = None) -> Plan:
        return super().plan(state, batch, scale=scale) if reuse is None else reuse


@dataclass(slots=True)
class _OnePlanState(State):
    latest: BatchLayout | None = None


class SharedPlan(Reference):
    """Keeps a step's lengths in the State, where the next plan overwrites them."""

    name, law = "shared-plan", "plans"

    def prepare(self, shape: AttentionShape, limits: Limits) -> State:
        return _OnePlanState(shape, limits)

    def plan(self, state: State, batch: BatchLayout, *, scale: float, reuse: Plan | None = None) -> Plan:
        state.latest = batch
        return super().plan(state, batch, scale=scale, reuse=reuse)

    def run_prefill(self, q, k, v, plan, **kwargs):
        return super().run_prefill(q, k, v, replace(plan, batch=self._latest(plan, q)), **kwargs)

    def run_decode(self, q_nope, q_pe, cache, plan, **kwargs):
        return super().run_decode(q_nope, q_pe, cache, replace(plan, batch=self._latest(plan, q_nope)), **kwargs)

    def _latest(self, plan: Plan, q: Tensor) -> BatchLayout:
        latest = plan.state.latest
        return latest if latest.num_tokens <= q.shape[0] else plan.batch


class BasePointer(Reference):
    """Reads keys and values from the first byte of the buffer that they are views of."""

    name, law = "base-pointer", "packed"

    def run_prefill(self, q, k, v, plan, **kwargs):
        return super().run_prefill(q, self._base(k), self._base(v), plan, **kwargs)

    def run_decode(self, q_nope, q_pe, cache, plan, **kwargs):
        return super().run_decode(q_nope, q_pe, self._base(cache), plan, **kwargs)

    def _base(self, t: Tensor) -> Tensor:
        return t.as_strided(t.shape, t.stride(), 0)


class NotEmpty(Reference):
    """Leaves the rows of a request without keys as the output buffer had them, and calls their LSE +inf."""

    name, law = "not-empty", "empty"

    def run_prefill(self, q, k, v, plan, *, need_lse, out=None):
        return self._leave(*super().run_prefill(q, k, v, plan, need_lse=True, out=out), need_lse)

    def run_decode(self, q_nope, q_pe, cache, plan, *, cache_scale=1.0, need_lse, out=None):
        result = super().run_decode(q_nope, q_pe, cache, plan, cache_scale=cache_scale, need_lse=True, out=out)
        return self._leave(*result, need_lse)

    def _leave(self, out: Tensor, lse: Tensor, need_lse: bool):
        empty = lse == float("-inf")
        return out.masked_fill_(empty.unsqueeze(-1), float("nan")), lse.masked_fill(empty, math.inf) if need_lse else None


class TrustsItsBuffer(Padded):
    """A padded form that zeroes its buffer once and never again."""

    law = "padding"

    def _pad(self, state, name, rows):
        buffer = state.buffers.get(name)
        if buffer is None:
            return rows
        if not hasattr(self, "seen"):
            self.seen: set[str] = set()
        if name not in self.seen:
            buffer.zero_()
            self.seen.add(name)
        padded = buffer[: rows.shape[0]]
        padded[:, : rows.shape[1], : rows.shape[2]] = rows
        return padded


class PadsAnewEachCall(Padded):
    """A padded form that allocates in every step."""

    law = "padding"

    def _pad(self, state, name, rows):
        padded = super()._pad(state, name, rows)
        if padded is rows:
            return rows
        self.kept = [*getattr(self, "kept", []), padded.clone()]
        return self.kept[-1]


MUTANTS = (
    WrongScale, Log2Lse, TopLeftCausal, UntrimmedColumn, NanFromUnreadSlot, AliasedWrite, StalePlan, SharedPlan,
    BasePointer, NotEmpty,
)  # fmt: skip
PADDED_MUTANTS = (TrustsItsBuffer, PadsAnewEachCall)
