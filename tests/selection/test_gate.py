from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch

from mla_serve.backends.base import Backend, Limits
from mla_serve.backends.padded import Padded, Padding
from mla_serve.backends.registry import load_backends
from mla_serve.selection.candidates import candidates
from mla_serve.selection.gate import check, spot_check, tolerance
from mla_serve.selection.inputs import GARBAGE, Call, full_size, limits_of, make_call
from mla_serve.shapes import AttentionShape, Phase
from tests.backends.mutants import MUTANTS, Log2Lse, TrustsItsBuffer
from tests.selection.fakes import DEEPSEEK, SMALL, Fake, context, decode, prefill
from tests.selection.faults import FAULTS, Fault, LetsNanThrough

KINDS = {
    "prefill": prefill(SMALL),
    "prefill for merging": prefill(SMALL, lse=True),
    "context": context(SMALL),
    "decode": decode(),
    "decode two tokens": decode(q_len=2),
}
UNSEEN = {
    # Where a mutant is right after all: no rows without keys in prefill, one causal token, no pages, no packed values.
    "top-left-causal": ("context", "decode"),
    "nan-from-unread-slot": ("prefill", "prefill for merging", "context"),
    "not-empty": ("prefill", "prefill for merging"),
}


SAYS = {
    # What the reason must be about, so that a mutant is not caught for another one's fault.
    "wrong-scale": r"output off by .*\(on a ragged batch\)",
    "log2-lse": r"LSE off by 44% \(base 2: times ln 2 it is right\)",
    "top-left-causal": r"output off by",
    "untrimmed-column": r"output off by",
    "nan-from-unread-slot": r"lets NaN from slots that must not be read into the output",
    "aliased-write": r"wrote into its input \(q",
    "stale-plan": r"with other lengths on the same plan",
    "shared-plan": r"while a second plan is live",
    "base-pointer": r"output off by",
    "not-empty": r"output holds NaN",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_of_the_backends_suite_is_caught(mutant: type[Backend], kind: str, cpu: torch.device) -> None:
    failure = check(mutant(cpu), KINDS[kind], seed=0).failure
    if kind in UNSEEN.get(mutant.name, ()):
        assert failure is None
    else:
        assert re.search(SAYS[mutant.name], failure or "")


@pytest.mark.parametrize("name", ["wrong-scale", "log2-lse", "stale-plan", "shared-plan"])
def test_padding_hides_no_mutant(name: str, cpu: torch.device) -> None:
    (mutant,) = (mutant for mutant in MUTANTS if mutant.name == name)
    for shape, padding in ((prefill(SMALL, lse=True), Padding(32, 32, 3)), (decode(), Padding(40, 32, 4))):
        assert check(Padded(Fake(), padding), shape, seed=0).failure is None
        assert check(Padded(mutant(cpu), padding), shape, seed=0).failure is not None


def test_a_padded_form_that_trusts_its_buffer_is_caught() -> None:
    assert check(TrustsItsBuffer(Fake(), Padding(32, 32, 3)), prefill(SMALL), seed=0).failure is not None


@pytest.mark.parametrize(
    ("fault", "shape"),
    [
        pytest.param(fault, shape, id=f"{fault.__name__}-{kind}")
        for fault in FAULTS
        for kind, shape in KINDS.items()
        if not (fault.empty_rows and shape.phase is Phase.PREFILL)
    ],
)
def test_every_other_fault_is_caught_and_the_reason_fits(fault: type[Fault], shape: AttentionShape) -> None:
    assert check(Fake(), shape, seed=0).failure is None
    assert fault.says in (check(fault(), shape, seed=0).failure or "")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_torch_kernels_pass_natively_and_padded(kind: str, dtype: str, cpu: torch.device) -> None:
    shape = replace(KINDS[kind], dtype=dtype, batch=2)  # type: ignore[arg-type]
    passed = set()
    for candidate in candidates(shape, load_backends(cpu)):
        if candidate.verdict is None:
            result = check(candidate.backend, shape, seed=1)
            assert (candidate.label, result.failure) == (candidate.label, None)
            assert not result.leaks_nan
            assert (result.error or 0.0) <= tolerance(shape)
            assert result.lse_error is not None
            passed.add(candidate.label)
    assert passed == ({"torch-mla"} if shape.absorbed else {"torch-math", "torch-math+pad", "torch-flash+pad"})


@pytest.mark.parametrize(
    "shape",
    [
        decode(q_len=3, kv_len=64),
        decode(page_size=1),
        decode(page_size=64, kv_len=8),
        decode(cache_dtype="float8_e4m3fn"),
        decode(graph=True),
        decode(batch=64, ragged=True),
        prefill(DEEPSEEK, q_len=1),
        prefill(DEEPSEEK, batch=8, q_len=1),
        context(DEEPSEEK, q_len=1, kv_len=1),
        context(DEEPSEEK, q_len=64, kv_len=4096),
    ],
    ids=str,
)
def test_kernels_that_are_right_pass_at_the_corners(shape: AttentionShape, cpu: torch.device) -> None:
    found = [c for c in candidates(shape, load_backends(cpu)) if c.verdict is None]
    assert found
    for candidate in found:
        assert check(candidate.backend, shape, seed=2).failure is None


@pytest.mark.parametrize(("q_len", "kv_len"), [(128, 400), (3, 7), (1, 400)])
def test_k12_every_candidate_is_causal_from_the_bottom_right(q_len: int, kv_len: int, cpu: torch.device) -> None:
    shape = replace(prefill(SMALL, lse=True), q_len=q_len, kv_len=kv_len)
    call = make_call(shape, [q_len], [kv_len], cpu, seed=12)
    expected, expected_lse = call.expected()
    found = [c.backend for c in candidates(shape, load_backends(cpu)) if c.verdict is None]
    assert len(found) == 3
    for backend in found:
        assert check(backend, shape, seed=12).failure is None
        plan = backend.plan(backend.prepare(shape, Limits(1, q_len, kv_len)), call.batch, scale=call.scale)
        out, lse = call.run(backend, plan, need_lse=True)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-4)


