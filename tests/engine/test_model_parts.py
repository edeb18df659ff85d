"""Rope, routing, experts and projections on their own, against the plainest way of writing them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mla_serve.engine.embedded.config import MoEConfig, RopeConfig
from mla_serve.engine.embedded.layers import MLP, Linear, gated
from mla_serve.engine.embedded.moe import MoE, Router
from mla_serve.engine.embedded.rope import frequencies, pair_order, rotate_, turns

CPU = torch.device("cpu")


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("offset", [0, 4, 5])
def test_rotate_turns_pairs_in_place(dtype, offset):
    """Also in the tail of wider rows that begin at an odd element."""
    rows = draw(6, 3, offset + 8).to(dtype)
    before, tail = rows.clone(), rows[..., offset:]
    positions = torch.tensor([0, 1, 2, 50, 51, 999])
    rotate_(tail, turns(RopeConfig(100.0), 8, 1000, CPU).index_select(0, positions))
    assert torch.equal(rows[..., :offset], before[..., :offset])
    angle = positions[:, None] / 100.0 ** (torch.arange(0, 8, 2) / 8)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    even, odd = before[..., offset::2].float(), before[..., offset + 1 :: 2].float()
    expected = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)
    torch.testing.assert_close(tail.float(), expected.to(dtype).float(), rtol=2e-3, atol=2e-3)


def test_pair_order_brings_halves_together():
    assert pair_order(RopeConfig(1e4, interleave=True), 8) is None
    assert pair_order(RopeConfig(1e4, interleave=False), 8).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones():
    plain = frequencies(RopeConfig(1e4), 64)
    yarn = frequencies(RopeConfig(1e4, yarn=True, factor=40.0, original_max_position=4096), 64)
    assert torch.equal(yarn[:11], plain[:11])
    torch.testing.assert_close(yarn[-8:], plain[-8:] / 40)
    assert ((yarn <= plain) & (yarn >= plain / 41)).all()


def router(bias=None, **changes):
    fields = {
        "experts": 8, "top_k": 3, "width": 4, "shared": 0, "groups": 4, "top_groups": 2, "method": "noaux_tc",
        "scoring": "sigmoid", "normalise": True, "scaling": 2.5, "first": 0, "every": 1,
    } | changes  # fmt: skip
    return Router(MoEConfig(**fields), draw(8, 16), bias)


def by_expert(weights, ids):
    return torch.zeros(ids.shape[0], 8).scatter_(1, ids, weights)


def test_noaux_tc_chooses_with_the_bias_and_weighs_without():
    bias, x = draw(8, seed=3), draw(50, 16, seed=1)
    weights, ids = router(bias)(x)
    scores = (x @ router().weight.T).sigmoid()
    for row in range(50):
        choice = scores[row] + bias
        sums = [choice[2 * g : 2 * g + 2].sum().item() for g in range(4)]
        groups = sorted(range(4), key=lambda g: sums[g])[-2:]
        allowed = [e for g in groups for e in (2 * g, 2 * g + 1)]
        best = sorted(allowed, key=lambda e: choice[e].item())[-3:]
        assert sorted(ids[row].tolist()) == sorted(best)
        expected = scores[row, ids[row]] / scores[row, ids[row]].sum() * 2.5
        torch.testing.assert_close(weights[row], expected)


def test_group_limited_greedy_takes_the_groups_of_the_best_expert():
    x = draw(50, 16, seed=1)
    route = router(method="group_limited_greedy", scoring="softmax", normalise=False, top_k=2, top_groups=1)
    weights, ids = route(x)
    scores = (x @ route.weight.T).softmax(-1)
    group = scores.argmax(-1) // 2
    assert torch.equal(ids.sort(-1).values, torch.stack([2 * group, 2 * group + 1], -1))
    torch.testing.assert_close(weights, scores.gather(1, ids) * 2.5)


def test_greedy_ignores_groups():
    x = draw(50, 16, seed=1)
    route = router(method="greedy", scoring="softmax", normalise=False, groups=1, top_groups=1, scaling=1.0)
    weights, ids = route(x)
    scores = (x @ route.weight.T).softmax(-1)
    torch.testing.assert_close(by_expert(weights, ids), by_expert(*scores.topk(3)))


@given(st.integers(1, 40), st.integers(0, 99))
def test_experts_equal_a_sum_over_tokens(tokens, seed):
    route = router()
    gate_up, down = draw(8, 8, 16, seed=1), draw(8, 16, 4, seed=2)
    shared = MLP(Linear(draw(12, 16, seed=4)), Linear(draw(16, 6, seed=5)))
    x, total = draw(tokens, 16, seed=seed), draw(tokens, 16, seed=seed + 1)
    weights, ids = route(x)
    expected = total + gated(x @ shared.gate_up.weight.T) @ shared.down.weight.T
    for row, choice in enumerate(ids.tolist()):
        for weight, expert in zip(weights[row], choice, strict=True):
            expected[row] += weight * (down[expert] @ gated(gate_up[expert] @ x[row]))
    MoE(route, gate_up, down, shared).add_to(total, x)
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 9, 10, 16, 64, 65])
@pytest.mark.parametrize("biased", [False, True])
def test_projections_are_the_same_for_few_rows_and_many(rows, biased):
    x, weight, bias, total = draw(rows, 24), draw(7, 24, seed=1), draw(7, seed=2) if biased else None, draw(rows, 7, seed=3)
    expected = x @ weight.T + (0 if bias is None else bias)
    linear = Linear(weight, bias)
    torch.testing.assert_close(linear(x), expected)
    assert linear(x).is_contiguous()
    before = total.clone()
    linear.add_to(total, x)
    torch.testing.assert_close(total, before + expected)
