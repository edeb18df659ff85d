from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mla_serve.backends.padded import Padding
from mla_serve.backends.registry import load_backends
from mla_serve.selection import paddings
from mla_serve.selection.candidates import Candidate, candidates
from mla_serve.selection.gate import check
from mla_serve.shapes import AttentionShape, MLADims
from tests.selection.fakes import DEEPSEEK, EQUAL, SMALL, Fake, Refuse, context, decode, prefill

POWERS = tuple(2**n for n in range(8))


def heads(count: int) -> AttentionShape:
    return decode(MLADims(heads=count, nope=16, rope=64, v=16, latent=512), batch=2, kv_len=32)


def forms(found: list[Candidate]) -> list[tuple[int, int, int] | None]:
    return [None if c.padding is None else (c.padding.qk, c.padding.v, c.padding.heads) for c in found]


def equal_only(shape: AttentionShape) -> str | None:
    return None if shape.qk == shape.v else "wants equal widths"


def test_widths_equal_ones_first_then_the_next_usual_ones_where_nothing_less_runs() -> None:
    assert forms(candidates(prefill(), [Fake()])) == [None, (192, 192, 4)]
    assert forms(candidates(prefill(), [Fake(refuse=equal_only)])) == [None, (192, 192, 4)]
    narrow = MLADims(heads=4, nope=64, rope=32, v=64, latent=256)
    usual: Refuse = lambda shape: None if shape.qk == shape.v != 96 else "usual widths only"  # noqa: E731
    assert forms(candidates(prefill(narrow), [Fake(refuse=usual)])) == [None, (128, 128, 4), (192, 192, 4)]


def test_usual_widths_are_listed_only_where_they_are_supported() -> None:
    only_192: Refuse = lambda shape: None if (shape.qk, shape.v) == (192, 192) else "192/192 only"  # noqa: E731
    found = candidates(prefill(), [Fake(refuse=only_192)])
    assert [(c.label, c.verdict) for c in found] == [("fake", "unsupported"), ("fake+pad", None)]
    assert found[0].reason == "192/192 only"


def test_equal_widths_that_a_kernel_takes_need_no_padding() -> None:
    assert forms(candidates(prefill(EQUAL), [Fake()])) == [None]
    picky: Refuse = lambda shape: "no 128" if shape.qk == 128 else None  # noqa: E731
    assert forms(candidates(prefill(EQUAL), [Fake(refuse=picky)])) == [None, (192, 192, 4), (256, 256, 4)]


def test_a_refusal_that_padding_cannot_mend_is_told_once() -> None:
    found = candidates(prefill(), [Fake(refuse=lambda _: "takes the absorbed form only")])
    assert [(c.padding, c.reason) for c in found] == [(None, "takes the absorbed form only")]


def test_what_is_not_installed_is_asked_nothing_else() -> None:
    fake = Fake(missing="flashinfer is not installed")
    (only,) = candidates(prefill(), [fake])
    assert (only.verdict, only.reason) == ("unavailable", "flashinfer is not installed")
    assert fake.calls["supports"] == 0


@pytest.mark.parametrize(
    ("shape", "flags", "reason"),
    [
        (prefill(lse=True), {"gives_lse": False}, "gives no LSE"),
        (context(), {"gives_lse": False}, "gives no LSE"),
        (replace(prefill(), graph=True), {}, "captured"),
        (replace(prefill(), batch_invariant=True), {}, "batch mates"),
        (decode(page_size=48), {"page_sizes": (64, 32)}, "picky takes pages of 32 or 64 tokens, not 48"),
        (decode(), {"head_counts": (128,)}, "picky takes 128 query heads, not 3; the next count, 128, is 42.7x as many"),
        (decode(cache_dtype="float8_e4m3fn"), {}, "no scale for a float8 cache"),
    ],
)  # fmt: skip
def test_flags_filter_with_a_reason_that_names_the_kernel(shape: AttentionShape, flags: dict[str, object], reason: str) -> None:
    found = candidates(shape, [Fake("picky", **flags)])
    assert found[0].verdict == "unsupported"
    assert reason in (found[0].reason or "")
    assert "picky" in (found[0].reason or "")
    allowed = {"gives_lse": True, "capturable": True, "batch_invariant": True, "takes_cache_scale": True}
    assert candidates(shape, [Fake("easy", **allowed)])[0].verdict is None


