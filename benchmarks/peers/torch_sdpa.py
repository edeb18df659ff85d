"""torch's scaled_dot_product_attention, one backend at a time, natively and with equal widths. It returns no LSE."""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mla_serve.backends.padded import Padding
from mla_serve.selection.inputs import Call
from mla_serve.shapes import AttentionShape

from . import PeerCall, attempt, trimmed

BACKENDS = {
    "torch-flash": SDPBackend.FLASH_ATTENTION,
    "torch-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "torch-cudnn": SDPBackend.CUDNN_ATTENTION,
    "torch-math": SDPBackend.MATH,
}
MATH_BYTES = 40 << 30  # the scores of the largest call that math is asked for; it keeps several copies of them


def calls(shape: AttentionShape, call: Call) -> Iterator[PeerCall]:
    if shape.absorbed:
        return
    lens = set(zip(call.batch.q_lens_host or (), call.batch.kv_lens_host or (), strict=True))
    equal = Padding.of(shape, v=shape.qk)
    for name, backend in BACKENDS.items():
        if shape.lse:
            yield PeerCall(name, why_not="the public API gives no LSE")
        elif len(lens) != 1:
            yield PeerCall(name, why_not="takes requests of equal lengths")
        elif call.tensors[0].device.type != "cuda" and name in ("torch-efficient", "torch-cudnn"):
            yield PeerCall(name, why_not="needs a CUDA device")
        elif name == "torch-math" and 12 * shape.batch * shape.heads * shape.q_len * shape.kv_len > MATH_BYTES:
            yield PeerCall(name, why_not="its scores would take over 40 GiB")
        elif name == "torch-flash" and shape.qk != shape.v:
            yield PeerCall(name, why_not=f"needs equal QK and V widths, not {shape.qk}/{shape.v}")
            yield attempt(name, lambda n=name, b=backend: _call(n, b, shape, call, equal), equal)  # type: ignore[misc]
        else:
            yield attempt(name, lambda n=name, b=backend: _call(n, b, shape, call, None))  # type: ignore[misc]
            if name == "torch-cudnn" and shape.qk != shape.v:
                yield attempt(name, lambda n=name, b=backend: _call(n, b, shape, call, equal), equal)  # type: ignore[misc]


def _call(name: str, backend: SDPBackend, shape: AttentionShape, call: Call, padding: Padding | None) -> PeerCall:
    q, k, v = (rows.view(shape.batch, -1, *rows.shape[1:]).transpose(1, 2) for rows in call.tensors)

    def run() -> Tensor:
        values = v if padding is None else F.pad(v, (0, padding.v - shape.v))
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, values, scale=call.scale, is_causal=shape.causal)
        return trimmed(out.transpose(1, 2).flatten(0, 1), shape.v).contiguous()

    return PeerCall(name, run, lambda out: (out, None), padding=padding)
