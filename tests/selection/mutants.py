"""Kernels that run without an exception and are wrong, each in one way that real kernels have been."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from mla_serve.backends.base import BatchLayout, Plan, State
from mla_serve.backends.padded import Padded, Padding
from tests.selection.fakes import Fake

_Result = tuple[Tensor, Tensor | None]


class Mutant(Fake):
    """Right until `spoil` has been at the result.

    `prefill_only` ones make no sense on the latent cache, `causal_only` and `empty_rows` ones need a call that is causal, or
    that has queries without keys (new tokens always have themselves). `seen_through_padding`: the copies of a padded form do
    not happen to mend it.
    """

    prefill_only = causal_only = empty_rows = seen_through_padding = False
    says = ""  # part of the reason that the gate must give

    def __init__(self) -> None:
        super().__init__(type(self).__name__)

    def spoil(self, out: Tensor, lse: Tensor | None, inputs: tuple[Tensor, ...], plan: Plan) -> _Result:
        return out, lse

    def run_prefill(self, q, k, v, plan, *, need_lse, out=None):  # type: ignore[no-untyped-def]
        result, lse = super().run_prefill(q, k, v, self.view(plan), need_lse=need_lse, out=out)
        return self.spoil(result, lse, (q, k, v), plan)

    def run_decode(self, q_nope, q_pe, cache, plan, *, cache_scale=1.0, need_lse, out=None):  # type: ignore[no-untyped-def]
        result, lse = super().run_decode(
            q_nope, q_pe, cache, self.view(plan), cache_scale=cache_scale, need_lse=need_lse, out=out
        )
        return self.spoil(result, lse, (q_nope, q_pe, cache), plan)

    def view(self, plan: Plan) -> Plan:
        return plan


class ScaleFromWidth(Mutant):
    seen_through_padding = True
    says = "output off by"

    def view(self, plan: Plan) -> Plan:
        return replace(plan, scale=plan.state.shape.qk**-0.5)


class Log2Lse(Mutant):
    seen_through_padding = True
    says = "LSE off by 44% (base 2: times ln 2 it is right)"

    def spoil(self, out, lse, inputs, plan):  # type: ignore[no-untyped-def]
        return out, None if lse is None else lse / math.log(2.0)


class LseWithoutScale(Mutant):
    seen_through_padding = True
    says = "times ln 2 does not mend it"

    def spoil(self, out, lse, inputs, plan):  # type: ignore[no-untyped-def]
        return out, None if lse is None else lse * 1.1


class TopLeftCausal(Mutant):
    prefill_only = causal_only = True
    says = "output off by"

    def run_prefill(self, q, k, v, plan, *, need_lse, out=None):  # type: ignore[no-untyped-def]
        q_lens, kv_lens = plan.batch.q_lens_host, plan.batch.kv_lens_host
        starts = plan.batch.kv_start_loc.tolist()
        keep = [start + i for start, n, m in zip(starts, q_lens, kv_lens, strict=False) for i in range(min(n, m))]
        squares = [min(n, m) for n, m in zip(q_lens, kv_lens, strict=True)]
        alone = replace(plan, batch=BatchLayout.make(q_lens, squares, q.device))
        return super().run_prefill(q, k[keep], v[keep], alone, need_lse=need_lse, out=out)


class UntrimmedColumn(Mutant):
    seen_through_padding = True
    says = "output off by"

    def spoil(self, out, lse, inputs, plan):  # type: ignore[no-untyped-def]
        out[..., :-1] = out[..., 1:].clone()
        out[..., -1] = 0.0
        return out, lse


class TooWide(Mutant):
    says = "returned an output of"

    def spoil(self, out, lse, inputs, plan):  # type: ignore[no-untyped-def]
        return torch.cat([out, out[..., :1]], dim=-1), lse


class LetsNanThrough(Mutant):
    says = "lets NaN"

    def spoil(self, out, lse, inputs, plan):  # type: ignore[no-untyped-def]
        last = inputs[2]
        everything = last if last.dim() == 3 and last.is_contiguous() else last._base  # the packed rows behind v
        return out.add_(0.0 * everything.sum()), lse


class ReadsUnread(Mutant):
    says = "output off by"

    def spoil(self, out, lse, inputs, plan):  # type: ignore[no-untyped-def]
        last = inputs[2]
        everything = last if last.dim() == 3 and last.is_contiguous() else last._base
        return out.add_(1e-6 * everything.abs().sum()), lse


class AliasedWrite(Mutant):
    says = "wrote into its input (q"

    def spoil(self, out, lse, inputs, plan):  # type: ignore[no-untyped-def]
        inputs[0].mul_(0.5)
        return out, lse


class StalePlan(Mutant):
    seen_through_padding = True
    says = "with other lengths on the same plan"

    def plan(self, state: State, batch: BatchLayout, *, scale: float, reuse: Plan | None = None) -> Plan:
        return reuse or super().plan(state, batch, scale=scale)


class NeverWritesOut(Mutant):
    says = "did not write into the output it was given"

    def spoil(self, out, lse, inputs, plan):  # type: ignore[no-untyped-def]
        copy = out.clone()
        out.fill_(math.nan)
        return copy, lse


class UninitialisedRows(Mutant):
    """Leaves the rows of a request without keys as they were."""

    empty_rows = True
    says = "NaN or infinity"

    def spoil(self, out, lse, inputs, plan):  # type: ignore[no-untyped-def]
        starts = plan.batch.query_start_loc.tolist()
        for i, kv_len in enumerate(plan.batch.kv_lens.tolist()):
            if kv_len == 0:
                out[starts[i] : starts[i + 1]] = math.nan
        return out, lse


class PlusInfinityWhenEmpty(Mutant):
    empty_rows = True
    says = "-inf"

    def spoil(self, out, lse, inputs, plan):  # type: ignore[no-untyped-def]
        return out, None if lse is None else lse.masked_fill(lse == -math.inf, math.inf)


class ForgetsTheLse(Mutant):
    seen_through_padding = True
    says = "gave no LSE"

    def spoil(self, out, lse, inputs, plan):  # type: ignore[no-untyped-def]
        return out, None


class HalfLse(Mutant):
    seen_through_padding = True
    says = "float16"

    def spoil(self, out, lse, inputs, plan):  # type: ignore[no-untyped-def]
        return out, None if lse is None else lse.half()


class BasePointer(Mutant):
    """Reads the packed keys and values from their base pointer, as if the value columns came first."""

    prefill_only = True
    says = "output off by"

    def run_prefill(self, q, k, v, plan, *, need_lse, out=None):  # type: ignore[no-untyped-def]
        return super().run_prefill(q, k, torch.as_strided(v, v.shape, v.stride(), 0), plan, need_lse=need_lse, out=out)


class DirtyPadding(Padded):
    """A padded form that trusts its buffer: what a larger batch left in the padded columns is still there."""

    def __init__(self, padding: Padding) -> None:
        super().__init__(Fake("dirty"), padding)

    def _pad(self, state, name, rows):  # type: ignore[no-untyped-def]
        padded = super()._pad(state, name, rows)
        if padded is not rows and rows.shape[0] < state.buffers[name].shape[0]:
            padded[..., rows.shape[2] :] = 1.0
        return padded


MUTANTS = (
    ScaleFromWidth, Log2Lse, LseWithoutScale, TopLeftCausal, UntrimmedColumn, TooWide, LetsNanThrough, ReadsUnread,
    AliasedWrite, StalePlan, NeverWritesOut, UninitialisedRows, PlusInfinityWhenEmpty, ForgetsTheLse, HalfLse, BasePointer,
)  # fmt: skip
