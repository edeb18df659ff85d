from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from mla_serve.backends import AttentionError, Backend, Padded, Padding, load_backends, torch_sdpa
from mla_serve.backends.torch_sdpa import TorchCudnn, TorchEfficient, TorchFlash, TorchMath
from mla_serve.shapes import AttentionShape
from tests.backends.cases import LIMITS, SCALE, make
from tests.backends.contenders import DEEPSEEK, EQUAL, ON_DEVICE
from tests.backends.judging import agree

CPU = torch.device("cpu")
PREFILL = AttentionShape.prefill(DEEPSEEK, batch=2, q_len=16, dtype="float32", lse=True)
SDPA = ("torch-flash", "torch-efficient", "torch-cudnn", "torch-math")


@pytest.mark.parametrize("device", ON_DEVICE)
@pytest.mark.parametrize(("qk", "v"), [(128, 64), (128, 144), (192, 128)])
def test_k11_every_forced_kernel_answers_or_says_why_not(qk: int, v: int, device: torch.device) -> None:
    answered, refusals = set(), []
    for dtype in ("float32", "bfloat16"):
        shape = replace(PREFILL, qk=qk, v=v, dtype=dtype)
        case = make(shape, [17, 17], [17, 17], device)
        for backend in load_backends(device, SDPA):
            reason = backend.available() or backend.supports(shape)
            if reason is not None:
                with pytest.raises(AttentionError, match=f"{backend.name} cannot run prefill attention here: ") as refused:
                    case.answer(backend)
                assert reason in str(refused.value)
                continue
            try:
                got = case.answer(backend)
            except AttentionError as error:
                refusals.append(str(error))  # the kernel's own
            else:
                agree("K11", backend, case, got, case.expected())
                answered.add((backend.name, dtype))
    assert all(" cannot run 17 queries on 17 keys here: " in refusal for refusal in refusals)
    assert {("torch-math", "float32"), ("torch-math", "bfloat16")} <= answered


def test_flash_says_which_widths_it_got() -> None:
    assert TorchFlash(CPU).supports(PREFILL) == "needs equal QK and V widths (192, 128)"
    assert TorchFlash(CPU).supports(PREFILL.widened(v=192)) is None


@pytest.mark.parametrize("backend", [TorchEfficient(CPU), TorchCudnn(CPU)], ids=lambda backend: backend.name)
def test_gpu_kernels_are_unavailable_on_a_cpu_with_a_reason(backend: Backend) -> None:
    assert backend.available() == "needs a CUDA device, this is cpu"
    with pytest.raises(AttentionError, match=f"{backend.name} cannot run prefill attention here: needs a CUDA device"):
        backend.prepare(PREFILL, LIMITS)


def test_k11_an_exception_of_the_forced_kernel_becomes_an_attention_error() -> None:
    backend = TorchFlash(CPU)
    case = make(PREFILL, [4], [4], CPU)
    plan = backend.plan(backend.prepare(PREFILL.widened(v=192), LIMITS), case.batch, scale=SCALE)
    with pytest.raises(AttentionError, match=r"torch-flash cannot run 4 queries on 4 keys here: .*same head size"):
        case.run(backend, plan)


@pytest.mark.parametrize("cls", [TorchFlash, TorchMath])
def test_torch_is_never_left_to_choose(cls: type[Backend]) -> None:
    shape = replace(PREFILL, qk=192, v=192)
    case = make(shape, [5, 3], [5, 3], CPU)
    with (
        mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", side_effect=AssertionError),
        mock.patch.object(torch, "_fused_sdp_choice", side_effect=AssertionError),
    ):
        agree("forced", cls(CPU), case, case.answer(cls(CPU)), case.expected())


@pytest.mark.parametrize(
    ("q_lens", "kv_lens", "calls"),
    [([7, 7, 7], [7, 7, 7], 1), ([7, 7, 3, 3], [7, 7, 3, 3], 2), ([7, 3, 7], [7, 3, 7], 3), ([7, 7], [9, 9], 2),
     ([2, 0, 5], [2, 4, 0], 1)],
)  # fmt: skip
def test_equal_neighbours_share_a_call(q_lens: list[int], kv_lens: list[int], calls: int) -> None:
    """A rectangle takes two calls (context and square), a request without queries or keys none."""
    backend, seen = TorchFlash(CPU), []
    shape = replace(PREFILL, v=192)
    case = make(shape, q_lens, kv_lens, CPU)
    kernel = backend._kernel

    def counted(q, k, v, *, causal, **kwargs):
        seen.append((q.shape[2], k.shape[2], causal))
        return kernel(q, k, v, causal=causal, **kwargs)

    with mock.patch.object(backend, "_kernel", counted):
        agree("calls", backend, case, case.answer(backend), case.expected())
    assert len(seen) == calls
    assert all(sq == sk for sq, sk, causal in seen if causal)


