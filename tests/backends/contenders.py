"""Every backend with every kind of call that it takes, native and padded: what the contract suite is run on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from mla_serve.backends import Backend, Padded, Padding, Reference, load_backends
from mla_serve.shapes import AttentionShape, MLADims, Phase
from tests.backends.fakes import FixedBatch, PlanBound, WithoutLse
from tests.backends.laws import LAWS


def on_gpu(device: torch.device) -> tuple[pytest.MarkDecorator, ...]:
    """The marks of a test on `device`."""
    return (pytest.mark.gpu,) if device.type == "cuda" else ()


DEVICES = [torch.device(name) for name in ("cpu", "cuda") if name == "cpu" or torch.cuda.is_available()]
DEEPSEEK = MLADims(heads=4, nope=128, rope=64, v=128, latent=512)
SMALL = MLADims(heads=3, nope=32, rope=16, v=32, latent=64)
ON_DEVICE = [pytest.param(device, id=device.type, marks=on_gpu(device)) for device in DEVICES]
EQUAL = MLADims(heads=4, nope=64, rope=64, v=128, latent=512)  # Mistral Small 4's widths, 128 and 128


@dataclass(frozen=True)
class Contender:
    backend: Backend
    shape: AttentionShape

    def __str__(self) -> str:
        s, pad = self.shape, getattr(self.backend, "padding", None)
        to = "" if pad is None else f"-to-{pad.qk}-{pad.v}-{pad.heads}"
        return f"{self.backend.device.type}-{self.backend.name}{to}-{s.phase.value}-{s.qk}-{s.v}-{s.heads}x{s.q_len}-{s.dtype}"


def shapes() -> Iterator[AttentionShape]:
    for dtype in ("float32", "bfloat16"):
        for dims in (DEEPSEEK, EQUAL):
            yield AttentionShape.prefill(dims, batch=3, q_len=16, dtype=dtype, lse=True)
        yield AttentionShape.prefill(DEEPSEEK, batch=3, q_len=16, dtype=dtype, lse=False)  # all that some kernels take
        yield AttentionShape.context(DEEPSEEK, batch=3, q_len=16, kv_len=64, dtype=dtype)
        yield AttentionShape.decode(DEEPSEEK, batch=3, kv_len=64, dtype=dtype, page_size=16, lse=True)
        if torch.cuda.is_available():  # what kernels for GPUs take: their pages, several query tokens
            for q_len in (1, 3):
                yield AttentionShape.decode(DEEPSEEK, batch=3, kv_len=64, dtype=dtype, page_size=64, q_len=q_len, lse=True)
        yield AttentionShape.decode(SMALL, batch=3, kv_len=64, dtype=dtype, page_size=16, q_len=3, lse=True)


def paddings(shape: AttentionShape) -> list[Padding]:
    if shape.absorbed:
        return [Padding.of(shape, heads=16)]
    widths = [(shape.qk, shape.qk), (256, 256)] if shape.qk != shape.v else [(256, 256)]
    return [Padding.of(shape, qk=qk, v=v) for qk, v in widths]


def contenders() -> Iterator[Contender]:
    for device in DEVICES:
        fakes = [PlanBound(device), FixedBatch(device), WithoutLse(device)]
        backends = [*load_backends(device), Reference(device), *fakes]
        for backend in backends:
            if backend.available() is not None:
                continue
            for shape in shapes():
                forms: list[Backend] = [backend, *(Padded(backend, padding) for padding in paddings(shape))]
                if shape.lse is False and backend.gives_lse and shape.phase is Phase.PREFILL:
                    continue  # has met the same shape with an LSE
                yield from (Contender(form, shape) for form in forms if form.supports(shape) is None)


def params(pairs: list[tuple[str, Contender]]) -> list[object]:
    """pytest parameters: a law and who must keep it."""
    return [
        pytest.param(law, contender, id=f"{_case(law)}{law}-{contender}", marks=on_gpu(contender.backend.device))
        for law, contender in pairs
    ]


def _case(law: str) -> str:
    """ "K12-" where a law's first line names a field case, "K08-K14-" for two, so that the test is found by it."""
    found = re.search(r"\((K\d\d(?:, K\d\d)*)\)", LAWS[law].check.__doc__ or "")
    return f"{found.group(1).replace(', ', '-')}-" if found else ""
