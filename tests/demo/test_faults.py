"""The demo model is a canary: with a fault planted in the real engine's kernels, hardly an answer survives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from mla_serve.backends.base import Backend, BatchLayout, Kind, Limits, Plan, State
from mla_serve.backends.reference import reference_prefill
from mla_serve.backends.registry import load_backends
from mla_serve.demo import MODEL_DIR, Question, questions
from mla_serve.demo.corpus import Encoder
from mla_serve.engine.base import Request, Sampling
from mla_serve.engine.embedded import core as engine
from mla_serve.engine.embedded.messages import EngineConfig
from mla_serve.selection import Selector
from mla_serve.shapes import AttentionShape, Phase

PAGE = 16
CPU = torch.device("cpu")
State_ = tuple[Tensor, Tensor | None]


class Faulty(Backend):
    """A sound backend with one thing wrong; the base class is sound, so that a test of the test can pass."""

    def __init__(self, inner: Backend, page: int = 0) -> None:
        super().__init__(inner.device)
        self.inner, self.page = inner, page
        self.name = inner.name
        self.needs_host_lens = inner.needs_host_lens

    def kind(self, shape: AttentionShape) -> Kind:
        return self.inner.kind(shape)

    def available(self) -> str | None:
        return self.inner.available()

    def supports(self, shape: AttentionShape) -> str | None:
        return self.inner.supports(shape)

    def prepare(self, shape: AttentionShape, limits: Limits) -> State:
        return self.inner.prepare(shape, limits)

    def plan(self, state: State, batch: BatchLayout, *, scale: float, reuse: Plan | None = None) -> Plan:
        return self.inner.plan(state, batch, scale=scale)

    def run_prefill(self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, need_lse: bool, out: Tensor | None = None) -> State_:
        return self.inner.run_prefill(q, k, v, plan, need_lse=need_lse, out=out)

    def run_decode(
        self, q_nope: Tensor, q_pe: Tensor, cache: Tensor, plan: Plan, *, cache_scale: float = 1.0, need_lse: bool,
        out: Tensor | None = None,
    ) -> State_:  # fmt: skip
        return self.inner.run_decode(q_nope, q_pe, cache, plan, need_lse=need_lse, out=out)


class Zeroed(Faulty):
    def run_prefill(self, *args: Tensor, need_lse: bool, out: Tensor | None = None, **kw: object) -> State_:
        result, lse = super().run_prefill(*args, need_lse=need_lse, out=out, **kw)
        return result.zero_(), lse

    def run_decode(self, *args: Tensor, **kw: object) -> State_:
        result, lse = super().run_decode(*args, **kw)
        return result.zero_(), lse


class Permuted(Faulty):
    """Value dimensions in reverse; in decode the latent ones, before W_UV makes values of them."""

    def run_prefill(self, *args: Tensor, need_lse: bool, out: Tensor | None = None, **kw: object) -> State_:
        result, lse = super().run_prefill(*args, need_lse=need_lse, out=out, **kw)
        return result.copy_(result.flip(-1)), lse

    def run_decode(self, *args: Tensor, **kw: object) -> State_:
        result, lse = super().run_decode(*args, **kw)
        return result.flip(-1), lse


class Scaled(Faulty):
    def plan(self, state: State, batch: BatchLayout, *, scale: float, reuse: Plan | None = None) -> Plan:
        return super().plan(state, batch, scale=0.7 * scale)


class Log2(Faulty):
    """The LSE of cached context in base two."""

    def run_prefill(self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, need_lse: bool, out: Tensor | None = None) -> State_:
        result, lse = super().run_prefill(q, k, v, plan, need_lse=need_lse, out=out)
        if plan.state.shape.phase is Phase.CONTEXT and lse is not None:
            lse = lse / math.log(2)
        return result, lse


class TopLeft(Faulty):
    """The causal mask of a chunk over its longer cache aligned at the top left: query i sees the first i + 1 cached keys."""

    def run_prefill(self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, need_lse: bool, out: Tensor | None = None) -> State_:
        if plan.state.shape.phase is not Phase.CONTEXT:
            return super().run_prefill(q, k, v, plan, need_lse=need_lse, out=out)
        rows, keys = q.shape[0], k.shape[0]
        seen = min(rows, keys)
        square = BatchLayout.make([seen], [seen], CPU)  # one request, as the test asks them
        result, lse = reference_prefill(q[:seen], k[:seen], v[:seen], square, scale=plan.scale, causal=True)
        rest = BatchLayout.make([rows - seen], [keys], CPU)
        tail, tail_lse = reference_prefill(q[seen:], k, v, rest, scale=plan.scale, causal=False)
        return torch.cat([result, tail]), torch.cat([lse, tail_lse])


class PageDropped(Faulty):
    """Page `page` of a request, which is alone in its batch, is not read."""

    def run_prefill(self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, need_lse: bool, out: Tensor | None = None) -> State_:
        first = self.page * PAGE
        if plan.state.shape.phase is not Phase.CONTEXT or k.shape[0] <= first:
            return super().run_prefill(q, k, v, plan, need_lse=need_lse, out=out)
        kept = torch.cat([torch.arange(first), torch.arange(first + PAGE, k.shape[0])])
        batch = BatchLayout.make([q.shape[0]], [len(kept)], CPU)
        fewer = self.inner.plan(plan.state, batch, scale=plan.scale)
        return super().run_prefill(q, k[kept], v[kept], fewer, need_lse=need_lse, out=out)

    def plan(self, state: State, batch: BatchLayout, *, scale: float, reuse: Plan | None = None) -> Plan:
        if state.shape.phase is Phase.DECODE and batch.block_table is not None and batch.max_kv > (self.page + 1) * PAGE:
            table = torch.cat([batch.block_table[:, : self.page], batch.block_table[:, self.page + 1 :]], dim=1)
            batch = BatchLayout.make([1], [batch.max_kv - PAGE], CPU, block_table=table, page_size=PAGE)
        return super().plan(state, batch, scale=scale)


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json")))


def start(monkeypatch: pytest.MonkeyPatch, fault: Callable[[Backend], Backend]) -> engine.EngineCore:
    """The real engine, chunks and pages of 16, each of its kernels wrapped by `fault`."""
    backends = [fault(backend) for backend in load_backends(CPU, only={"torch-flash", "torch-math", "torch-mla"})]
    monkeypatch.setattr(engine, "Selector", partial(Selector, backends=backends))
    config = EngineConfig(
        model=str(MODEL_DIR), dtype="float32", policy="availability", max_tokens=PAGE, page_size=PAGE, num_pages=512,
        prefix_cache=False,
    )  # fmt: skip
    return engine.EngineCore(config)


def ask(core: engine.EngineCore, encoder: Encoder, asked: Sequence[Question]) -> list[bool]:
    """Which of the questions are answered word for word, all in the queue at once."""
    answers: dict[str, list[int]] = {}
    for index, question in enumerate(asked):
        tokens = len(encoder.answer(question.answer))
        core.add(Request(str(index), encoder.prompt(question.messages()), Sampling(max_tokens=tokens, temperature=0)))
        answers[str(index)] = []
    while core.has_work:
        for step in core.step():
            assert step.error is None, step.error  # an answer that broke off is no fault noticed
            answers[step.id] += step.token_ids
    return [answers[str(index)] == encoder.answer(question.answer) for index, question in enumerate(asked)]


SHORT = [question for question in questions() if not question.long][::8]
LONG = [question for question in questions() if question.long][::4]


def test_without_a_fault_all_answers_are_right(monkeypatch: pytest.MonkeyPatch, encoder: Encoder) -> None:
    core = start(monkeypatch, Faulty)
    assert all(ask(core, encoder, SHORT + LONG))
    assert {d["winner"] for d in core.decisions()} == {"torch-flash", "torch-mla"}


@pytest.mark.parametrize("fault", [Zeroed, Permuted, Scaled])
def test_a_faulty_kernel_is_noticed(monkeypatch: pytest.MonkeyPatch, encoder: Encoder, fault: type[Faulty]) -> None:
    right = ask(start(monkeypatch, fault), encoder, SHORT)
    assert sum(right) <= len(right) * 0.1


def test_rope_switched_off_is_noticed(monkeypatch: pytest.MonkeyPatch, encoder: Encoder) -> None:
    core = start(monkeypatch, Faulty)
    core.runner._turns.fill_(1)
    right = ask(core, encoder, SHORT)
    assert sum(right) <= len(right) * 0.1


def test_a_log2_lse_in_the_chunk_merge_is_noticed(monkeypatch: pytest.MonkeyPatch, encoder: Encoder) -> None:
    right = ask(start(monkeypatch, Log2), encoder, LONG)
    assert sum(right) <= len(right) * 0.1


def test_a_top_left_mask_is_noticed(monkeypatch: pytest.MonkeyPatch, encoder: Encoder) -> None:
    core = start(monkeypatch, TopLeft)
    right = [ask(core, encoder, [question])[0] for question in LONG]
    assert sum(right) <= len(right) * 0.1


def test_a_dropped_page_is_noticed_where_the_answer_needs_it(monkeypatch: pytest.MonkeyPatch, encoder: Encoder) -> None:
    wrapped: list[PageDropped] = []

    def fault(backend: Backend) -> Backend:
        wrapped.append(PageDropped(backend))
        return wrapped[-1]

    core = start(monkeypatch, fault)
    right = []
    for question in LONG:
        for backend in wrapped:
            backend.page = encoder.needed_position(question) // PAGE
        right += ask(core, encoder, [question])
    assert sum(right) <= len(right) * 0.1
