"""The rule of Transformer Engine's pull request 3339, line by line, with a fake that counts its probes."""

from __future__ import annotations

import pytest
import torch

from mla_serve.backends.base import Kind
from mla_serve.backends.registry import load_backends
from mla_serve.selection.selector import Selector
from mla_serve.selection.table import DecisionTable
from mla_serve.shapes import AttentionShape
from tests.selection.fakes import EQUAL, Fake, FakeTransformerEngine, context, decode, prefill

FLASH, FUSED, UNFUSED = Kind.FLASH, Kind.FUSED, Kind.UNFUSED


def by_class(device: torch.device, *backends: Fake, table: DecisionTable | None = None) -> Selector:
    return Selector(device, policy="availability", backends=backends, table=table)


@pytest.mark.parametrize(
    ("native", "padded", "label", "probes"),
    [
        (FUSED, FUSED, "fake-te", 1),
        (FUSED, FLASH, "fake-te", 1),
        (FLASH, FUSED, "fake-te", 1),
        (UNFUSED, FUSED, "fake-te+pad", 2),
        (UNFUSED, FLASH, "fake-te+pad", 2),
        (UNFUSED, UNFUSED, "fake-te", 2),
    ],
)
def test_pad_only_for_a_better_class(cpu: torch.device, native: Kind, padded: Kind, label: str, probes: int) -> None:
    engine = FakeTransformerEngine(native, padded)
    decision = by_class(cpu, engine).decide(prefill())
    assert (decision.label, engine.probes) == (label, probes)
    assert decision.policy == "availability"
    assert [row.verdict for row in decision.candidates if row.label == label] == ["chosen"]


@pytest.mark.parametrize("kind", [FLASH, FUSED, UNFUSED])
def test_equal_widths_take_one_probe(cpu: torch.device, kind: Kind) -> None:
    engine = FakeTransformerEngine(kind)
    assert by_class(cpu, engine).decide(prefill(EQUAL)).label == "fake-te"
    assert engine.probes == 1


def test_a_table_hit_takes_no_probe(cpu: torch.device) -> None:
    engine, table = FakeTransformerEngine(UNFUSED, FLASH), DecisionTable()
    selector = by_class(cpu, engine, table=table)
    first = selector.decide(prefill())
    assert engine.probes == 2
    assert selector.decide(prefill()) == first
    assert selector.decide(prefill(q_len=13)) == first, "13 tokens share the bucket of 16"
    assert engine.probes == 2
    assert selector.decide(prefill(q_len=512)).label == "fake-te+pad"
    assert engine.probes == 4, "a new shape takes two probes"
    other = FakeTransformerEngine(UNFUSED, FLASH)
    assert by_class(cpu, other, table=table).decide(prefill()) == first
    assert other.probes == 0


def test_without_lse_it_is_no_candidate_for_context(cpu: torch.device) -> None:
    engine = FakeTransformerEngine(FUSED)
    decision = by_class(cpu, engine, Fake("other", kinds=lambda _: UNFUSED)).decide(context())
    assert (decision.label, engine.probes) == ("other", 0)


def test_best_class_then_native_then_the_order_of_the_list(cpu: torch.device) -> None:
    slow = Fake("slow", kinds=lambda _: UNFUSED)
    quick = Fake("quick", kinds=lambda s: FLASH if s.qk == s.v else UNFUSED)
    native = Fake("native", kinds=lambda _: FUSED)
    assert by_class(cpu, slow, quick).decide(prefill()).label == "quick+pad"
    assert by_class(cpu, slow, quick, native).decide(prefill()).label == "native"
    assert by_class(cpu, Fake("first"), Fake("second")).decide(prefill()).label == "first"
    assert by_class(cpu, slow, Fake("late", kinds=lambda _: UNFUSED)).decide(prefill()).label == "slow"


def test_a_kernel_that_takes_only_the_padded_shape(cpu: torch.device) -> None:
    refuse = lambda s: None if s.qk == s.v == 256 else "256 only"  # noqa: E731
    decision = by_class(cpu, Fake("wide", refuse=refuse, kinds=lambda _: UNFUSED)).decide(prefill())
    assert decision.label == "wide+pad"
    assert decision.padding is not None
    assert decision.padding.qk == 256


def test_decode_pads_heads_for_a_better_class(cpu: torch.device) -> None:
    picky = Fake("picky", head_counts=(4, 8), kinds=lambda _: FLASH)
    plain = Fake("plain", kinds=lambda _: UNFUSED)
    decision = by_class(cpu, plain, picky).decide(decode())
    assert decision.label == "picky+pad"
    assert decision.padding is not None
    assert decision.padding.heads == 4


@pytest.mark.parametrize(("shape", "label"), [(prefill(), "torch-math"), (decode(), "torch-mla")])
def test_torch_is_the_last_resort(cpu: torch.device, shape: AttentionShape, label: str) -> None:
    decision = by_class(cpu, Fake(refuse=lambda _: "no")).decide(shape)
    assert decision.label == label
    assert decision.chosen is not None
    assert "last resort" in (decision.chosen.reason or "")
    assert any(row.backend == "fake" and row.reason == "no" for row in decision.candidates)


def test_a_cpu_pads_for_flash(cpu: torch.device) -> None:
    selector = Selector(cpu, policy="availability", backends=load_backends(cpu))
    assert selector.decide(prefill()).label == "torch-flash+pad"
    assert selector.decide(context()).label == "torch-flash+pad"
    assert selector.decide(prefill(EQUAL)).label == "torch-flash"
    assert selector.decide(decode()).label == "torch-mla"