def test_a_dropped_cache_scale_is_caught(cpu: torch.device) -> None:
    class Unscaled(Fake):
        def run_decode(self, *args, cache_scale=1.0, **kwargs):  # type: ignore[no-untyped-def]
            return super().run_decode(*args, **kwargs)

    fp8 = Unscaled(takes_cache_scale=True)
    assert "output off by" in (check(fp8, decode(cache_dtype="float8_e4m3fn"), seed=0).failure or "")
    assert check(fp8, decode(), seed=0).failure is None


def test_k03_a_wrong_base_is_told_by_its_figure() -> None:
    result = check(Log2Lse(torch.device("cpu")), context(DEEPSEEK), seed=0)
    assert result.failure == "LSE off by 44% (base 2: times ln 2 it is right) (on a ragged batch)"
    assert (result.lse_error or 0.0) > 1.0
    assert result.error == 0.0, "the output itself is right"


def test_k03_a_wrong_base_is_caught_where_the_shape_needs_no_lse() -> None:
    assert "LSE off by 44%" in (check(Log2Lse(torch.device("cpu")), prefill(SMALL), seed=0).failure or "")


def test_nan_in_unread_slots_is_recorded_and_forgiven_over_a_clean_pool() -> None:
    strict, forgiving = (check(LetsNanThrough(), decode(), seed=0, clean_pool=clean) for clean in (False, True))
    assert strict.leaks_nan
    assert strict.failure == "lets NaN from slots that must not be read into the output"
    assert forgiving.leaks_nan
    assert forgiving.failure is None
    assert forgiving.error == 0.0, "the figure of the run without NaN"


