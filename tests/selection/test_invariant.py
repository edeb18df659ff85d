"""The batch-invariant policy: one kernel per phase, proven in its invariant mode, whatever the bucket."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from mla_serve.backends.base import AttentionError, BatchLayout, Kind, Limits
from mla_serve.backends.padded import Padding
from mla_serve.backends.torch_mla import TorchMLA
from mla_serve.errors import UserError
from mla_serve.selection import invariant
from mla_serve.selection.decision import CandidateResult
from mla_serve.selection.pins import PinError
from mla_serve.selection.report import decision_sentence
from mla_serve.selection.selector import Selector
from mla_serve.selection.timing import Effort
from mla_serve.shapes import AttentionShape, MLADims, Phase
from tests.backends.cases import make
from tests.selection.fakes import DEEPSEEK, Fake, a_decision, context, decode, prefill, times

PAD = Padding(192, 192, 4)


def selector(cpu: torch.device, *backends: Fake, **other: object) -> Selector:
    return Selector(cpu, policy="batch-invariant", backends=backends, **other)  # type: ignore[arg-type]


def fake(name: str, **other: object) -> Fake:
    return Fake(name, batch_invariant=True, **other)  # type: ignore[arg-type]


def row(name: str, ms: float, padding: Padding | None = None, **other: object) -> CandidateResult:
    return CandidateResult(name, padding, "slower", None, ms, 0.0, 0.01, **other)  # type: ignore[arg-type]


def measured(chooser: Selector, shape: AttentionShape, costs: Mapping[str, float]) -> None:
    rows = tuple(row(name, ms) for name, ms in costs.items())
    winner = min(costs, key=costs.__getitem__)
    chooser.table.put(a_decision(invariant.mode(shape), chooser.fingerprint, winner=winner, rows=rows))


def test_a_kernel_without_the_mode_is_refused_and_says_why(cpu: torch.device) -> None:
    chooser = selector(cpu, Fake("mixer", kinds=lambda _: Kind.FLASH), fake("steady", kinds=lambda _: Kind.UNFUSED))
    decision = chooser.decide(decode())
    assert (decision.label, decision.policy) == ("steady", "batch-invariant")
    assert decision.bucket.shape.batch_invariant
    with pytest.raises(PinError, match="mixer lets batch mates change a request's result"):
        selector(cpu, Fake("mixer"), fake("steady"), pins={"decode": "mixer"}).decide(decode())


def test_the_fastest_over_all_buckets_serves_all_of_them(cpu: torch.device) -> None:
    """Alone `a` wins one bucket by far and `b` two by little; `c`, the best of all, does not take every bucket."""
    chooser = selector(cpu, fake("a"), fake("b"), fake("c"))
    measured(chooser, decode(kv_len=32), {"a": 1.0, "b": 2.0, "c": 0.1})
    measured(chooser, decode(kv_len=64), {"a": 1.1, "b": 1.0})
    measured(chooser, decode(batch=16, kv_len=64), {"a": 1.1, "b": 1.0, "c": 0.1})
    shapes = [decode(batch=batch, kv_len=kv_len) for batch in (1, 2, 16) for kv_len in (16, 64, 4096)]
    assert {chooser.decide(shape).label for shape in shapes} == {"a"}
    here = chooser.decide(decode(kv_len=64))
    assert [r.verdict for r in here.candidates] == ["chosen", "slower"]
    assert "the fastest over 3 measured buckets" in (here.note or "")
    assert decision_sentence(here).endswith(": the one kernel of decode: the fastest over 3 measured buckets.")
    measured(chooser, decode(batch=4, kv_len=64), {"a": 9.0, "b": 1.0})
    assert chooser.decide(decode(kv_len=64)).label == "a", "what was once chosen stays"


def test_native_first_among_equals_and_leaks_where_the_pool_is_not_clean() -> None:
    rows = [[row("a", 1.0, PAD), row("a", 1.0), row("b", 0.5, leaks_nan=True)]]
    assert invariant.fastest(rows, 1, lambda r: not r.leaks_nan) == ("a", None)
    assert invariant.fastest(rows, 1, lambda r: True) == ("b", None)
    assert invariant.fastest([*rows, [row("c", 1.0)]], 1, lambda r: True) is None
    assert invariant.fastest([], 1, lambda r: True) is None


def test_pins_are_frozen_too(cpu: torch.device) -> None:
    chooser = selector(cpu, fake("a"), fake("b"), pins={"prefill": "b", "decode": "b"})
    for shape in (prefill(), prefill(batch=4, q_len=512, lse=True), context(), decode()):
        assert chooser.decide(shape).label == "b"
    assert chooser.decide(prefill()).note == "pinned for all prefill"


def test_prefill_has_one_kernel_with_and_without_cached_context(cpu: torch.device) -> None:
    chooser = selector(cpu, fake("no-lse", gives_lse=False), fake("lse"))
    bound = chooser.bind(DEEPSEEK, dtype="float32", page_size=16, limits=Limits(4, 64, 64))
    first, later = bound.prefill(1, 16, lse=False), bound.prefill(4, 64, lse=True)
    assert first.decision.label == later.decision.label == "lse"
    assert first.state is later.state


def test_the_one_kernel_is_never_swapped(cpu: torch.device) -> None:
    chooser = selector(cpu, fake("short", refuse=lambda s: "up to 1024 keys" if s.kv_len > 1024 else None), fake("long"))
    assert chooser.decide(decode()).label == "short"
    with pytest.raises(AttentionError, match=r"short is the one kernel of decode .* cannot run .*: up to 1024 keys"):
        chooser.decide(decode(kv_len=4096))
    with pytest.raises(AttentionError, match="none takes"):
        selector(cpu, Fake("mixer")).decide(decode())


def test_measuring_under_the_policy_measures_the_mode(cpu: torch.device) -> None:
    chooser = selector(
        cpu, Fake("mixer"), fake("steady"), measure=times({"steady": 1.0, "steady+pad": 2.0}), effort=Effort(1, 1)
    )
    decision = chooser.measure(prefill())
    assert decision.bucket.shape == invariant.mode(prefill(q_len=16))
    assert [(r.label, r.verdict) for r in decision.candidates][:2] == [("mixer", "unsupported"), ("steady", "chosen")]
    assert chooser.decide(prefill(batch=8)).note == "the one kernel of prefill: the fastest over one measured bucket"


def test_the_mode_is_tested_and_not_believed(cpu: torch.device) -> None:
    class Boasts(TorchMLA):
        """The ordinary decode, which pads to the longest, under the flag."""

        name = "boasts"

        def prepare(self, shape, limits):  # type: ignore[no-untyped-def]
            return super().prepare(replace(shape, batch_invariant=False), limits)

    honest = TorchMLA(cpu)
    shape = decode(DEEPSEEK, batch=4, kv_len=300)
    chooser = Selector(cpu, policy="batch-invariant", backends=[Boasts(cpu), honest], effort=Effort(1, 1))
    boasts, other = chooser.measure(shape).candidates[:2]
    assert (boasts.verdict, other.verdict) == ("disqualified", "chosen")
    assert "changed with its batch mates" in (boasts.reason or "")


DIMS = MLADims(heads=4, nope=32, rope=16, v=32, latent=64)


@pytest.mark.parametrize("phase", Phase)
def test_kernels_of_the_bound_selector_give_equal_bits_in_any_company(cpu: torch.device, phase: Phase) -> None:
    """Each request in the bucket that its batch falls into, among all of this host's kernels."""
    bound = Selector(cpu, policy="batch-invariant").bind(DIMS, dtype="float32", page_size=16, limits=Limits(8, 512, 4096))
    q_lens = {Phase.DECODE: [1] * 6}.get(phase, [1, 33, 70, 70, 5, 200])
    kv_lens = q_lens if phase is Phase.PREFILL else [900, 3, 40, 40, 17, 300]
    whole = make(_shape(phase), q_lens, kv_lens, cpu)

    def run(requests: list[int]) -> dict[int, torch.Tensor]:
        q_at, k_at = whole.batch.query_start_loc.tolist(), whole.batch.kv_start_loc.tolist()
        rows = torch.cat([torch.arange(q_at[i], q_at[i + 1]) for i in requests])
        keys = torch.cat([torch.arange(k_at[i], k_at[i + 1]) for i in requests])
        q, kv = [q_lens[i] for i in requests], [kv_lens[i] for i in requests]
        a, b, c = whole.inputs
        if phase is Phase.DECODE:
            assert whole.batch.block_table is not None
            kernel = bound.decode(len(requests), sum(kv), ragged=max(kv) * len(kv) > 2 * sum(kv))
            batch = BatchLayout.make(q, kv, cpu, block_table=whole.batch.block_table[requests], page_size=16)
            out, _ = kernel.run_decode(a[rows], b[rows], c, kernel.plan(batch, scale=0.1), need_lse=False)
        else:
            kernel = (
                bound.prefill(len(requests), sum(q), lse=len(requests) > 1)
                if phase is Phase.PREFILL
                else bound.context(len(requests), sum(q), sum(kv))
            )
            plan = kernel.plan(BatchLayout.make(q, kv, cpu), scale=0.1)
            out, _ = kernel.run_prefill(a[rows], b[keys], c[keys], plan, need_lse=len(requests) > 1)
        at = torch.tensor([0, *q]).cumsum(0).tolist()
        return {request: out[at[i] : at[i + 1]] for i, request in enumerate(requests)}

    alone = {i: run([i])[i] for i in range(6)}
    for company in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4], [2, 3], [4, 0, 5], [1, 0]):
        for request, out in run(company).items():
            assert torch.equal(out, alone[request]), (request, company)
    assert len({kernel.label for kernel in bound.decisions()}) == 1
    assert len(bound.decisions()) > 3


def _shape(phase: Phase) -> AttentionShape:
    if phase is Phase.PREFILL:
        return AttentionShape.prefill(DIMS, batch=6, q_len=64, dtype="float32", lse=True)
    if phase is Phase.CONTEXT:
        return AttentionShape.context(DIMS, batch=6, q_len=64, kv_len=256, dtype="float32")
    return AttentionShape.decode(DIMS, batch=6, kv_len=256, dtype="float32", page_size=16)


def test_an_unknown_policy_names_the_known_ones(cpu: torch.device) -> None:
    with pytest.raises(UserError, match="use measured, availability or batch-invariant"):
        Selector(cpu, policy="luck", backends=[Fake()])  # type: ignore[arg-type]
