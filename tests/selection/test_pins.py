from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mla_serve.backends.base import Kind
from mla_serve.backends.padded import Padding
from mla_serve.errors import UserError
from mla_serve.selection.pins import Pin, PinError, by_phase, parse_pins
from mla_serve.selection.selector import Selector
from mla_serve.shapes import AttentionShape, MLADims, Phase
from tests.selection.fakes import EQUAL, SMALL, Fake, a_decision, context, decode, prefill, times


def pinned(device: torch.device, pins: dict[str, str], *backends: Fake) -> Selector:
    return Selector(device, pins=pins, backends=backends or None)


def test_parse() -> None:
    assert parse_pins("prefill=torch-flash+pad,decode=torch-mla") == {"prefill": "torch-flash+pad", "decode": "torch-mla"}
    assert parse_pins(" context = torch-math+native , ") == {"context": "torch-math+native"}
    assert parse_pins("") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("torch-flash", "PHASE=KERNEL"),
        ("prefill=", "PHASE=KERNEL"),
        ("prefill=flash", "no kernel is called 'flash'.*torch-flash, .*torch-mla"),
        ("dream=torch-math", "no phase 'dream'.*prefill, context, decode"),
        ("prefill=torch-math+wide", r"\+pad or \+native"),
        ("prefill=torch-math,prefill=torch-flash", "pinned twice"),
        ("prefill=reference", "no kernel is called 'reference'"),
    ],
)
def test_a_pin_that_cannot_be_read_says_what_can(text: str, message: str) -> None:
    with pytest.raises(PinError, match=message) as caught:
        parse_pins(text)
    assert isinstance(caught.value, UserError)


def test_prefill_stands_for_context_unless_that_has_its_own() -> None:
    assert by_phase({"prefill": "a+pad"}, ["a"]) == {Phase.PREFILL: Pin("a", "pad"), Phase.CONTEXT: Pin("a", "pad")}
    assert by_phase({"context": "b", "prefill": "a"}, ["a", "b"])[Phase.CONTEXT] == Pin("b")
    assert by_phase({"decode": "a+native"}, ["a"]) == {Phase.DECODE: Pin("a", "native")}


def test_a_pin_names_a_kernel_of_this_selector(cpu: torch.device) -> None:
    with pytest.raises(PinError, match="there are fake"):
        pinned(cpu, {"decode": "torch-mla"}, Fake())


@pytest.mark.parametrize(
    ("pin", "shape", "padding"),
    [
        ("torch-flash", prefill(), Padding(192, 192, 4)),
        ("torch-flash+pad", prefill(), Padding(192, 192, 4)),
        ("torch-flash+native", prefill(EQUAL), None),
        ("torch-flash+pad", prefill(EQUAL), Padding(192, 192, 4)),
        ("torch-math", prefill(), None),
        ("torch-math+pad", context(), Padding(192, 192, 4)),
        ("torch-math+native", context(), None),
        ("torch-mla", decode(), None),
        ("torch-mla+pad", decode(), Padding(40, 32, 4)),
        ("torch-mla+pad", decode(replace(SMALL, heads=20)), Padding(40, 32, 32)),
    ],
    ids=str,
)
def test_torch_kernels_in_the_form_that_was_asked_for(
    cpu: torch.device, pin: str, shape: AttentionShape, padding: Padding | None
) -> None:
    phase = "decode" if shape.absorbed else "prefill"
    decision = pinned(cpu, {phase: pin}).decide(shape)
    assert (decision.policy, decision.winner, decision.padding) == ("pinned", pin.partition("+")[0], padding)
    assert decision.chosen is not None
    assert "pinned by" in (decision.chosen.reason or "")


def test_forced_head_padding_names_its_factor(cpu: torch.device) -> None:
    picky = Fake("picky", head_counts=(64, 128))
    decision = pinned(cpu, {"decode": "picky+pad"}, picky).decide(decode())
    assert decision.padding is not None
    assert decision.padding.heads == 64
    assert decision.chosen is not None
    assert decision.chosen.reason == "pinned by decode=picky+pad; 3 heads to 64, 21.3x"


def test_forced_widths_where_no_usual_padding_helps(cpu: torch.device) -> None:
    odd = MLADims(heads=2, nope=32, rope=16, v=32, latent=64)
    picky = Fake("picky", refuse=lambda s: None if s.qk == s.v == 64 else "64 only")
    assert pinned(cpu, {"prefill": "picky+pad"}, picky).decide(prefill(odd)).padding == Padding(64, 64, 2)


@pytest.mark.parametrize(
    ("pin", "shape", "reason"),
    [
        ("prefill=torch-flash+native", prefill(), r"needs equal QK and V widths \(192, 128\)"),
        ("prefill=torch-flash+native", context(), r"needs equal QK and V widths \(192, 128\)"),
        ("decode=torch-flash", decode(), "un-absorbed form only"),
        ("prefill=torch-mla", prefill(), "absorbed form only"),
        ("prefill=torch-cudnn+pad", prefill(), "needs a CUDA device"),
        ("decode=torch-math+pad", decode(), "un-absorbed form only"),
    ],
)
def test_a_pinned_kernel_that_cannot_run_the_shape_is_an_error(
    cpu: torch.device, pin: str, shape: AttentionShape, reason: str
) -> None:
    with pytest.raises(PinError, match=reason) as caught:
        pinned(cpu, parse_pins(pin)).decide(shape)
    assert pin.partition("=")[2] in str(caught.value)


def test_without_a_form_the_class_decides_among_the_pinned_kernels_own(cpu: torch.device) -> None:
    better_padded = Fake("a", kinds=lambda s: Kind.FLASH if s.qk == s.v else Kind.UNFUSED)
    assert pinned(cpu, {"prefill": "a"}, better_padded, Fake("b")).decide(prefill()).label == "a+pad"
    assert pinned(cpu, {"prefill": "b"}, better_padded, Fake("b")).decide(prefill()).label == "b"


def test_without_a_form_the_times_decide_where_there_are_any(cpu: torch.device) -> None:
    clock = times({"a": 2.0, "a+pad": 1.0, "b": 0.5, "b+pad": 0.6})
    measured = Selector(cpu, backends=[Fake("a"), Fake("b")], measure=clock)
    assert measured.measure(prefill()).label == "b"
    chooser = Selector(cpu, backends=[Fake("a"), Fake("b")], pins={"prefill": "a"}, table=measured.table)
    assert chooser.decide(prefill()).label == "a+pad"


def test_a_pin_overrules_the_table_and_stays_out_of_it(cpu: torch.device) -> None:
    chooser = pinned(cpu, {"decode": "b"}, Fake("a"), Fake("b"))
    chooser.table.put(a_decision(decode(), chooser.fingerprint, winner="a"))
    assert chooser.decide(decode()).label == "b"
    assert [decision.winner for decision in chooser.table] == ["a"]
    assert chooser.decide(prefill()).policy == "availability"
