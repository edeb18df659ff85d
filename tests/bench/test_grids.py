"""The grids hold what the results are quoted for."""

from __future__ import annotations

import pytest

from mla_serve.bench.grids import DECODE, GRIDS, PREFILL, cases, log_uniform, named_grid
from mla_serve.errors import UserError
from mla_serve.shapes import Phase


def test_small_is_the_base_grid_and_a_width_that_fused_kernels_refuse() -> None:
    shapes = named_grid("small")
    decode = [shape for shape in shapes if shape.phase is Phase.DECODE]
    assert [(shape.batch, shape.heads, shape.kv_len) for shape in decode] == list(DECODE)
    assert all(shape.graph and shape.page_size == 64 and (shape.qk, shape.v) == (576, 512) for shape in decode)
    prefill = [shape for shape in shapes if shape.phase is Phase.PREFILL]
    assert [(shape.batch, shape.heads, shape.q_len) for shape in prefill if shape.v == 128] == list(PREFILL)
    assert [(shape.qk, shape.v) for shape in prefill if shape.v != 128] == [(192, 100)]
    assert all(shape.causal and not shape.graph and not shape.lse for shape in prefill)


def test_a_phase_by_itself() -> None:
    assert cases("decode") + cases("prefill") == cases("small")
    assert {case.shape.phase for case in cases("prefill")} == {Phase.PREFILL}


def test_full_adds_query_tokens_odd_heads_context_and_ragged_batches() -> None:
    small, full = cases("small"), cases("full")
    assert full[: len(small)] == small
    more = full[len(small) :]
    decode = [case.shape for case in more if case.shape.phase is Phase.DECODE]
    assert {shape.heads for shape in decode} >= {20, 40}
    assert any(shape.q_len == 8 and not shape.ragged for shape in decode)
    context = [case.shape for case in more if case.shape.phase is Phase.CONTEXT]
    assert context
    assert all(shape.lse and not shape.causal for shape in context)
    assert {case.shape.phase for case in more if case.ragged} == {Phase.DECODE, Phase.PREFILL}


@pytest.mark.parametrize("name", GRIDS)
def test_every_case_is_what_its_shape_says(name: str) -> None:
    found = cases(name)
    assert len(set(found)) == len(found)
    for case in found:
        shape = case.shape
        assert len(case.q_lens) == len(case.kv_lens) == shape.batch
        assert -(-sum(case.kv_lens) // shape.batch) == shape.kv_len
        assert -(-sum(case.q_lens) // shape.batch) == shape.q_len
        assert all(q <= kv for q, kv in zip(case.q_lens, case.kv_lens, strict=True))
        if shape.absorbed:
            assert shape.ragged == (max(case.kv_lens) * shape.batch > 2 * sum(case.kv_lens))


def test_ragged_lengths_are_log_uniform_and_the_same_each_time() -> None:
    lens = log_uniform(4000, seed=7)
    assert lens == log_uniform(4000, seed=7)
    assert min(lens) >= 100
    assert max(lens) == 32768
    middle = sorted(lens)[2000]
    assert 1500 < middle < 2200, "the geometric mean of 100 and 32,768 is 1,810"


def test_a_grid_that_nobody_has() -> None:
    with pytest.raises(UserError, match="small or full"):
        cases("large")
