from __future__ import annotations

import pytest
import torch

from mla_serve.backends.base import AttentionError, Limits, State
from mla_serve.backends.padded import Padded
from mla_serve.errors import UserError
from mla_serve.selection.bound import BoundSelector, benchmark_lookup
from mla_serve.selection.inputs import make_call
from mla_serve.selection.pins import PinError
from mla_serve.selection.selector import Selector
from mla_serve.shapes import Bucket
from tests.selection.fakes import DEEPSEEK, SMALL, Fake, context, decode, prefill

LIMITS = Limits(max_requests=8, max_tokens=64, max_kv_tokens=256)


def bind(selector: Selector) -> BoundSelector:
    return selector.bind(DEEPSEEK, dtype="float32", page_size=16, limits=LIMITS)


def test_totals_become_the_bucket_of_one_request(cpu: torch.device) -> None:
    bound = bind(Selector(cpu, policy="availability"))
    kernels = {
        bound.prefill(3, 50, lse=False): prefill(batch=3, q_len=17),
        bound.prefill(1, 1, lse=True): prefill(q_len=1, lse=True),
        bound.context(2, 9, 250): context(batch=2, q_len=5, kv_len=125),
        bound.decode(5, 1281, ragged=True): decode(DEEPSEEK, batch=5, kv_len=257, ragged=True),
        bound.decode(4, 64, ragged=False, q_len=3): decode(DEEPSEEK, batch=4, kv_len=16, q_len=3),
    }
    for kernel, shape in kernels.items():
        assert kernel.decision.bucket == Bucket.of(shape)
    assert bound.decisions() == [kernel.decision for kernel in kernels]


def test_a_hit_makes_no_backend_call(cpu: torch.device) -> None:
    fake = Fake()
    bound = bind(Selector(cpu, policy="availability", backends=[fake]))
    first = [bound.prefill(1, 33, lse=False), bound.context(1, 33, 70), bound.decode(4, 900, ragged=False)]
    before = fake.calls.copy()
    again = [bound.prefill(1, 64, lse=False), bound.context(1, 64, 128), bound.decode(3, 700, ragged=False)]
    assert all(a is b for a, b in zip(first, again, strict=True))
    assert fake.calls == before
    assert benchmark_lookup(bound, calls=100)["calls"] == 100.0
    settled = fake.calls.copy()
    figures = benchmark_lookup(bound, calls=100)
    assert fake.calls == settled
    assert 0.0 < figures["median_us"] <= figures["p99_us"]


def test_buckets_that_differ_in_size_alone_share_a_state(cpu: torch.device) -> None:
    fake = Fake()
    bound = bind(Selector(cpu, policy="availability", backends=[fake]))
    states = {id(bound.decode(b, 100 * b, ragged=r).state) for b in (1, 2, 8) for r in (False, True)}
    assert len(states) == 1
    assert fake.calls["prepare"] == 1
    assert bound.decode(1, 100, ragged=False, q_len=2).state is not bound.decode(1, 100, ragged=False).state
    assert bound.prefill(1, 8, lse=True).state is not bound.prefill(1, 8, lse=False).state
    assert bound.prefill(1, 8, lse=True).state.limits == LIMITS


def test_a_kernel_plans_and_runs(cpu: torch.device) -> None:
    bound = bind(Selector(cpu, policy="availability"))
    kernel = bound.prefill(2, 30, lse=True)
    assert isinstance(kernel.backend, Padded)
    call = make_call(prefill(batch=2, q_len=15), [20, 10], [20, 10], cpu, seed=1)
    out, lse = kernel.run_prefill(*call.tensors, kernel.plan(call.batch, scale=call.scale), need_lse=True)
    expected, expected_lse = call.expected()
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-4)
    kernel = bound.decode(2, 30, ragged=False)
    call = make_call(decode(DEEPSEEK, batch=2), [1, 1], [20, 10], cpu, seed=1)
    plan = kernel.plan(call.batch, scale=call.scale)
    out, _ = kernel.run_decode(*call.tensors, kernel.plan(call.batch, scale=call.scale, reuse=plan), need_lse=False)
    torch.testing.assert_close(out, call.expected()[0], rtol=1e-4, atol=1e-5)


class CannotPrepare(Fake):
    def prepare(self, *_: object) -> State:  # type: ignore[override]
        raise AttentionError("no memory left for a workspace")


def test_a_kernel_that_cannot_be_prepared_gives_way_and_says_so(cpu: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    kernel = bind(Selector(cpu, policy="availability", backends=[CannotPrepare()])).decode(1, 10, ragged=False)
    assert kernel.decision.label == "torch-mla"
    assert kernel.decision.note == "fake could not be prepared: no memory left for a workspace"
    assert "no memory left" in caplog.text


def test_a_pinned_kernel_that_cannot_be_prepared_is_an_error(cpu: torch.device) -> None:
    bound = bind(Selector(cpu, pins={"decode": "fake"}, backends=[CannotPrepare()]))
    with pytest.raises(PinError, match="no memory left"):
        bound.decode(1, 10, ragged=False)


def test_a_shape_that_no_kernel_takes_is_a_users_error(cpu: torch.device) -> None:
    bound = Selector(cpu, policy="availability").bind(SMALL, dtype="float8_e4m3fn", page_size=16, limits=LIMITS)
    with pytest.raises(UserError, match="torch-math cannot run prefill attention here"):
        bound.prefill(1, 8, lse=False)
