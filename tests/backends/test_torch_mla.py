from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from mla_serve.backends import AttentionError, Reference
from mla_serve.backends import torch_mla as module
from mla_serve.backends.torch_mla import TorchMLA
from mla_serve.shapes import AttentionShape
from tests.backends.cases import LIMITS, SCALE, Case, make
from tests.backends.contenders import DEEPSEEK, SMALL
from tests.backends.judging import agree

CPU = torch.device("cpu")
SHAPE = AttentionShape.decode(SMALL, batch=4, kv_len=64, dtype="float32", page_size=16, lse=True)


def check(case: Case) -> module.MLAPlan:
    backend = TorchMLA(CPU)
    plan = backend.plan(case.prepare(backend), case.batch, scale=SCALE)
    agree("torch-mla", backend, case, case.run(backend, plan), case.expected())
    return plan


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("q_lens", [[1, 1, 1, 1], [3, 3, 3, 3], [4, 1, 2, 1], [2, 0, 3, 1], [2, 2, 0, 0]])
@pytest.mark.parametrize("kv_lens", [[40, 41, 39, 44], [900, 3, 5, 0], [700, 650, 0, 720], [1, 2, 3, 1]])
def test_any_lengths(q_lens: Sequence[int], kv_lens: Sequence[int], dtype: str) -> None:
    check(make(replace(SHAPE, dtype=dtype, q_len=max(q_lens)), q_lens, kv_lens, CPU))


def test_even_batches_are_one_item_each_and_never_gather_more_than_the_longest() -> None:
    plan = check(make(SHAPE, [1] * 4, [40, 41, 39, 44], CPU))
    assert plan.owner is None
    assert plan.rows.shape == (4, 44)


def test_ragged_batches_are_split_so_that_short_requests_stay_short() -> None:
    kv_lens = [2000, 10, 20, 30, 0]
    plan = check(make(SHAPE, [1] * 5, kv_lens, CPU))
    assert plan.owner.tolist() == [0] * 8 + [1, 2, 3]
    assert plan.rows.numel() == 11 * 256


def test_a_long_request_alone_feeds_every_thread() -> None:
    torch.set_num_threads(2)
    plan = check(make(SHAPE, [1], [1500], CPU))
    assert plan.rows.shape == (6, 256)
    assert check(make(SHAPE, [1], [300], CPU)).owner is None


def test_batches_larger_than_the_buffer_go_through_it_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BUFFER_BYTES", 0)  # room for one item of 256
    plan = check(make(SHAPE, [1] * 3, [600, 599, 601], CPU))
    assert plan.state.buffer.shape[0] == 256
    assert plan.rows.shape == (9, 256)


def test_a_call_without_exact_host_lengths_may_outgrow_the_buffer() -> None:
    backend = TorchMLA(CPU)
    case = make(SHAPE, [1] * 40, [500] * 40, CPU)
    batch = replace(case.batch, q_lens_host=None, kv_lens_host=None, max_kv=5000)
    case = replace(case, batch=batch, shape=replace(SHAPE, cache_dtype="float32"))
    plan = backend.plan(case.prepare(backend), batch, scale=SCALE)
    assert plan.rows.shape == (40, 5000)
    assert plan.rows.numel() > plan.state.buffer.shape[0]
    agree("torch-mla", backend, case, case.run(backend, plan), case.expected())


def test_the_gathered_latents_live_in_the_states_buffer() -> None:
    backend = TorchMLA(CPU)
    state = backend.prepare(SHAPE, LIMITS)
    assert state.buffer.numel() * 4 <= 16 << 20
    state.buffer.fill_(float("nan"))
    case = make(SHAPE, [1] * 3, [33, 30, 31], CPU)
    agree("torch-mla", backend, case, case.run(backend, backend.plan(state, case.batch, scale=SCALE)), case.expected())
    assert state.buffer[:99].isfinite().all()
    assert state.buffer[99:].isnan().all()


