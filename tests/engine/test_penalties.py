"""Grammar bits, biases, penalties, min_tokens and min_p against slow code that reads like Sampling's docstring."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st

from mla_serve.engine.base import Request, Sampling
from mla_serve.engine.embedded import sampler
from mla_serve.engine.embedded.penalties import adjust, asks
from mla_serve.engine.embedded.sampler import sample, uniform
from mla_serve.engine.embedded.sequence import Sequence

VOCAB = 40  # more than one word of bits, and not a multiple of 32
ENDS = frozenset({1, 2})


def seq(prompt=(0,), output=(), seed=0, **sampling):
    made = Sequence.of(Request("r", list(prompt), Sampling(**{"max_tokens": 99, "temperature": 0.0} | sampling)), seed=seed)
    made.token_ids += output
    made.end_token_ids = ENDS
    return made


def bits(allowed):
    words = np.zeros(-(-VOCAB // 32), dtype=np.uint32)
    for token in allowed:
        words[token // 32] |= np.uint32(1 << (token % 32))
    return torch.from_numpy(words.view(np.int32))


def slow_logits(row, s, allowed):
    """One row, one token at a time."""
    asked, out = s.request.sampling, [float(value) for value in row]
    prompt, output = s.token_ids[: s.num_prompt], s.token_ids[s.num_prompt :]
    if allowed is not None:
        out = [value if token in allowed else -math.inf for token, value in enumerate(out)]
    for token, bias in asked.logit_bias:
        out[token] += bias
    for token in set(prompt) | set(output):
        out[token] = out[token] / asked.repetition_penalty if out[token] > 0 else out[token] * asked.repetition_penalty
    for token in set(output):
        out[token] -= asked.frequency_penalty * output.count(token) + asked.presence_penalty
    if len(output) < asked.min_tokens:
        without = [-math.inf if token in {*ENDS, *asked.stop_token_ids} else value for token, value in enumerate(out)]
        out = without if max(without) > -math.inf else out
    return out


def slow_pick(logits, s):
    """The token, and whether a rounding error could have changed it."""
    asked = s.request.sampling
    best = max(logits)
    if asked.temperature == 0:
        near = [value for value in logits if best - value < 1e-4]
        return logits.index(best), len(near) > 1
    weights = [math.exp((value - best) / asked.temperature) for value in logits]
    probs = [weight / sum(weights) for weight in weights]
    close = any(abs(p - asked.min_p * max(probs)) < 1e-6 for p in probs if asked.min_p and p)
    probs = [p if p >= asked.min_p * max(probs) else 0.0 for p in probs]
    ranking = sorted(range(VOCAB), key=lambda token: (-probs[token], token))[: asked.top_k or VOCAB]
    total, before, kept = sum(probs[token] for token in ranking), 0.0, set()
    for token in ranking:
        close |= abs(before - asked.top_p * total) < 1e-6
        if before < asked.top_p * total or asked.top_p == 1:
            kept.add(token)
        before += probs[token]
    close |= asked.top_k > 0 and len({round(probs[token], 6) for token in range(VOCAB)}) < VOCAB  # ties at the cut
    target, reached = uniform(s.seed, s.num_generated) * sum(probs[token] for token in kept), 0.0
    for token in range(VOCAB):
        if token in kept:
            reached += probs[token]
            close |= abs(reached - target) < 1e-6
            if reached > target:
                return token, close
    return max(kept), True


tokens = st.integers(0, VOCAB - 1)


@st.composite
def rows(draw):
    """A row of logits, its sequence, and what its grammar allows (None: no grammar)."""
    logits = draw(st.lists(st.floats(-6, 6, width=32), min_size=VOCAB, max_size=VOCAB))
    output = draw(st.lists(tokens, max_size=6))
    sampling = {
        "temperature": draw(st.sampled_from([0.0, 0.7, 1.3])),
        "top_k": draw(st.sampled_from([0, 0, 3])),
        "top_p": draw(st.sampled_from([1.0, 0.8])),
        "min_p": draw(st.sampled_from([0.0, 0.0, 0.3, 1.0])),
        "min_tokens": draw(st.integers(0, 8)),
        "stop_token_ids": tuple(draw(st.lists(tokens, max_size=2))),
        "logit_bias": tuple(draw(st.dictionaries(tokens, st.floats(-100, 100, width=32), max_size=3)).items()),
        "presence_penalty": draw(st.sampled_from([0.0, 0.0, 1.5, -2.0])),
        "frequency_penalty": draw(st.sampled_from([0.0, 0.0, 0.7, -0.3])),
        "repetition_penalty": draw(st.sampled_from([1.0, 1.0, 1.3, 0.5])),
    }
    made = seq(draw(st.lists(tokens, min_size=1, max_size=5)), output, draw(st.integers(0, 2**64 - 1)), **sampling)
    return logits, made, draw(st.none() | st.sets(tokens, min_size=1, max_size=6) | st.just({1}))


@profile(deadline=None, max_examples=300)
@given(st.lists(rows(), min_size=1, max_size=5))
def test_every_row_as_slow_code_has_it(batch):
    logits = torch.tensor([row for row, _, _ in batch], dtype=torch.float32)
    seqs = [made for _, made, _ in batch]
    masks = {made: bits(allowed) for _, made, allowed in batch if allowed is not None}
    expected = [slow_logits(row, made, allowed) for row, made, allowed in batch]
    picked = sample(logits, seqs, masks)
    changed = adjust(logits.clone(), seqs, masks)
    torch.testing.assert_close(changed, torch.tensor(expected, dtype=torch.float32), rtol=1e-5, atol=1e-4)
    for pick, row, made in zip(picked, changed.tolist(), seqs, strict=True):
        token, close = slow_pick(row, made)
        assert pick.token == token or close
    for made, pick in zip(seqs, picked, strict=True):
        if made in masks:
            assert masks[made].numpy().view(np.uint32)[pick.token // 32] >> (pick.token % 32) & 1


@profile(deadline=None, max_examples=100)
@given(rows(), st.lists(rows(), min_size=1, max_size=4), st.integers(0, 4))
def test_a_row_does_not_depend_on_its_batch_mates(mine, mates, at):
    def pick(batch):
        masks = {made: bits(allowed) for _, made, allowed in batch if allowed is not None}
        return sample(torch.tensor([row for row, _, _ in batch]), [made for _, made, _ in batch], masks)

    at = min(at, len(mates))
    assert pick([*mates[:at], mine, *mates[at:]])[at] == pick([mine])[0]


def test_rows_that_ask_for_nothing_are_not_touched(monkeypatch):
    seen = []
    monkeypatch.setattr(sampler, "adjust", lambda logits, seqs, masks: seen.append(seqs) or adjust(logits, seqs, masks))
    plain, asking = seq(stop_token_ids=(3,)), seq(logit_bias=((3, 1.0),))
    logits = torch.randn(3, VOCAB)
    before = logits.clone()
    sample(logits[:1], [plain])
    assert seen == []
    sample(logits, [plain, asking, plain])
    assert seen == [[asking]]
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({}, False), ({"min_p": 0.5, "temperature": 1.0, "top_k": 3}, False), ({"min_tokens": 3}, False),
        ({"min_tokens": 4}, True), ({"presence_penalty": -1.0}, True), ({"frequency_penalty": 0.1}, True),
        ({"repetition_penalty": 1.1}, True), ({"logit_bias": ((0, 0.0),)}, True),
    ],
)  # fmt: skip
def test_who_asks(sampling, expected):
    assert asks(seq(output=(5, 6, 7), **sampling), {}) is expected


def test_penalties_follow_a_sequence_as_it_grows():
    """The counts are kept from step to step: each step must count what came since, once."""
    grown = seq(prompt=(3, 4), frequency_penalty=0.5, presence_penalty=1.0, repetition_penalty=2.0)
    row = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    for token in (3, 9, 9, 30, 9):
        fresh = seq((3, 4), grown.token_ids[2:], frequency_penalty=0.5, presence_penalty=1.0, repetition_penalty=2.0)
        assert torch.equal(adjust(row.clone(), [grown], {}), adjust(row.clone(), [fresh], {}))
        grown.token_ids.append(token)


def test_an_end_that_the_grammar_insists_on_comes_before_min_tokens():
    logits = torch.zeros(2, VOCAB)
    early, insisted = seq(min_tokens=5), seq(min_tokens=5)
    picked = sample(logits, [early, insisted], {early: bits({1, 7}), insisted: bits({1})})
    assert [pick.token for pick in picked] == [7, 1]


def test_greedy_obeys_grammar_bias_and_penalties():
    row = torch.zeros(1, VOCAB)
    row[0, [5, 6, 7]] = torch.tensor([3.0, 2.0, 1.0])
    for asked, token in (
        ({}, 5),
        ({"logit_bias": ((5, -9.0),)}, 6),
        ({"frequency_penalty": 2.0}, 6),
        ({"presence_penalty": 2.0}, 6),
    ):
        assert sample(row, [seq(output=(5,), **asked)])[0].token == token
    masked = seq(logit_bias=((5, 9.0),))
    assert sample(row, [masked], {masked: bits({7, 8})})[0].token == 7


def test_logprobs_stay_those_of_the_model():
    row = torch.randn(1, VOCAB)
    asked = {"logprobs": 3, "logit_bias": ((9, 50.0),), "repetition_penalty": 1.7, "min_tokens": 4}
    changed = seq(output=(5,), **asked)
    (pick,) = sample(row, [changed], {changed: bits({9, 10})})
    scores = torch.log_softmax(row, dim=-1)[0]
    assert pick.token == 9
    assert pick.logprobs.logprob == pytest.approx(scores[9].item(), abs=1e-6)
    assert [token for token, _ in pick.logprobs.top] == scores.topk(3).indices.tolist()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_numbers_is_none_whatever_it_asks_for(bad):
    """Also where the grammar or a bias would hide it: its latents are not to be trusted."""
    logits = torch.zeros(3, VOCAB)
    logits[1, 30] = bad
    seqs = [seq(logit_bias=((4, 5.0),)), seq(logit_bias=((4, 5.0),)), seq()]
    picked = sample(logits, seqs, {seqs[1]: bits({4})})
    assert [pick and pick.token for pick in picked] == [4, None, 0]


def test_min_p_keeps_what_is_likely_enough():
    probs = [0.5, 0.25, 0.15, 0.1]
    row = torch.full((400, VOCAB), -math.inf)
    row[:, :4] = torch.tensor(probs).log()
    for min_p, kept in ((0.19, {0, 1, 2, 3}), (0.21, {0, 1, 2}), (0.31, {0, 1}), (1.0, {0})):
        picked = sample(row, [seq(seed=i, temperature=1.0, min_p=min_p) for i in range(400)])
        assert {pick.token for pick in picked} == kept
