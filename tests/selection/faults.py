"""Wrong kernels beyond the mutants of the backends' suite; `says` is what the gate's reason must contain."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mla_serve.backends.base import Plan
from tests.selection.fakes import Fake

_Result = tuple[Tensor, Tensor | None]


class Fault(Fake):
    """Right until `spoil` has been at the result. `empty_rows`: shows only in a call that has queries without keys."""

    empty_rows = False
    says = ""

    def __init__(self) -> None:
        super().__init__(type(self).__name__)

    def spoil(self, out: Tensor, lse: Tensor | None, last: Tensor, plan: Plan) -> _Result:
        raise AssertionError("every fault has one of its own")

    def run_prefill(self, q, k, v, plan, *, need_lse, out=None):  # type: ignore[no-untyped-def]
        return self.spoil(*super().run_prefill(q, k, v, plan, need_lse=need_lse, out=out), v, plan)

    def run_decode(self, q_nope, q_pe, cache, plan, **kwargs):  # type: ignore[no-untyped-def]
        return self.spoil(*super().run_decode(q_nope, q_pe, cache, plan, **kwargs), cache, plan)


class LseOffByATenth(Fault):
    says = "LSE off by 10% (times ln 2 does not mend it)"

    def spoil(self, out: Tensor, lse: Tensor | None, last: Tensor, plan: Plan) -> _Result:
        return out, None if lse is None else lse * 1.1


class TooWide(Fault):
    says = "returned an output of"

    def spoil(self, out: Tensor, lse: Tensor | None, last: Tensor, plan: Plan) -> _Result:
        return torch.cat([out, out[..., :1]], dim=-1), lse


class LetsNanThrough(Fault):
    """Touches the whole buffer behind its values or its cache, but adds nothing that is finite."""

    says = "lets NaN"

    def spoil(self, out: Tensor, lse: Tensor | None, last: Tensor, plan: Plan) -> _Result:
        return out.add_(0.0 * _everything(last).sum()), lse


class ReadsUnread(Fault):
    says = "output off by"

    def spoil(self, out: Tensor, lse: Tensor | None, last: Tensor, plan: Plan) -> _Result:
        return out.add_(1e-6 * _everything(last).abs().sum()), lse


class NeverWritesOut(Fault):
    says = "did not write into the output it was given"

    def spoil(self, out: Tensor, lse: Tensor | None, last: Tensor, plan: Plan) -> _Result:
        copy = out.clone()
        out.fill_(math.nan)
        return copy, lse


class WrongOnItsOwn(Fault):
    """Forgets to scale what it allocates itself."""

    says = "output off by 100.00%, relative L2; at most 1e-05 (without an output of ours, while a second plan is live)"

    def run_prefill(self, *args, out=None, **kwargs):  # type: ignore[no-untyped-def]
        result, lse = Fake.run_prefill(self, *args, out=out, **kwargs)
        return (result * 2.0 if out is None else result), lse

    def run_decode(self, *args, out=None, **kwargs):  # type: ignore[no-untyped-def]
        result, lse = Fake.run_decode(self, *args, out=out, **kwargs)
        return (result * 2.0 if out is None else result), lse


class PlusInfinityWhenEmpty(Fault):
    empty_rows = True
    says = "LSE of a row without keys is not -inf"

    def spoil(self, out: Tensor, lse: Tensor | None, last: Tensor, plan: Plan) -> _Result:
        return out, None if lse is None else lse.masked_fill(lse == -math.inf, math.inf)


class ForgetsTheLse(Fault):
    says = "gave no LSE"

    def spoil(self, out: Tensor, lse: Tensor | None, last: Tensor, plan: Plan) -> _Result:
        return out, None


class HalfLse(Fault):
    says = "float16"

    def spoil(self, out: Tensor, lse: Tensor | None, last: Tensor, plan: Plan) -> _Result:
        return out, None if lse is None else lse.half()


def _everything(view: Tensor) -> Tensor:
    """The whole storage that a view is of."""
    return torch.empty(0, dtype=view.dtype).set_(view.untyped_storage())


FAULTS = (
    LseOffByATenth, TooWide, LetsNanThrough, ReadsUnread, NeverWritesOut, WrongOnItsOwn, PlusInfinityWhenEmpty,
    ForgetsTheLse, HalfLse,
)  # fmt: skip
