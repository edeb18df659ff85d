"""Merging two attention states over disjoint sets of keys into the state over their union."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["merge"]


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The attention state of the same queries over the keys of both sides (FlashInfer, arXiv 2501.01005, section 2.2).

    out_a and out_b [tokens, heads, v], lse_a and lse_b [tokens, heads] in natural log. Returns the output in `out_a`'s dtype
    and the LSE in float32. `out` may be either input's storage.

    A side whose LSE is infinite has no keys there: -inf is the contract's empty state and +inf what some kernels return for
    it. Its output is never read, whatever it holds, so merge((anything, +-inf), x) = x and two empty sides give (0, -inf).
    A NaN LSE is nobody's empty state and stays visible in the result. Elementwise, without a host synchronisation.
    """
    lse_a, lse_b = lse_a.float(), lse_b.float()
    empty_a, empty_b = lse_a.isinf(), lse_b.isinf()
    a = lse_a.masked_fill(empty_a, float("-inf"))
    b = lse_b.masked_fill(empty_b, float("-inf"))
    # Where both are empty the peak is -inf, and -inf - -inf would be NaN.
    peak = torch.maximum(a, b)
    peak = peak.masked_fill(empty_a & empty_b, 0.0)
    weight_a, weight_b = (a - peak).exp(), (b - peak).exp()
    total = weight_a + weight_b
    lse = peak + total.log()
    norm = total.masked_fill(empty_a & empty_b, 1.0)
    part_a = out_a * (weight_a / norm).unsqueeze(-1)  # float32 whatever the output's dtype
    part_b = out_b * (weight_b / norm).unsqueeze(-1)
    # The weight of an empty side is 0, which does not silence a NaN or an infinity.
    part_a = part_a.masked_fill(empty_a.unsqueeze(-1), 0.0) + part_b.masked_fill(empty_b.unsqueeze(-1), 0.0)
    if out is None:
        return part_a.to(out_a.dtype), lse
    return out.copy_(part_a), lse
