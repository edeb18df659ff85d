from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from mla_serve.backends.base import Limits
from mla_serve.backends.padded import Padded, Padding
from mla_serve.backends.registry import load_backends
from mla_serve.selection.candidates import candidates
from mla_serve.selection.gate import check, spot_check, tolerance
from mla_serve.selection.inputs import GARBAGE, Call, full_size, limits_of, make_call
from mla_serve.shapes import AttentionShape, Phase
from tests.selection.fakes import DEEPSEEK, SMALL, Fake, context, decode, prefill
from tests.selection.mutants import MUTANTS, DirtyPadding, LetsNanThrough, Log2Lse, Mutant

KINDS = {
    "prefill": prefill(SMALL),
    "prefill for merging": prefill(SMALL, lse=True),
    "context": context(SMALL),
    "decode": decode(),
}


CASES = [
    pytest.param(mutant, shape, id=f"{mutant.__name__}-{kind}")
    for mutant in MUTANTS
    for kind, shape in KINDS.items()
    if not (mutant.prefill_only and shape.absorbed)
    and not (mutant.causal_only and not shape.causal)
    and not (mutant.empty_rows and shape.phase is Phase.PREFILL)
]


@pytest.mark.parametrize(("mutant", "shape"), CASES)
def test_every_mutant_is_caught_and_the_reason_fits(mutant: type[Mutant], shape: AttentionShape) -> None:
    assert check(Fake(), shape, seed=0).failure is None
    failure = check(mutant(), shape, seed=0).failure
    assert failure is not None
    assert mutant.says in failure


@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.seen_through_padding], ids=lambda mutant: mutant.__name__)
def test_padding_hides_no_mutant(mutant: type[Mutant]) -> None:
    heads = decode()
    for shape, padding in ((prefill(SMALL, lse=True), Padding(32, 32, 3)), (heads, Padding(heads.qk, heads.v, 4))):
        assert check(Padded(mutant(), padding), shape, seed=0).failure is not None


def test_a_padded_buffer_that_is_not_clean_is_caught() -> None:
    assert check(DirtyPadding(Padding(32, 32, 3)), prefill(SMALL), seed=0).failure is not None
    assert check(Padded(Fake(), Padding(32, 32, 3)), prefill(SMALL), seed=0).failure is None


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


def test_a_dropped_cache_scale_is_caught(cpu: torch.device) -> None:
    class Unscaled(Fake):
        def run_decode(self, *args, cache_scale=1.0, **kwargs):  # type: ignore[no-untyped-def]
            return super().run_decode(*args, **kwargs)

    fp8 = Unscaled(takes_cache_scale=True)
    assert "output off by" in (check(fp8, decode(cache_dtype="float8_e4m3fn"), seed=0).failure or "")
    assert check(fp8, decode(), seed=0).failure is None


def test_k03_a_wrong_base_is_told_by_its_figure() -> None:
    result = check(Log2Lse(), context(DEEPSEEK), seed=0)
    assert result.failure == "LSE off by 44% (base 2: times ln 2 it is right) (on a ragged batch)"
    assert (result.lse_error or 0.0) > 1.0
    assert result.error == 0.0, "the output itself is right"


def test_k03_a_wrong_base_is_caught_where_the_shape_needs_no_lse() -> None:
    assert "LSE off by 44%" in (check(Log2Lse(), prefill(SMALL), seed=0).failure or "")


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
            if self.calls["run"]:
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
