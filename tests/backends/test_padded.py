from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mla_serve.backends import AttentionError, Limits, Padded, Padding, Reference, load_backends
from mla_serve.shapes import AttentionShape, MLADims, Phase
from tests.backends.cases import SCALE, make
from tests.backends.contenders import DEEPSEEK, ON_DEVICE
from tests.backends.fakes import FixedHeads
from tests.backends.judging import agree

CPU = torch.device("cpu")
PREFILL = AttentionShape.prefill(DEEPSEEK, batch=2, q_len=16, dtype="float32", lse=True)
DECODE = AttentionShape.decode(DEEPSEEK, batch=2, kv_len=64, dtype="float32", page_size=16, lse=True)


@pytest.mark.parametrize("device", ON_DEVICE)
@pytest.mark.parametrize("heads", [1, 2, 4, 5, 8, 12, 16, 20, 22, 32, 40, 64, 128])
def test_k05_any_head_count_fits_a_kernel_that_takes_few(heads: int, device: torch.device) -> None:
    shape = replace(DECODE, heads=heads)
    case = make(shape, [1, 1, 1], [5, 33, 0], device)
    for legal in ((64, 128), tuple(2**i for i in range(8))):
        backend = FixedHeads(device, legal)
        to = min(n for n in legal if n >= heads)
        padded = Padded(backend, Padding.of(shape, heads=to))
        out, lse = case.answer(padded, out=case.blank())
        assert out.shape == (3, heads, 512)
        assert lse.shape == (3, heads)
        agree("K05", padded, case, (out, lse), case.expected())
        assert (to == heads) == (backend.supports(shape) is None)


def test_a_head_count_that_the_kernel_does_not_take_is_refused() -> None:
    padded = Padded(FixedHeads(CPU, (64, 128)), Padding.of(DECODE, heads=32))
    assert padded.supports(DECODE) == "heads-64-128 takes 64, 128 heads, not 32"


def test_only_the_right_sizes_are_padded() -> None:
    inner = Reference(CPU)
    assert "padded in prefill and context only" in str(Padded(inner, Padding(640, 512, 4)).supports(DECODE))
    assert "padded in decode only" in str(Padded(inner, Padding(192, 192, 8)).supports(PREFILL))
    assert "cannot pad 192/128 and 4 heads down to 128/128 and 4" in str(Padded(inner, Padding(128, 128, 4)).supports(PREFILL))
    with pytest.raises(AttentionError, match=r"reference\+pad cannot run prefill attention here: cannot pad"):
        Padded(inner, Padding(128, 128, 4)).prepare(PREFILL, Limits(1, 8, 8))


@pytest.mark.parametrize(("qk", "v", "to"), [(192, 128, 256), (96, 64, 128), (256, 256, 320), (40, 24, 64)])
def test_k06_the_scale_is_the_models_whatever_the_widths_become(qk: int, v: int, to: int) -> None:
    """DeepSeek's 192 in 256 columns, MiniCPM3's 96 in 128: a scale from the padded width would be off by 13 % or more."""
    shape = replace(PREFILL, qk=qk, v=v)
    case = make(shape, [9, 4], [9, 4], CPU)
    for backend in load_backends(CPU, ["torch-flash", "torch-math"]):
        padded = Padded(backend, Padding(to, to, 4))
        agree("K06", padded, case, case.answer(padded, scale=qk**-0.5), case.expected(qk**-0.5))


def test_k06_glm_decodes_with_the_scale_of_its_unabsorbed_width() -> None:
    dims = MLADims(heads=4, nope=192, rope=64, v=256, latent=512)
    shape = AttentionShape.decode(dims, batch=2, kv_len=32, dtype="float32", page_size=16, lse=True)
    assert (shape.qk, shape.v, dims.qk**-0.5) == (576, 512, 0.0625)
    case = make(shape, [1, 1], [30, 9], CPU)
    (backend,) = load_backends(CPU, ["torch-mla"])
    for form in (backend, Padded(backend, Padding.of(shape, heads=8))):
        agree("K06", form, case, case.answer(form, scale=0.0625), case.expected(0.0625))


