"""triton-mla on a CPU: what `test_triton_mla.py` runs in a process of its own, since Triton's interpreter is chosen for a whole
process. By hand: `TRITON_INTERPRET=1 python -m pytest tests/backends/interpreted.py`."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from mla_serve.backends import Backend, BatchLayout, Limits, Padded, Padding, triton_mla, triton_mla_kernel, triton_mla_schedule
from mla_serve.backends.triton_mla import TritonMLA, TritonPlan
from mla_serve.selection.gate import check
from mla_serve.shapes import AttentionShape, MLADims, Phase
from tests.backends.cases import LIMITS, SCALE, Case, make
from tests.backends.contenders import DEEPSEEK, SMALL, Contender, params
from tests.backends.drawing import FEATURES, Drawn, cases
from tests.backends.judging import LawBroken, agree
from tests.backends.laws import LAWS, laws_for
from tests.conftest import SEED

CPU = torch.device("cpu")
MINICPM3 = MLADims(heads=40, nope=64, rope=32, v=64, latent=256)


def decode_shape(dims: MLADims, **kwargs) -> AttentionShape:
    return AttentionShape.decode(
        dims, **{"batch": 3, "kv_len": 64, "dtype": "bfloat16", "page_size": 16, "lse": True, **kwargs}
    )


def contenders() -> Iterator[Contender]:
    backend = TritonMLA(CPU)
    for shape in (
        decode_shape(DEEPSEEK),
        decode_shape(SMALL, q_len=3, dtype="float32"),
        decode_shape(SMALL, q_len=8, dtype="float16", page_size=32),
    ):
        yield Contender(backend, shape)
    yield Contender(Padded(backend, Padding.of(decode_shape(SMALL), heads=8)), decode_shape(SMALL))


ALL_LAWS = (DEEPSEEK.latent, "float32")  # a latent width and a dtype of which every law is asked; of the rest these:
SOME_LAWS = {"causal", "packed", "padding", "plans", "replay"}
PAIRS = [
    (name, contender)
    for contender in contenders()
    for name in laws_for(contender.backend, contender.shape)
    if name in SOME_LAWS or contender.shape.v in ALL_LAWS or contender.shape.dtype in ALL_LAWS
]


@pytest.mark.parametrize(("law", "contender"), params(PAIRS))
def test_law(law: str, contender: Contender) -> None:
    LAWS[law].check(contender.backend, contender.shape)


def slack(case: Case) -> float:
    """An output of a few numbers may happen to be near 0, as its terms are not: in float32 that is seen."""
    return 10.0 if case.shape.dtype == "float32" and case.blank().numel() < 100 else 1.0


@pytest.mark.parametrize(
    ("dims", "kwargs", "q_lens", "kv_lens"),
    [
        (MINICPM3, {"page_size": 1}, [1, 1], [37, 90]),
        (MINICPM3, {"page_size": 128}, [3, 1, 0, 2], [300, 1, 0, 0]),
        (replace(SMALL, rope=0, latent=80), {"dtype": "float32"}, [2, 2], [70, 33]),
        (replace(SMALL, heads=1, latent=1, rope=1), {"dtype": "float32"}, [1], [50]),
        (replace(SMALL, heads=17, latent=100, rope=24), {"page_size": 64}, [5, 8, 1, 64], [5, 130, 257, 70]),
        (SMALL, {"cache_dtype": "float8_e4m3fn"}, [8, 8, 8], [513, 8, 40]),
        (SMALL, {"cache_dtype": "float8_e4m3fn", "dtype": "float32"}, [1, 4], [100, 3]),
    ],
)
def test_odd_widths_pages_heads_and_batches(dims: MLADims, kwargs: dict, q_lens: list[int], kv_lens: list[int]) -> None:
    case = make(decode_shape(dims, **kwargs), q_lens, kv_lens, CPU)
    case = replace(case, cache_scale=0.75)
    agree("right", TritonMLA(CPU), case, case.answer(TritonMLA(CPU), out=case.blank()), case.expected(), slack=slack(case))


@pytest.mark.parametrize("feature", FEATURES)
def test_any_batch_agrees_with_the_reference(feature: str) -> None:
    @settings(max_examples=5, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @seed(SEED)
    @given(cases((Phase.DECODE,), feature, equal_widths=False))
    def agrees(drawn: Drawn) -> None:
        case, backend = drawn.case, TritonMLA(CPU)
        agree("right", backend, case, case.answer(backend, out=case.blank()), case.expected(), slack=slack(case))

    agrees()


def planned(q_lens: list[int], kv_lens: list[int], heads: int) -> tuple[TritonPlan, AttentionShape]:
    shape = decode_shape(replace(SMALL, heads=heads), page_size=64)
    table = torch.zeros(len(q_lens), max(1, -(-max(kv_lens) // 64)), dtype=torch.int32)
    batch = BatchLayout.make(q_lens, kv_lens, CPU, block_table=table, page_size=64)
    backend = TritonMLA(CPU)
    return backend.plan(backend.prepare(shape, LIMITS), batch, scale=SCALE), shape


@settings(max_examples=60, deadline=None, database=None)
@seed(SEED)
@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.one_of(st.just(0), st.integers(1, 200), st.integers(200, 40000))),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 40),
)
def test_the_schedule_covers_each_block_once_in_equal_shares(lens: list[tuple[int, int]], heads: int) -> None:
    """Every block of every tile belongs to one program, shares are equal but for the last, and nobody gets work for nothing."""
    q_lens, kv_lens = (list(t) for t in zip(*lens, strict=True))
    plan, _ = planned(q_lens, kv_lens, heads)
    tuning = plan.state.tuning
    share, total, tokens = plan.schedule.tolist()
    at = token = 0
    for q_len, kv_len, row in zip(q_lens, kv_lens, plan.requests.tolist(), strict=True):
        work = -(-q_len * heads // tuning.block_m) * max(1, -(-kv_len // tuning.block_n))
        assert row == [at, at + work, token, q_len, kv_len]
        at, token = at + work, token + q_len
    assert (total, tokens) == (at, token)
    programs = plan.state.programs
    least = -(-tuning.least_keys // tuning.block_n)
    assert share * programs >= total  # all is done
    assert share <= max(least, -(-total // programs))  # and in equal shares
    for program, first in enumerate(plan.starts.tolist()):
        if program * share < total:
            begin, end = plan.requests[first, :2].tolist()
            assert begin <= program * share < end
    assert not plan.counters.any()


def test_the_counters_are_back_at_zero_and_runs_repeat_to_the_bit() -> None:
    """One plan serves all layers of a step; here with tiles in one, a few and more pieces than are reduced at a time."""
    backend = TritonMLA(CPU)
    for kv_lens in ([300], [100, 5, 0], [16] * 5, [250, 100]):
        case = make(decode_shape(SMALL, q_len=2), [2] * len(kv_lens), kv_lens, CPU)
        plan = backend.plan(case.prepare(backend), case.batch, scale=SCALE)
        first = case.run(backend, plan)
        for _ in range(2):
            again = case.run(backend, plan)
            assert torch.equal(first[0], again[0])
            assert torch.equal(first[1], again[1])
            assert not plan.counters.any()


def test_a_long_request_is_reduced_in_two_levels() -> None:
    plan, shape = planned([1], [800], 3)
    share, total, _ = plan.schedule.tolist()
    pieces = -(-total // share)
    assert pieces == plan.state.programs > plan.state.tuning.fan
    case = make(shape, [1], [800], CPU)
    agree("right", TritonMLA(CPU), case, case.answer(TritonMLA(CPU)), case.expected())


@pytest.mark.parametrize("graph", [False, True])
def test_tokens_of_no_request_are_zeros(graph: bool) -> None:
    backend = TritonMLA(CPU)
    shape = decode_shape(SMALL, q_len=2, graph=graph)
    case = make(shape, [2, 2, 2], [40, 3, 17], CPU)
    less = replace(case.batch, num_tokens=4, query_start_loc=torch.tensor([0, 2, 4, 4], dtype=torch.int32))
    less = replace(less, kv_lens=torch.tensor([40, 3, 0], dtype=torch.int32), q_lens_host=(2, 2, 0), kv_lens_host=(40, 3, 0))
    case = replace(case, batch=less)
    plan = backend.plan(backend.prepare(shape, LIMITS), less, scale=SCALE)
    out, lse = case.run(backend, plan, out=case.blank())
    agree("right", backend, case, (out, lse), case.expected())
    assert not out[4:].any()
    assert bool((lse[4:] == float("-inf")).all())


def test_strided_outputs_tables_and_queries() -> None:
    backend = TritonMLA(CPU)
    case = make(decode_shape(SMALL, dtype="float32"), [1, 1], [70, 9], CPU)
    wide = torch.full((2, 2 * case.batch.block_table.shape[1]), -1, dtype=torch.int32)
    wide[:, : case.batch.block_table.shape[1]] = case.batch.block_table
    table = wide[:, : case.batch.block_table.shape[1]]
    q_nope, q_pe, cache = case.inputs
    turned = q_nope.transpose(1, 2).contiguous().transpose(1, 2)  # a last dimension that is not dense
    case = replace(case, inputs=(turned, q_pe, cache), batch=replace(case.batch, block_table=table))
    room = torch.full((2, 5, 2 * SMALL.latent), float("nan"))
    out = room[:, 1 : 1 + SMALL.heads, : SMALL.latent]
    got, lse = case.answer(backend, out=out)
    agree("right", backend, case, (got, lse), case.expected())
    assert bool(room[:, 0].isnan().all())
    assert bool(room[:, -1].isnan().all())
    assert bool(room[..., SMALL.latent :].isnan().all())


def test_more_requests_than_the_limits_said_are_planned_all_the_same() -> None:
    backend = TritonMLA(CPU)
    case = make(decode_shape(SMALL), [1] * 5, [9, 3, 40, 1, 20], CPU)
    state = backend.prepare(case.shape, Limits(max_requests=2, max_tokens=8, max_kv_tokens=64))
    plan = backend.plan(state, make(case.shape, [1], [3], CPU).batch, scale=SCALE)
    plan = backend.plan(state, case.batch, scale=SCALE, reuse=plan)
    agree("right", backend, case, case.run(backend, plan), case.expected())


@pytest.mark.parametrize("cache_dtype", [None, "float8_e4m3fn"])
def test_the_gate_lets_it_through(cache_dtype: str | None) -> None:
    shape = decode_shape(SMALL, batch=2, cache_dtype=cache_dtype, graph=cache_dtype is None)
    result = check(TritonMLA(CPU), shape, seed=SEED)
    assert (result.failure, result.leaks_nan) == (None, False)


# What is changed in the source of the kernels, one fault each.
MUTANTS = {
    "no scale": ("scores * logit_scale", "scores"),
    "a key too many": ("q_len + token + 1", "q_len + token + 2"),
    "unread slots are read": ("readable = (key < kv_len)[:, None]", "readable = (key >= 0)[:, None]"),
    "the page of the block before": ("(block + 1) * BLOCK_N, kv_len", "block * BLOCK_N, kv_len"),
    "no rope": ("if ROPE > 0:\n            inside", "if False:\n            inside"),
    "base-2 LSE": ("lse * 0.6931471805599453", "lse"),
    "values without their scale": ("(result * cache_scale)", "result"),
    "sums that do not fade": ("acc = acc * _along(fade, SWAP, False)", "acc = acc * 1.0"),
    "counters that stay": ("tl.store(counter, 0)", "tl.store(counter, expected)"),
    "nobody is last": ("== expected - 1", "== expected"),
    "two pieces in one slot": ("tl.where(piece == 0, 1, 0)", "0"),
    "pieces of equal weight": ("cache_modifier=\".cg\") - shift)", "cache_modifier=\".cg\") * 0)"),
    "one level of groups": ("program, 0, pieces, part, fan", "program, 0, fan, part, fan"),
    "the group's LSE is not kept": ("tl.store(state_lse + slot * BLOCK_M + lane, whole_lse)", "pass"),
    "rows of no request stay": ("while spare < num_tokens", "while spare < 0"),
    "a share too small": ("tl.cdiv(total, PROGRAMS)", "total // PROGRAMS"),
    "empty requests have no work": ("tl.maximum(tl.cdiv(kv_len, BLOCK_N), 1)\n    end", "tl.cdiv(kv_len, BLOCK_N)\n    end"),
}  # fmt: skip


PROGRAM = "program = tl.program_id(0)"
ORDERS = {
    "as they come": PROGRAM,
    "backwards": "program = tl.num_programs(0) - 1 - tl.program_id(0)",
    "mixed": "program = (3 * tl.program_id(0) + 2) % tl.num_programs(0)",
}
"""The interpreter runs one program after another; on a GPU any may be first."""


def changed(module: ModuleType, changes: list[tuple[str, str]], path: Path) -> ModuleType:
    """The module with its source changed; itself where there is nothing to change."""
    source = before = Path(str(module.__file__)).read_text()
    for old, new in changes:
        source = source.replace(old, new)
    if source == before:
        return module
    path = path / f"{module.__name__.rpartition('.')[2]}_changed.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def put_in(monkeypatch: pytest.MonkeyPatch, changes: list[tuple[str, str]], path: Path) -> bool:
    """Lets the backend run changed kernels; False if nothing changed."""
    path.mkdir()
    schedule, decode = (changed(module, changes, path) for module in (triton_mla_schedule, triton_mla_kernel))
    kernels = schedule.plan_kernel, decode.decode_kernel
    monkeypatch.setattr(triton_mla, "_kernels", lambda: kernels)
    return (schedule, decode) != (triton_mla_schedule, triton_mla_kernel)


def _examine(backend: Backend) -> None:
    """A few batches that a wrong kernel cannot get right, each twice with one plan."""
    for q_lens, kv_lens in (([2, 2, 2], [300, 0, 310]), ([3, 1], [700, 21]), ([1] * 5, [30] * 5)):
        case = replace(make(decode_shape(SMALL), q_lens, kv_lens, CPU), cache_scale=0.5)
        q_nope, q_pe, cache = case.inputs
        spare = tuple(torch.cat([t, t[:1]]) for t in (q_nope, q_pe))  # a token of no request
        case: Case = replace(case, inputs=(*spare, cache))
        plan = backend.plan(case.prepare(backend), case.batch, scale=SCALE)
        for _ in range(2):
            agree("right", backend, case, case.run(backend, plan, out=case.blank()), case.expected())


@pytest.mark.parametrize("order", ORDERS)
def test_programs_may_run_in_any_order(order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert put_in(monkeypatch, [(PROGRAM, ORDERS[order])], tmp_path / "a") or order == "as they come"
    _examine(TritonMLA(CPU))


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_faults_are_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert put_in(monkeypatch, [MUTANTS[name]], tmp_path / "a"), "there is nothing to change"
    found = _found_wrong()
    put_in(monkeypatch, [MUTANTS[name], (PROGRAM, ORDERS["backwards"])], tmp_path / "b")
    assert found or _found_wrong()


def _found_wrong() -> bool:
    try:
        _examine(TritonMLA(CPU))
    except LawBroken:
        return True
    return False