def test_a_float8_cache_with_its_scale() -> None:
    shape = replace(SHAPE, dtype="bfloat16", cache_dtype="float8_e4m3fn")
    case = replace(make(shape, [1] * 3, [33, 5, 0], CPU, unread=0.0), cache_scale=0.5)
    assert case.inputs[2].dtype == torch.float8_e4m3fn
    check(case)


def test_rows_of_no_request_are_empty() -> None:
    case = make(replace(SHAPE, q_len=2), [2, 1], [9, 4], CPU)
    q_nope, q_pe, cache = case.inputs
    wider = replace(case, inputs=(torch.cat([q_nope, q_nope]), torch.cat([q_pe, q_pe]), cache))
    out, lse = wider.answer(TorchMLA(CPU), out=wider.blank())
    agree("torch-mla", Reference(CPU), wider, (out, lse), wider.expected())
    assert not out[3:].any()
    assert (lse[3:] == float("-inf")).all()


@pytest.mark.parametrize("q_len", [1, 3])
def test_the_products_of_other_devices_agree_with_the_operator_of_the_cpu(q_len: int) -> None:
    q, k = torch.randn(3, q_len, 4, 80), torch.randn(3, 50, 80)
    bias = torch.zeros(3, q_len, 1, 50).masked_fill_(torch.rand(3, q_len, 1, 50) < 0.3, float("-inf"))
    out, lse = module._products(q, k, bias, 0.3, 64)
    want, want_lse = module._flash(q, k, bias, 0.3, 64)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)
    out, lse = module._products(q, k, torch.full_like(bias, float("-inf")), 0.3, 64)
    assert not out.any()
    assert (lse == float("-inf")).all()


def test_a_captured_plan_keeps_its_storage_and_its_sizes() -> None:
    backend = TorchMLA(CPU)
    shape = replace(SHAPE, graph=True)
    state = backend.prepare(shape, LIMITS)
    first, second = (make(shape, [1] * 3, kv_lens, CPU, table_width=6) for kv_lens in ([90, 3, 7], [5, 60, 0]))
    plan = backend.plan(state, first.batch, scale=SCALE)
    places = [t.data_ptr() for t in (plan.rows, plan.bias, plan.blind)]
    assert backend.plan(state, second.batch, scale=SCALE, reuse=plan) is plan
    assert [t.data_ptr() for t in (plan.rows, plan.bias, plan.blind)] == places
    agree("torch-mla", backend, second, second.run(backend, plan), second.expected())
    wider = make(shape, [1] * 3, [90, 3, 7], CPU, table_width=9)
    with pytest.raises(AttentionError, match=r"captured for .* cannot replay"):
        backend.plan(state, wider.batch, scale=SCALE, reuse=plan)
    mixed = make(replace(shape, q_len=2), [2, 1, 1], [9, 9, 9], CPU, table_width=6)
    with pytest.raises(AttentionError, match="no mixture"):
        backend.plan(backend.prepare(mixed.shape, LIMITS), mixed.batch, scale=SCALE)


def test_a_batch_without_pages_and_the_other_form_are_refused() -> None:
    backend = TorchMLA(CPU)
    batch = replace(make(SHAPE, [1], [3], CPU).batch, block_table=None)
    with pytest.raises(AttentionError, match="needs a block table and a page size"):
        backend.plan(backend.prepare(SHAPE, LIMITS), batch, scale=SCALE)
    prefill = AttentionShape.prefill(DEEPSEEK, batch=1, q_len=4, dtype="float32", lse=False)
    assert backend.supports(prefill) == "takes the absorbed form only"
    q = torch.randn(1, 4, 8)
    plan = backend.plan(backend.prepare(SHAPE, LIMITS), make(SHAPE, [1], [3], CPU).batch, scale=SCALE)
    with pytest.raises(AttentionError, match="torch-mla has no un-absorbed form"):
        backend.run_prefill(q, q, q, plan, need_lse=False)
