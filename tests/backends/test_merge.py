from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mla_serve.backends import BatchLayout, merge, reference_prefill

INF = math.inf


def state(tokens: int = 5, heads: int = 3, v: int = 8, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(tokens, heads, v).to(dtype), torch.randn(tokens, heads) * 3


def empty(like: Tensor, out: float, lse: float) -> tuple[Tensor, Tensor]:
    return torch.full_like(like, out), torch.full(like.shape[:2], lse)


def test_k04_two_empty_sides_give_zero_and_minus_infinity() -> None:
    x, _ = state()
    out, lse = merge(*empty(x, 0.0, -INF), *empty(x, 0.0, -INF))
    assert torch.equal(out, torch.zeros_like(x))
    assert torch.equal(lse, torch.full_like(lse, -INF))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_empty", [-INF, INF])
@pytest.mark.parametrize("garbage", [0.0, 1e30, INF, math.nan])
def test_k04_an_empty_side_gives_back_the_other_exactly(garbage: float, of_empty: float, dtype: torch.dtype) -> None:
    x, lse = state(dtype=dtype)
    nothing = empty(x, garbage, of_empty)
    for merged in (merge(x, lse, *nothing), merge(*nothing, x, lse)):
        assert torch.equal(merged[0], x)
        assert torch.equal(merged[1], lse)
    both = merge(*nothing, *empty(x, math.nan, -of_empty))
    assert torch.equal(both[0], torch.zeros_like(x))
    assert torch.equal(both[1], torch.full_like(lse, -INF))


def test_rows_are_independent() -> None:
    x, lse_x = state()
    y, lse_y = state()
    lse_x[0], lse_y[1], x[0] = -INF, INF, math.nan
    out, lse = merge(x, lse_x, y, lse_y)
    assert torch.equal(out[0], y[0])
    assert torch.equal(out[1], x[1])
    alone = merge(x[2:], lse_x[2:], y[2:], lse_y[2:])
    assert torch.equal(out[2:], alone[0])
    assert torch.equal(lse[2:], alone[1])
    assert out.isfinite().all()


def test_a_nan_lse_is_no_empty_state_and_stays_visible() -> None:
    x, lse = state()
    assert merge(x, torch.full_like(lse, math.nan), x, lse)[1].isnan().all()


@pytest.mark.parametrize("side", [0, 1])
def test_out_may_be_either_input(side: int) -> None:
    states = (state(), state())
    want, want_lse = merge(*states[0], *states[1])
    target = states[side][0]
    out, lse = merge(*states[0], *states[1], out=target)
    assert out.data_ptr() == target.data_ptr()
    assert torch.equal(target, want)
    assert torch.equal(lse, want_lse)


def test_large_and_far_apart_lses_stay_finite() -> None:
    x, lse = state()
    for offset in (0.0, 1e4, -1e4):
        out, merged = merge(x, lse + offset, x, lse - offset)
        torch.testing.assert_close(out, x)
        torch.testing.assert_close(merged, torch.logaddexp(lse + offset, lse - offset))


def test_k03_a_state_in_base_2_would_show() -> None:
    """What the law of merging guards against: the suffix under-weighted by its LSE's base."""
    q, k, v = torch.randn(64, 2, 32), torch.randn(3136, 2, 32), torch.randn(3136, 2, 16)
    states = []
    for keys, causal in ((slice(0, 3072), False), (slice(3072, None), True), (slice(None), True)):
        batch = BatchLayout.make([64], [len(k[keys])], torch.device("cpu"))
        states.append(reference_prefill(q, k[keys], v[keys], batch, scale=32**-0.5, causal=causal))
    prefix, suffix, whole = states
    assert (merge(*prefix, *suffix)[0] - whole[0]).abs().max() < 1e-3
    wrong = (suffix[0], suffix[1] / math.log(2.0))
    assert (merge(*prefix, *wrong)[0] - whole[0]).abs().max() > 1e-2


def test_gradients_pass_through() -> None:
    (x, lse_x), (y, lse_y) = state(), state()
    x.requires_grad_()
    lse_y.requires_grad_()
    merge(x, lse_x, y, lse_y)[0].sum().backward()
    assert x.grad is not None
    assert lse_y.grad is not None
    assert lse_y.grad.abs().sum() > 0
