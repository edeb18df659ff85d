"""Which kernel a step's decodes get, and that a captured plan is refreshed in place."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mla_serve.backends import reference_decode
from mla_serve.backends.base import BatchLayout
from mla_serve.selection import PinError
from mla_serve.shapes import AttentionShape, MLADims
from mla_serve.vllm_plugin.deployment import Planned, Size, absorb_by_widths
from mla_serve.vllm_plugin.steps import Batch, DecodePlanner
from tests.backends.fakes import FixedBatch, PlanBound
from tests.selection.fakes import SMALL, Fake, times
from tests.vllm_plugin.deploy import CPU, LIMITS, SIZE, deploy

PAGE, PAGES = 16, 40
SCALE = SMALL.qk**-0.5


class Step:
    """A batch as vLLM lays it out: the host's lengths, device tensors, and graph padding at the end."""

    def __init__(self, q_lens: list[int], kv_lens: list[int], rows: int | None = None) -> None:
        self.q_lens, self.kv_lens = tuple(q_lens), tuple(kv_lens)
        self.rows = sum(q_lens) if rows is None else rows
        self.starts = torch.tensor([0, *q_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        self.lens = torch.tensor(kv_lens, dtype=torch.int32)
        self.table = torch.stack([torch.randperm(PAGES)[:8] for _ in q_lens]).int()
        self.batch = Batch(self.q_lens, self.kv_lens, max(kv_lens))

    def plan(self, planner: DecodePlanner) -> Planned:
        return planner.plan(self.batch, self.starts, self.lens, self.table, num_tokens=self.rows)

    def check(self, planned: Planned) -> None:
        """Runs it and compares with the reference; rows of graph padding are anybody's."""
        q = torch.randn(self.rows, SMALL.heads, SMALL.latent_row)
        cache = torch.randn(PAGES, PAGE, SMALL.latent_row)
        q_nope, q_pe = q.split([SMALL.latent, SMALL.rope], dim=-1)
        out, _ = planned.kernel.run_decode(q_nope, q_pe, cache, planned.plan, need_lse=False)
        live = sum(self.q_lens)
        torch.testing.assert_close(out[:live], self._right(q[:live], cache), rtol=1e-5, atol=1e-5)

    def _right(self, q: Tensor, cache: Tensor) -> Tensor:
        layout = BatchLayout.make(self.q_lens, self.kv_lens, CPU, block_table=self.table, page_size=PAGE)
        q_nope, q_pe = q.split([SMALL.latent, SMALL.rope], dim=-1)
        return reference_decode(q_nope, q_pe, cache, layout, scale=SCALE)[0]


def planner(*kernels: object, verified: int = 1, warm: object = None, size: Size = SIZE, **settings: object) -> DecodePlanner:
    size = replace(size, verified=verified)
    deployment = deploy(kernels or [FixedBatch(CPU), PlanBound(CPU)], size, **settings)  # type: ignore[arg-type]
    return DecodePlanner(deployment, LIMITS, SMALL, scale=SCALE, page_size=PAGE, warm=warm)  # type: ignore[arg-type]


def capture(of: DecodePlanner, requests: int, q_len: int = 1) -> Planned:
    of.capturing = True
    try:
        return Step([q_len] * requests, [q_len] * requests).plan(of)
    finally:
        of.capturing = False


def test_a_captured_size_keeps_its_kernel_and_plan_and_is_refreshed_in_place() -> None:
    """Replayed with other lengths, other pages and fewer live rows, as vLLM pads a batch up to a captured size."""
    of = planner(expected_context=128)
    held = capture(of, 4)
    assert held.kernel.backend.name == "fixed-batch"
    assert held.kernel.decision.bucket.shape.graph
    assert held.kernel.decision.bucket.shape.kv_len == 128
    plan = held.plan
    for step in (Step([1, 1, 1, 1], [5, 17, 100, 1]), Step([1, 1, 0, 0], [33, 2, 0, 0], rows=4), Step([1] * 4, [9] * 4)):
        planned = step.plan(of)
        assert planned is held
        assert planned.plan is plan
        step.check(planned)


def test_what_is_left_over_in_graph_padding_is_not_read() -> None:
    """The host's copy of a padded row's length is an earlier step's; the device has 0."""
    of = planner(PlanBound(CPU))
    step = Step([1, 0], [33, 0], rows=2)
    step.batch = Batch(step.q_lens, (33, 99), 33)
    planned = step.plan(of)
    assert planned.plan.batch.kv_lens_host == (33, 0)
    step.check(planned)


def test_the_expected_context_is_the_longest_where_nobody_says() -> None:
    assert planner().expected_context == SIZE.max_model_len
    assert planner(expected_context=64).expected_context == 64
    assert planner(expected_context=10**6).expected_context == SIZE.max_model_len


def test_what_is_captured_is_run_once_before() -> None:
    """Whatever a kernel compiles or loads at its first call must not be part of a graph."""
    ran: list[tuple[Planned, int]] = []
    of = planner(warm=lambda planned, tokens: ran.append((planned, tokens)), verified=3)
    held = capture(of, 2, q_len=3)
    assert ran == [(held, 6)]
    assert capture(of, 2, q_len=3) is held
    assert len(ran) == 1


def test_other_sizes_and_mixed_batches_are_planned_afresh() -> None:
    of = planner()
    capture(of, 2)
    three = Step([1, 1, 1], [5, 6, 7])
    planned = three.plan(of)
    assert not planned.kernel.decision.bucket.shape.graph
    three.check(planned)
    mixed = Step([1, 1, 40], [5, 6, 40])  # its third request is a prefill, so nothing is replayed
    two = of.plan(mixed.batch, mixed.starts[:3], mixed.lens[:2], mixed.table[:2], num_tokens=2)
    assert not two.kernel.decision.bucket.shape.graph


def test_a_mixture_of_query_lengths_avoids_kernels_that_want_them_even() -> None:
    even = Fake("even", even_queries=True)
    of = planner(even, PlanBound(CPU), verified=2, absorb_up_to=12)
    step = Step([2, 2], [40, 50])
    assert step.plan(of).kernel.backend.name == "even"
    for mixture in (Step([1, 2], [40, 50]), Step([11, 3], [40, 50]), Step([5, 5], [40, 50])):
        planned = mixture.plan(of)
        assert planned.kernel.backend.name == "plan-bound"
        assert planned.kernel.decision.bucket.shape.q_len == 16
        mixture.check(planned)


def test_a_pinned_kernel_that_wants_even_lengths_gets_no_extensions() -> None:
    even = Fake("even", even_queries=True)
    assert planner(even, pins=(("decode", "even"),), absorb_up_to=64, verified=2).absorb_up_to == 2
    assert planner(even, absorb_up_to=64).absorb_up_to == 64
    assert planner().absorb_up_to == 1


def test_kernels_that_plan_from_host_lengths_are_out_where_those_are_only_a_bound() -> None:
    """Asynchronous speculative decoding: and the decision says so."""
    of = planner(PlanBound(CPU), FixedBatch(CPU), size=replace(SIZE, host_lens=False), verified=2)
    step = Step([2, 2], [40, 50])
    planned = step.plan(of)
    assert planned.kernel.backend.name == "fixed-batch"
    assert not planned.plan.batch.host_lens_exact
    (row,) = (row for row in planned.kernel.decision.candidates if row.backend == "plan-bound")
    assert row.reason is not None
    assert "exact host lengths" in row.reason


def test_graphs_are_refused_where_only_the_last_resort_could_be_captured() -> None:
    assert planner().why_no_graphs() is None
    reason = planner(PlanBound(CPU)).why_no_graphs()
    assert reason is not None
    assert "torch-mla, the last resort" in reason
    pinned = planner(PlanBound(CPU), pins=(("decode", "plan-bound"),)).why_no_graphs()
    assert pinned is not None
    assert "cannot be captured in a CUDA graph" in pinned


def test_a_captured_kernel_that_is_pinned_must_be_capturable() -> None:
    of = planner(PlanBound(CPU), FixedBatch(CPU), pins=(("decode", "plan-bound"),))
    with pytest.raises(PinError, match="cannot be captured in a CUDA graph"):
        capture(of, 2)


def test_planned_steps_are_counted_by_kernel() -> None:
    of = planner(PlanBound(CPU))
    for _ in range(3):
        Step([1, 1], [5, 6]).plan(of)
    assert of.deployment.counts.steps == {("decode", "plan-bound"): 3}


def test_where_the_absorbed_form_is_less_arithmetic() -> None:
    """DeepSeek: 512 * 256 products make a key and a value, and each query token costs 1088 - 320 more."""
    assert absorb_by_widths(MLADims(heads=16, nope=128, rope=64, v=128, latent=512)) == 128
    assert absorb_by_widths(MLADims(heads=16, nope=192, rope=64, v=256, latent=512)) == 256
    assert absorb_by_widths(MLADims(heads=16, nope=128, rope=64, v=128, latent=64)) == 512


def test_a_captured_kernel_is_the_best_measured_one_that_can_be_captured() -> None:
    """A table of eager measurements serves graphs too: by the nearest bucket whose winner can be captured."""
    fast, slow = Fake("fast", capturable=True), Fake("slow", capturable=True)
    of = planner(slow, fast, measure=times({"fast": 1.0, "slow": 2.0}), expected_context=64)
    eager = AttentionShape.decode(SMALL, batch=4, kv_len=64, dtype="float32", page_size=PAGE)
    assert of.deployment.selector.measure(eager).winner == "fast"
    decision = capture(of, 4).kernel.decision
    assert decision.winner == "fast"
    assert decision.note is not None
    assert "as in the nearest measured bucket" in decision.note
