"""The runner: what a step returns, where latents go, and that neither the cut nor the order of work shows."""

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mla_serve.engine.base import Request, Sampling
from mla_serve.engine.embedded.memory import pages_in_memory
from mla_serve.engine.embedded.runner import Runner, context_chunks
from mla_serve.engine.embedded.sequence import Sequence, Work
from mla_serve.errors import UserError
from mla_serve.selection.selector import Selector
from tests.engine.conftest import MAX_LEN, VOCAB

CPU = torch.device("cpu")


@pytest.fixture
def runner(checkpoint):
    def make(**changes):
        settings = {
            "dtype": None, "device": CPU, "page_size": 4, "num_pages": 64, "max_requests": 4, "max_tokens": 256,
            "max_model_len": 256, "selector": Selector(CPU, policy="availability"),
        } | changes  # fmt: skip
        return Runner(checkpoint, **settings)

    return make


def sequence(length, pages, salt=0):
    ids = torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(100 * salt + length)).tolist()
    seq = Sequence.of(Request(f"{length}-{salt}", ids, Sampling(max_tokens=1)))
    seq.pages = list(pages)
    return seq


def whole(seq):
    return Work(seq, 0, len(seq.token_ids))


@given(st.lists(st.integers(0, 50), max_size=8), st.integers(1, 40))
def test_context_chunks_cover_every_token_once(starts, chunk):
    seen = {request: [] for request in range(len(starts))}
    for run in context_chunks(starts, chunk):
        assert 0 < sum(end - first for _, first, end in run) <= chunk
        requests = [request for request, _, _ in run]
        assert requests == list(range(requests[0], requests[-1] + 1))
        for request, first, end in run:
            assert first < end
            seen[request] += range(first, end)
    assert seen == {request: list(range(length)) for request, length in enumerate(starts)}


def test_context_chunks_are_full_where_requests_are_neighbours():
    assert list(context_chunks([5, 9, 0, 3], 6)) == [[(0, 0, 5), (1, 0, 1)], [(1, 1, 7)], [(1, 7, 9)], [(3, 0, 3)]]


def test_one_row_per_work_that_samples(runner):
    run = runner()
    a, b = sequence(9, range(3)), sequence(5, range(3, 5))
    works = [Work(a, 0, 6), whole(b)]
    every = run.run(works, all_positions=True)
    assert every.shape == (11, VOCAB)
    assert every.dtype == torch.float32
    some = run.run(works)
    torch.testing.assert_close(some, every[10:])
    assert run.run(works[:1]).shape == (0, VOCAB)


def test_neither_order_nor_company_nor_cut_shows(runner):
    """One token with something before it decodes where it comes first and prefills where it comes later."""
    run = runner(context_chunk=3)
    a, b, c = sequence(30, range(10, 18)), sequence(17, range(20, 25)), sequence(1, [40])
    alone = [run.run([whole(seq)], all_positions=True) for seq in (a, b, c)]
    fresh = runner(context_chunk=3)
    fresh.run([Work(a, 0, 29), Work(b, 0, 10)])
    decode_first = fresh.run([Work(a, 29, 1), Work(b, 10, 7), Work(c, 0, 1)])
    torch.testing.assert_close(decode_first, torch.stack([rows[-1] for rows in alone]), rtol=1e-4, atol=1e-4)
    prefill_first = fresh.run([Work(c, 0, 1), Work(b, 10, 7), Work(a, 29, 1)], all_positions=True)
    expected = torch.cat([alone[2], alone[1][10:], alone[0][29:]])
    torch.testing.assert_close(prefill_first, expected, rtol=1e-4, atol=1e-4)


def test_pages_in_any_order(runner):
    run = runner()
    one, two = sequence(23, range(6)), sequence(23, [63, 2, 40, 41, 7, 0])
    torch.testing.assert_close(run.run([whole(one)]), run.run([whole(two)]))
    run.run([Work(two, 0, 22)])
    torch.testing.assert_close(run.run([Work(two, 22, 1)]), run.run([whole(one)]), rtol=1e-4, atol=1e-4)


def test_zeroed_pages_are_zero_in_every_layer(runner):
    run = runner()
    run.run([whole(sequence(20, range(5)))])
    assert (run._cache[:, 2] != 0).any(dim=-1).all()
    run.zero_pages([2, 4])
    assert not run._cache[:, [2, 4]].any()
    assert run._cache[:, 3].any()


@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 0.1), ("float16", 0.02)])
def test_half_precision_is_near_float32(runner, dtype, bound):
    seq = sequence(60, range(16))
    exact, half = runner(), runner(dtype=dtype, context_chunk=16)
    for start in (0, 20, 40):
        rows = half.run([Work(seq, start, 20)], all_positions=True)
        expected = exact.run([Work(seq, start, 20)], all_positions=True)
        assert (rows - expected).norm() / expected.norm() < bound
    seq.token_ids.append(7)
    rows, expected = half.run([Work(seq, 60, 1)]), exact.run([Work(seq, 60, 1)])
    assert (rows - expected).norm() / expected.norm() < bound
    assert half.dtype == dtype


def test_pages_as_memory_allows(runner):
    run = runner(num_pages=None, max_requests=3, max_model_len=250)
    assert run.num_pages == 3 * 63
    with pytest.raises(UserError, match="lower the maximum length"):
        pages_in_memory(CPU, 2**40, least=1000, most=2000)


def test_length_beyond_the_models_is_refused(runner):
    with pytest.raises(UserError, match=f"over the {MAX_LEN} tokens"):
        runner(max_model_len=MAX_LEN + 1)


def test_a_pool_costs_no_memory_until_it_is_used(runner):
    before = psutil.Process().memory_info().rss
    large = runner(num_pages=2**20)
    assert large._cache.nbytes > 2**30
    assert psutil.Process().memory_info().rss - before < 2**28
    rows = large.run([whole(sequence(40, range(2**20 - 10, 2**20)))])
    torch.testing.assert_close(rows, runner().run([whole(sequence(40, range(10)))]))


def test_progress_is_told_after_each_layer(runner):
    made = runner()
    told = []
    made.progress = lambda: told.append(None)
    made.run([whole(sequence(9, [3, 5, 7]))])
    assert len(told) == made.config.num_layers
