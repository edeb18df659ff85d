"""The trie of choices against the plain list of them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mla_serve.engine.embedded.choices import Trie, TrieMatcher

VOCAB, ENDS = 70, (1, 69)
words = st.lists(st.lists(st.sampled_from([0, 2, 31, 32, 63, 68]), max_size=4), min_size=1, max_size=6)


def fits(matcher):
    bits = torch.full((3,), -1, dtype=torch.int32)  # what was there before must not shine through
    matcher.fill(bits)
    return {i for i in range(96) if bits[i // 32].item() >> (i % 32) & 1}


@given(words, st.data())
def test_what_fits_is_what_some_choice_goes_on_with(choices, data):
    matcher, said = TrieMatcher(Trie.of(choices), ENDS), []
    while not matcher.terminated:
        going_on = [choice for choice in choices if choice[: len(said)] == said]
        expected = {choice[len(said)] for choice in going_on if len(choice) > len(said)}
        if said in going_on:
            expected |= set(ENDS)
        assert fits(matcher) == expected
        for wrong in {0, 1, 5, 31, 69} - expected:
            assert not matcher.accept(wrong)
        said.append(data.draw(st.sampled_from(sorted(expected))))
        assert matcher.accept(said[-1])
    assert said[:-1] in choices
    assert not matcher.accept(ENDS[0])


@pytest.mark.parametrize("choices", [[[2]], [[2], [2, 3]]])
def test_without_end_tokens_the_first_whole_choice_is_the_last_word(choices):
    matcher = TrieMatcher(Trie.of(choices), ())
    assert not matcher.terminated
    assert fits(matcher) == {2}
    assert matcher.accept(2)
    assert matcher.terminated