def test_kernels_that_plan_from_host_lengths_are_out_where_there_are_none() -> None:
    fake = Fake(needs_host_lens=True)
    assert candidates(decode(), [fake])[0].verdict is None
    (refused,) = candidates(decode(), [fake], host_lens=False)
    assert "host lengths" in (refused.reason or "")


def test_a_padded_form_that_gives_no_lse_is_out_too() -> None:
    assert [c.verdict for c in candidates(context(), [Fake(gives_lse=False, refuse=equal_only)])] == ["unsupported"]


@pytest.mark.parametrize(
    ("count", "of_64", "of_powers"),
    [
        (1, [], [2, 4]), (2, [], [4, 8]), (4, [], [8, 16]), (5, [], [8, 16]), (8, [], [16, 32]), (12, [], [16, 32]),
        (16, [64], [32, 64]), (20, [64], [32, 64]), (22, [64], [32, 64]), (32, [64, 128], [64, 128]),
        (40, [64, 128], [64, 128]), (64, [128], [128]), (128, [], []),
    ],
)  # fmt: skip
def test_k05_next_legal_head_counts_up_to_four_times(count: int, of_64: list[int], of_powers: list[int]) -> None:
    picky = candidates(heads(count), [Fake(head_counts=(64, 128))])
    powers = candidates(heads(count), [Fake(head_counts=POWERS)])
    assert [c.padding.heads for c in picky if c.padding] == of_64
    assert [c.padding.heads for c in powers if c.padding] == of_powers
    assert all(c.verdict is None for c in [*picky, *powers] if c.padding)
    assert (picky[0].verdict is None) == (count in (64, 128))
    assert (powers[0].verdict is None) == (count in POWERS)


@pytest.mark.parametrize("count", [1, 5, 16, 20, 40, 64])
def test_k05_output_and_lse_of_padded_heads_pass_the_gate(count: int) -> None:
    for counts in ((64, 128), POWERS):
        for candidate in candidates(heads(count), [Fake(head_counts=counts)]):
            if candidate.verdict is None:
                assert check(candidate.backend, heads(count), seed=count).failure is None


@pytest.mark.parametrize("page_size", [16, 48, 64, 128, 528])
def test_k14_each_page_size_is_right_or_refused_by_name(page_size: int) -> None:
    power: Refuse = lambda s: None if (s.page_size or 0).bit_count() == 1 else f"powers takes no page of {s.page_size}"  # noqa: E731
    takers = {"pair": Fake("pair", page_sizes=(32, 64)), "any": Fake("any"), "powers": Fake("powers", refuse=power)}
    shape = decode(SMALL, page_size=page_size)
    for candidate in candidates(shape, list(takers.values())):
        if candidate.verdict is None:
            assert check(candidate.backend, shape, seed=page_size).failure is None
        else:
            assert candidate.native.name in (candidate.reason or "")
    taken = {c.label for c in candidates(shape, list(takers.values())) if c.verdict is None}
    assert taken == {"any"} | ({"pair"} if page_size == 64 else set()) | ({"powers"} if page_size.bit_count() == 1 else set())


def test_forced_padding_pads_whatever_it_takes() -> None:
    odd = MLADims(heads=5, nope=32, rope=16, v=32, latent=64)
    assert paddings.forced(prefill(odd), None) == Padding(64, 64, 5)
    assert paddings.forced(prefill(), None) == Padding(192, 192, 4)
    assert paddings.forced(prefill(EQUAL), None) == Padding(192, 192, 4)
    assert paddings.forced(decode(odd), None) == Padding(80, 64, 8)
    assert paddings.forced(decode(MLADims(heads=8, nope=1, rope=1, v=1, latent=64)), None).heads == 16
    assert paddings.forced(decode(odd), (64, 128)).heads == 64
    assert paddings.describe(decode(odd), Padding(80, 64, 64)) == "5 heads to 64, 12.8x"
    assert paddings.describe(prefill(), Padding(192, 192, 4)) == "widths 192/128 to 192/192, 1.2x"


def test_k11_torch_kernels_are_forced_and_refuse_with_a_reason(cpu: torch.device) -> None:
    backends = load_backends(cpu)
    for qk, v in ((128, 64), (128, 144), (192, 128)):
        shape = replace(prefill(DEEPSEEK), qk=qk, v=v)
        found = {c.label: c for c in candidates(shape, backends)}
        assert found["torch-flash"].verdict == "unsupported"
        assert "equal" in (found["torch-flash"].reason or "")
        assert found["torch-math"].verdict is None
        for candidate in found.values():
            if candidate.verdict is None:
                assert check(candidate.backend, shape, seed=1).failure is None
