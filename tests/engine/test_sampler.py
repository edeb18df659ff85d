"""Greedy, temperature, top-k, top-p, seeds and logprobs on hand-made logits."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_serve.engine.base import Request, Sampling
from mla_serve.engine.embedded.sampler import _truncate, sample, uniform
from mla_serve.engine.embedded.sequence import Sequence


def seq(seed=0, generated=0, **sampling):
    sampling.setdefault("temperature", 1.0)
    made = Sequence.of(Request("r", [0], Sampling(max_tokens=9, **sampling)), seed=seed)
    made.token_ids += [0] * generated
    return made


def tokens(logits, seqs):
    return [picked.token for picked in sample(torch.as_tensor(logits, dtype=torch.float32), seqs)]


def draws(row, count=4000, **sampling):
    """How often each token comes out of one row of logits."""
    logits = torch.tensor(row, dtype=torch.float32).expand(count, -1)
    return Counter(tokens(logits, [seq(seed=i, **sampling) for i in range(count)]))


def test_no_rows():
    assert sample(torch.empty(0, 7), []) == []


def test_greedy_takes_the_lowest_id_among_equals():
    row = torch.zeros(3, 1000)
    row[0, [700, 30, 999]] = 2.0
    row[2, 999] = 1.0
    assert tokens(row, [seq(temperature=0.0)] * 3) == [30, 0, 999]


def test_frequencies_follow_the_probabilities():
    counts = draws([0.0, math.log(3), -math.inf, math.log(6)])
    assert counts[2] == 0
    assert counts[1] / 4000 == pytest.approx(0.3, abs=0.03)
    assert counts[3] / 4000 == pytest.approx(0.6, abs=0.03)


def test_temperature_flattens_and_sharpens():
    row = [0.0, math.log(3)]
    assert draws(row, temperature=0.5)[1] / 4000 == pytest.approx(0.9, abs=0.03)
    assert draws(row, temperature=1e9)[1] / 4000 == pytest.approx(0.5, abs=0.03)
    assert set(draws(row, count=50, temperature=1e-300)) == {1}  # next to greedy, not an overflow


def test_top_k_keeps_k_and_the_lowest_ids_among_equals():
    assert set(draws([1.0, 3.0, 3.0, 2.0, 3.0], top_k=2)) == {1, 2}
    assert set(draws([1.0, 3.0, 3.0, 2.0, 3.0], top_k=1)) == {1}
    assert set(draws([1.0, 1.0, 1.0], top_k=7)) == {0, 1, 2}


@pytest.mark.parametrize(
    ("p", "kept"),
    [(1e-9, {3}), (0.5, {3}), (0.51, {1, 3}), (0.79, {1, 3}), (0.81, {0, 1, 3}), (1.0, {0, 1, 2, 3})],
)
def test_top_p_keeps_the_token_that_crosses_p(p, kept):
    assert set(draws([math.log(0.15), math.log(0.3), math.log(0.05), math.log(0.5)], top_p=p)) == kept


def test_the_least_top_p_keeps_one_token():
    """5e-324 of less than a half rounds to nothing."""
    row = [math.log(0.2), math.log(0.3), math.log(0.1), math.log(0.4)]
    assert set(draws(row, count=50, top_p=5e-324, top_k=1)) == {3}
    assert set(draws(row, count=50, top_p=5e-324, min_p=0.9)) == {3}


def test_the_least_repetition_penalty_leaves_finite_logits():
    assert tokens([[1.0, 5.0, -3.0]] * 2, [seq(repetition_penalty=value, generated=1) for value in (5e-324, 1e-40)]) == [0, 0]


def test_top_p_counts_within_top_k():
    """Of 0.4, 0.4, 0.2 the two first are 0.5 each once top-k has cut, so p = 0.5 needs only one."""
    row = [math.log(0.4), math.log(0.4), math.log(0.2)]
    assert set(draws(row, top_k=2, top_p=0.5)) == {0}
    assert set(draws(row, top_p=0.5)) == {0, 1}


@settings(deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([0.0, 1e-3, 0.1, 0.1001, 0.5]), min_size=6, max_size=6), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 7), st.sampled_from([0.05, 0.3, 0.5, 0.9, 0.999, 1.0])), min_size=4, max_size=4),
)
def test_the_shortlist_cuts_where_the_whole_vocabulary_would(weights, settings):
    """Many ties and short lists, so that cuts fall beyond the list and among equals at its end."""
    probs = torch.tensor(weights, dtype=torch.float64) + 1e-9
    probs /= probs.sum(dim=-1, keepdim=True)
    top_k, top_p = zip(*settings[: len(weights)], strict=True)
    whole = _truncate(probs, top_k, top_p, shortlist=6)
    for row, k, p, kept in zip(probs.tolist(), top_k, top_p, whole.tolist(), strict=True):
        ranking = sorted(range(6), key=lambda i: (-row[i], i))[: k or 6]
        total, before, expected = sum(row[i] for i in ranking), 0.0, set()
        for i in ranking:
            if before < p * total - 1e-12 or p == 1:
                expected.add(i)
            before += row[i]
        got = {i for i, value in enumerate(kept) if value}
        assert got == expected or abs(sum(row[i] for i in expected) - p * total) < 1e-9
    for shortlist in range(1, 6):
        assert torch.equal(_truncate(probs, top_k, top_p, shortlist=shortlist), whole)


@settings(deadline=None)
@given(
    st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=12),
    st.integers(0, 2**64 - 1),
    st.integers(0, 12),
    st.floats(0.05, 1.0),
    st.floats(0.1, 3.0),
)
def test_a_row_does_not_depend_on_its_batch_mates(row, seed, top_k, top_p, temperature):
    mine = seq(seed=seed, generated=3, top_k=top_k, top_p=top_p, temperature=temperature)
    alone = tokens([row], [mine])
    mates = [[float(i)] * len(row) for i in range(3)]
    others = [seq(temperature=0.0), seq(seed=1, top_k=1), seq(seed=2, top_p=0.3)]
    assert tokens([*mates, row], [*others, mine])[-1:] == alone
    assert tokens([row, *mates], [mine, *others])[:1] == alone


def test_each_position_and_seed_draws_anew():
    assert len({uniform(seed, position) for seed in range(50) for position in range(50)}) == 2500
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)  # the same 64 bits
    assert 0 <= min(uniform(0, i) for i in range(1000)) < max(uniform(0, i) for i in range(1000)) < 1


def test_a_continued_sequence_draws_as_if_never_stopped():
    row = torch.randn(1, 500, generator=torch.Generator().manual_seed(0)).expand(8, -1)
    whole = tokens(row, [seq(seed=9, generated=i) for i in range(8)])
    assert len(set(whole)) > 4
    assert [tokens(row[:1], [seq(seed=9, generated=i)])[0] for i in range(8)] == whole


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_numbers_is_none_and_alone(bad):
    logits = torch.zeros(4, 6)
    logits[:, 2] = 5.0
    logits[1, 4] = bad
    logits[2] = -math.inf
    for temperature in (0.0, 0.01):
        picked = sample(logits, [seq(temperature=temperature, logprobs=1)] * 4)
        assert [p and p.token for p in picked] == [2, None, None, 2]


def test_logprobs_are_of_the_raw_logits():
    row = torch.tensor([[0.0, math.log(3), math.log(6), math.log(6)]])
    (picked,) = sample(row, [seq(temperature=0.3, top_k=1, logprobs=3)])
    assert picked.token == 2
    assert picked.logprobs.logprob == pytest.approx(math.log(6 / 16), abs=1e-6)
    assert [token for token, _ in picked.logprobs.top] == [2, 3, 1]
    assert [value for _, value in picked.logprobs.top] == pytest.approx([math.log(6 / 16)] * 2 + [math.log(3 / 16)], abs=1e-6)


def test_logprobs_per_request():
    picked = sample(torch.randn(4, 9), [seq(), seq(logprobs=0), seq(temperature=0.0, logprobs=2), seq(logprobs=5)])
    assert picked[0].logprobs is None
    assert [len(p.logprobs.top) for p in picked[1:]] == [0, 2, 5]
    assert picked[2].logprobs.top[0] == (picked[2].token, picked[2].logprobs.logprob)


def test_a_ruled_out_token_has_a_finite_logprob():
    (picked,) = sample(torch.tensor([[0.0, -math.inf]]), [seq(temperature=0.0, logprobs=2)])
    assert math.isfinite(picked.logprobs.top[1][1])
