"""On a GPU: gradients through padded kernels equal those of the native form, and have its shapes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mla_serve.backends import Backend, BatchLayout, Limits, Padded, Padding, load_backends
from mla_serve.shapes import AttentionShape, MLADims

pytestmark = pytest.mark.gpu

LENGTHS = (192, 192)
SCALE = 0.1147
NAMES = ("transformer-engine", "torch-flash", "torch-efficient", "torch-cudnn", "torch-math")
# A dimension that TE's fused kernels and torch's take natively, and one that they do not.
DIMS = [MLADims(heads=4, nope=128, rope=64, v=128, latent=512), MLADims(heads=4, nope=64, rope=64, v=64, latent=512)]


def leaves(shape: AttentionShape) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(3)
    tokens = sum(LENGTHS)
    sizes = (shape.qk, shape.qk, shape.v)
    drawn = [torch.randn(tokens, shape.heads, width, generator=generator, device="cuda") for width in sizes]
    return [values.bfloat16().requires_grad_() for values in drawn]


def weights(shape: AttentionShape) -> Tensor:
    return torch.randn(sum(LENGTHS), shape.heads, shape.v, generator=torch.Generator("cuda").manual_seed(4), device="cuda")


def by_hand(shape: AttentionShape) -> list[Tensor]:
    """The gradients in float32, by autograd through the definition."""
    q, k, v = (leaf.detach().float().requires_grad_() for leaf in leaves(shape))
    outs, at = [], 0
    for length in LENGTHS:
        rows = slice(at, at + length)
        scores = torch.einsum("qhd,khd->hqk", q[rows], k[rows]) * SCALE
        hidden = torch.ones(length, length, dtype=torch.bool, device="cuda").triu(1)
        outs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v[rows]))
        at += length
    (torch.cat(outs) * weights(shape)).sum().backward()
    return [leaf.grad for leaf in (q, k, v) if leaf.grad is not None]


def through(backend: Backend, shape: AttentionShape) -> list[Tensor]:
    batch = BatchLayout.make(LENGTHS, LENGTHS, torch.device("cuda"))
    state = backend.prepare(shape, Limits(max_requests=2, max_tokens=sum(LENGTHS), max_kv_tokens=sum(LENGTHS)))
    q, k, v = leaves(shape)
    out, _ = backend.run_prefill(q, k, v, backend.plan(state, batch, scale=SCALE), need_lse=False)
    assert out.shape == (sum(LENGTHS), shape.heads, shape.v)
    (out.float() * weights(shape)).sum().backward()
    return [leaf.grad for leaf in (q, k, v) if leaf.grad is not None]


def forms(name: str, shape: AttentionShape) -> list[Backend]:
    (backend,) = load_backends(torch.device("cuda"), [name])
    if backend.available() is not None:
        return []
    padded = Padded(backend, Padding.of(shape, qk=shape.qk, v=shape.qk))
    return [form for form in (backend, padded) if form.supports(shape) is None]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dims", DIMS, ids=lambda dims: f"{dims.qk}-{dims.v}")
def test_gradients_of_native_and_padded_forms(name: str, dims: MLADims) -> None:
    shape = AttentionShape.prefill(dims, batch=2, q_len=LENGTHS[0], dtype="bfloat16", lse=False)
    found = forms(name, shape)
    if name != "transformer-engine":
        assert found, f"{name} takes neither form"
    expected = by_hand(shape)
    assert len(expected) == 3
    sizes = [(sum(LENGTHS), dims.heads, width) for width in (dims.qk, dims.qk, dims.v)]
    for form in found:
        got = through(form, shape)
        assert [tuple(grad.shape) for grad in got] == sizes, form.name
        for part, mine, exact in zip("qkv", got, expected, strict=True):
            error = float((mine.float() - exact).norm() / exact.norm())
            assert error < 1.5e-2, f"d{part} of {form.name} is off by {error:.2%}"