@pytest.mark.parametrize(("shape", "padding", "sizes"), [
    (PREFILL, Padding(192, 192, 4), {"v": (64, 4, 192)}),
    (PREFILL, Padding(256, 256, 4), {"q": (32, 4, 256), "k": (64, 4, 256), "v": (64, 4, 256)}),
    (DECODE, Padding(576, 512, 16), {"q_nope": (4, 16, 512), "q_pe": (4, 16, 64)}),  # 4 requests of 1 token
    (PREFILL, Padding(192, 128, 4), {}),
])  # fmt: skip
def test_only_what_grows_has_a_buffer_of_the_limits_size(shape: AttentionShape, padding: Padding, sizes: dict) -> None:
    state = Padded(Reference(CPU), padding).prepare(shape, Limits(4, 32, 64))
    assert {name: tuple(buffer.shape) for name, buffer in state.buffers.items()} == sizes


def test_a_batch_over_the_limits_is_refused_not_grown_into() -> None:
    padded = Padded(Reference(CPU), Padding(192, 192, 4))
    state = padded.prepare(PREFILL, Limits(4, 8, 8))
    case = make(PREFILL, [9], [9], CPU)
    with pytest.raises(AttentionError, match=r"reference\+pad was prepared for 8 rows of v and got 9"):
        case.run(padded, padded.plan(state, case.batch, scale=SCALE))


def test_with_gradients_padding_is_out_of_place() -> None:
    padded = Padded(Reference(CPU), Padding(192, 192, 4))
    case = make(PREFILL, [5], [5], CPU)
    state = padded.prepare(PREFILL, Limits(4, 8, 8))
    state.buffers["v"].fill_(3.0)
    q, k, v = (t.requires_grad_() for t in case.inputs)
    out, _ = padded.run_prefill(q, k, v, padded.plan(state, case.batch, scale=SCALE), need_lse=False)
    assert (state.buffers["v"] == 3.0).all()
    out.sum().backward()
    assert all(t.grad is not None for t in (q, k, v))
    with torch.no_grad():
        again, _ = padded.run_prefill(q, k, v, padded.plan(state, case.batch, scale=SCALE), need_lse=False)
    assert torch.equal(again, out)
    assert not (state.buffers["v"][:5] == 3.0).any()


def test_nothing_to_pad_costs_nothing() -> None:
    padded = Padded(Reference(CPU), Padding.of(PREFILL))
    case = make(PREFILL, [5], [5], CPU)
    state = padded.prepare(PREFILL, Limits(4, 8, 8))
    out = case.blank()
    got, _ = case.run(padded, padded.plan(state, case.batch, scale=SCALE), out=out)
    assert got.data_ptr() == out.data_ptr()
    assert padded._pad(state, "q", case.inputs[0]) is case.inputs[0]


def test_name_and_flags_follow_the_inner_backend() -> None:
    (mla,) = load_backends(CPU, ["torch-mla"])
    padded = Padded(mla, Padding(576, 512, 16))
    assert (padded.name, padded.library, padded.capturable, padded.gives_lse) == ("torch-mla+pad", "torch", True, True)
    assert padded.kind(DECODE) is mla.kind(DECODE)
    assert padded.padded(DECODE).heads == 16
    assert Padding(576, 512, 16).to_json() == {"qk": 576, "v": 512, "heads": 16}


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.CONTEXT])
@pytest.mark.parametrize("device", ON_DEVICE)
@pytest.mark.parametrize(("qk", "v"), [(96, 64), (72, 48)])
def test_k10_narrow_widths(qk: int, v: int, phase: Phase, device: torch.device) -> None:
    shape = replace(PREFILL, phase=phase, causal=phase is Phase.PREFILL, qk=qk, v=v, dtype="bfloat16", rope=16)
    case = make(shape, [33, 2], [33, 2], device)
    right = []
    for backend in load_backends(device):
        for form in (backend, Padded(backend, Padding(qk, qk, 4)), Padded(backend, Padding(128, 128, 4))):
            if form.available() is not None or form.supports(shape) is not None:
                continue
            try:
                got = case.answer(form)
            except AttentionError:
                continue
            agree("K10", form, case, got, case.expected())
            right.append(form.name)
    assert {"torch-math", "torch-math+pad", "torch-flash+pad"} <= set(right)


@pytest.mark.parametrize(("name", "shape"), [("torch-flash", PREFILL), ("torch-mla", DECODE)])
def test_a_state_prepared_in_inference_mode_serves_outside_it(name: str, shape: AttentionShape) -> None:
    (backend,) = load_backends(CPU, [name])
    padded = Padded(backend, Padding.of(shape, heads=8) if shape.absorbed else Padding.of(shape, v=192))
    with torch.inference_mode():
        state = padded.prepare(shape, Limits(4, 64, 64))
    case = make(shape, [1, 1], [1, 1], CPU)
    agree("inference mode", padded, case, case.run(padded, padded.plan(state, case.batch, scale=SCALE)), case.expected())