def test_equal_lengths_are_passed_without_a_copy() -> None:
    backend = TorchFlash(CPU)
    shape = AttentionShape.prefill(EQUAL, batch=2, q_len=8, dtype="float32", lse=False)
    case = make(shape, [8, 8], [8, 8], CPU)
    plan = backend.plan(backend.prepare(shape, LIMITS), case.batch, scale=SCALE)
    kernel, seen = backend._kernel, []

    def looked_at(q, k, v, **kwargs):
        result = kernel(q, k, v, **kwargs)
        seen.extend([q.data_ptr(), k.data_ptr(), v.data_ptr(), result[0].data_ptr()])
        return result

    with mock.patch.object(backend, "_kernel", looked_at):
        out, _ = case.run(backend, plan, need_lse=False)
    assert seen == [*(t.data_ptr() for t in case.inputs), out.data_ptr()]


def test_rows_beyond_the_last_request_are_empty() -> None:
    backend = TorchMath(CPU)
    case = make(PREFILL, [4, 2], [4, 2], CPU)
    q = torch.cat([case.inputs[0], torch.randn(3, 4, 192)])
    wider = replace(case, inputs=(q, *case.inputs[1:]))
    out, lse = wider.answer(backend, out=wider.blank())
    agree("padding rows", backend, wider, (out, lse), wider.expected())
    assert not out[6:].any()
    assert (lse[6:] == float("-inf")).all()


def test_graphs_and_the_latent_cache_are_refused() -> None:
    assert "captured graph" in str(TorchMath(CPU).supports(replace(PREFILL, graph=True)))
    decode = AttentionShape.decode(DEEPSEEK, batch=1, kv_len=8, dtype="float32", page_size=16)
    assert "un-absorbed" in str(TorchMath(CPU).supports(decode))


@pytest.mark.parametrize("device", ON_DEVICE)
@pytest.mark.parametrize("lengths", [[6, 6], [5, 2, 7]], ids=str)  # cuDNN has no backward pass for one query on one key
@pytest.mark.parametrize("name", SDPA)
def test_gradients_of_the_padded_form_are_those_of_the_native_form(name: str, lengths: list[int], device: torch.device) -> None:
    (backend,) = load_backends(device, [name])
    dtype = "float32" if device.type == "cpu" else "bfloat16"
    shape = replace(PREFILL, dtype=dtype)
    (oracle,) = load_backends(device, ["torch-math"])
    forms = [oracle]
    for form in (backend, Padded(backend, Padding(192, 192, 4)), Padded(backend, Padding(256, 256, 4))):
        if form.available() is None and form.supports(shape) is None:
            forms.append(form)
    case = make(shape, lengths, lengths, device)
    weights = torch.randn_like(case.blank())
    grads = []
    for form in forms:
        inputs = tuple(t.clone().requires_grad_() for t in case.inputs)
        out, _ = replace(case, inputs=inputs).answer(form, need_lse=False)
        (out * weights).sum().backward()
        grads.append([t.grad for t in inputs])
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    for got in grads[1:]:
        for g, want in zip(got, grads[0], strict=True):
            assert (g.float() - want.float()).norm() <= tolerance * want.float().norm()


def test_a_merge_without_a_gradient_is_refused() -> None:
    backend = Padded(TorchFlash(CPU), Padding(192, 192, 4))
    case = make(PREFILL, [3], [7], CPU)
    case.inputs[0].requires_grad_()
    with pytest.raises(AttentionError, match="torch-flash gives its LSE no gradient"):
        case.answer(backend)
    out, lse = case.answer(TorchMath(CPU))
    agree("grad", TorchMath(CPU), case, (out, lse.detach()), tuple(t.detach() for t in case.expected()))


def test_the_calls_of_a_plan_are_made_on_the_host_once() -> None:
    batch = make(PREFILL, [2, 2, 0, 4], [2, 2, 3, 4], CPU).batch
    together, alone = (torch_sdpa._calls(batch, alone=alone) for alone in (False, True))
    assert [(c.q_start, c.k_start, c.requests) for c in together] == [(0, 0, 2), (4, 7, 1)]
    assert [(c.q_start, c.k_start, c.requests) for c in alone] == [(0, 0, 1), (2, 2, 1), (4, 7, 1)]