def test_what_a_kernel_raises_on_its_second_plan_disqualifies_it() -> None:
    class OnceOnly(Fake):
        def run_prefill(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            if self.calls["run"] > 1:
                raise RuntimeError("plan already used\nand a long trace")
            return super().run_prefill(*args, **kwargs)

    assert check(OnceOnly(), prefill(SMALL), seed=0).failure == (
        "raised RuntimeError: plan already used with other lengths on the same plan"
    )


def test_inputs_are_fresh_and_everything_else_is_a_trap(cpu: torch.device) -> None:
    shape = decode(kv_len=20)
    call = make_call(shape, [1, 1], [20, 7], cpu, seed=3)
    again, other = make_call(shape, [1, 1], [20, 7], cpu, seed=3), make_call(shape, [1, 1], [20, 7], cpu, seed=4)
    assert torch.equal(call.tensors[0], again.tensors[0])
    assert not torch.equal(call.tensors[0], other.tensors[0])
    cache, table = call.tensors[2], call.batch.block_table
    assert table is not None
    read = {int(page) for page in table[0, :2]} | {int(table[1, 0])}
    assert len(read) == 3
    for page in range(cache.shape[0]):
        trapped = cache[page].abs().eq(GARBAGE).all(-1)
        if page not in read:
            assert trapped.all()
    assert cache[int(table[0, 1])].abs().eq(GARBAGE).all(-1).tolist() == [False] * 4 + [True] * 12
    packed = make_call(prefill(SMALL), [5], [5], cpu, seed=3)
    _, k, v = packed.tensors
    assert v.stride(1) == SMALL.nope + SMALL.v
    assert not v.is_contiguous()
    assert k.abs().max() < 100
    assert torch.as_strided(v, (5, 3, SMALL.nope), v.stride(), 0).abs().eq(GARBAGE).all()


def _planned(shape: AttentionShape, fake: Fake) -> tuple[Call, object]:
    lens = full_size(shape)
    call = make_call(shape, *lens, torch.device("cpu"), seed=5)
    return call, fake.plan(fake.prepare(shape, limits_of(lens)), call.batch, scale=call.scale)


@pytest.mark.parametrize(
    "shape",
    [prefill(SMALL, batch=2, q_len=64, lse=True), context(SMALL), decode(batch=8, kv_len=64, ragged=True), decode(q_len=2)],
)
def test_at_full_size_a_sample_of_rows_is_checked(shape: AttentionShape) -> None:
    good = Fake()
    call, plan = _planned(shape, good)
    result = spot_check(good, call, plan, seed=1)  # type: ignore[arg-type]
    assert result.failure is None
    assert result.error is not None

    class LateFault(Fake):
        def _spoil(self, result):  # type: ignore[no-untyped-def]
            result[0][-1] *= 1.1
            return result

        def run_prefill(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            return self._spoil(super().run_prefill(*args, **kwargs))

        def run_decode(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            return self._spoil(super().run_decode(*args, **kwargs))

    assert (spot_check(LateFault(), call, plan, seed=1).failure or "").startswith("at full size: output off by 10")  # type: ignore[arg-type]


def test_full_size_has_the_buckets_tokens() -> None:
    assert full_size(prefill(batch=2, q_len=64)) == ([64, 64], [64, 64])
    q_lens, kv_lens = full_size(decode(batch=8, kv_len=64, ragged=True))
    assert q_lens == [1] * 8
    assert kv_lens[0] == 192
    assert max(kv_lens) * len(kv_lens) > 2 * sum(kv_lens)
    assert limits_of((q_lens, kv_lens)) == Limits(8, 8, sum(kv_lens))


def test_tolerance_is_the_inputs_dtype() -> None:
    assert tolerance(prefill()) == 1e-5
    assert tolerance(replace(prefill(), dtype="bfloat16")) == 1e-2
    assert tolerance(decode(cache_dtype="float8_e4m3fn")) == 1e-2
    assert math.isclose(make_call(prefill(), [1], [1], torch.device("cpu"), seed=0).scale, 2.2 * 192**-0.5)
