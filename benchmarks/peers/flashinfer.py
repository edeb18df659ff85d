"""FlashInfer, fa2 and fa3: BatchMLAPagedAttentionWrapper for decode, BatchPrefillWithRaggedKVCacheWrapper for the rest."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mla_serve.backends.base import torch_dtype
from mla_serve.selection.inputs import Call
from mla_serve.shapes import AttentionShape

from . import PeerCall, attempt

WORKSPACE = 128 << 20  # bytes, what FlashInfer's documentation recommends; one for each wrapper, since several are live
WIDTHS = ((64, 64), (128, 128), (192, 128), (256, 256))  # of Q/K and V, that FlashInfer is built for


def calls(shape: AttentionShape, call: Call) -> Iterator[PeerCall]:
    make = _decode if shape.absorbed else _ragged
    for backend in ("fa2", "fa3"):
        name = f"flashinfer-{backend}"
        if call.tensors[0].device.type != "cuda":
            yield PeerCall(name, why_not="needs a CUDA device")
        elif not shape.absorbed and (shape.qk, shape.v) not in WIDTHS:
            yield PeerCall(name, why_not=f"has no kernel for widths of {shape.qk}/{shape.v}")
        elif backend == "fa3" and torch.cuda.get_device_capability()[0] != 9:
            yield PeerCall(name, why_not="fa3 needs a Hopper GPU")
        else:
            yield attempt(name, lambda name=name, backend=backend: make(name, backend, shape, call))  # type: ignore[misc]


def _starts(lens: tuple[int, ...]) -> Tensor:
    """Host prefix sums [requests + 1], int32."""
    return torch.tensor([0, *np.cumsum(lens).tolist()], dtype=torch.int32)


def _decode(name: str, backend: str, shape: AttentionShape, call: Call) -> PeerCall:
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    q_nope, q_pe, cache = call.tensors
    device, batch, page = q_nope.device, call.batch, cache.shape[1]
    assert batch.block_table is not None
    assert batch.q_lens_host is not None
    assert batch.kv_lens_host is not None
    table = batch.block_table.cpu().numpy()  # an engine has its own copy on the host
    pages = tuple(math.ceil(length / page) for length in batch.kv_lens_host)

    def buffer(size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32, device=device)

    wrapper = BatchMLAPagedAttentionWrapper(
        torch.zeros(WORKSPACE, dtype=torch.int8, device=device),
        use_cuda_graph=True,
        qo_indptr=buffer(batch.num_requests + 1),
        kv_indptr=buffer(batch.num_requests + 1),
        kv_indices=buffer(max(1, sum(pages))),
        kv_len_arr=buffer(batch.num_requests),
        backend=backend,
    )

    def plan() -> None:
        assert batch.q_lens_host is not None
        used = np.arange(table.shape[1])[None, :] < np.asarray(pages)[:, None]
        wrapper.plan(
            _starts(batch.q_lens_host),  # from the host, so that nothing is copied back
            _starts(pages),
            torch.from_numpy(table[used]),
            torch.tensor(batch.kv_lens_host, dtype=torch.int32),
            shape.heads,
            shape.v,
            shape.rope,
            page,
            shape.q_len > 1,
            call.scale,
            q_nope.dtype,
            cache.dtype,
        )

    latent, rope = cache[..., : shape.v], cache[..., shape.v :]
    out = torch.empty_like(q_nope)
    lse = torch.empty(q_nope.shape[:2], dtype=torch.float32, device=device) if shape.lse else None

    def run() -> Any:
        return wrapper.run(
            q_nope, q_pe, latent, rope, out=out, lse=lse, return_lse=shape.lse, return_lse_base_on_e=shape.lse
        )  # fmt: skip

    plan()
    return PeerCall(name, run, lambda raw: raw if shape.lse else (raw, None), plan)


def _ragged(name: str, backend: str, shape: AttentionShape, call: Call) -> PeerCall:
    from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

    q, k, v = call.tensors
    batch, dtype = call.batch, torch_dtype(shape.dtype)
    assert batch.q_lens_host is not None
    assert batch.kv_lens_host is not None
    q_starts, kv_starts = _starts(batch.q_lens_host), _starts(batch.kv_lens_host)
    workspace = torch.zeros(WORKSPACE, dtype=torch.int8, device=q.device)
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend=backend)

    def plan() -> None:
        wrapper.plan(
            q_starts,
            kv_starts,
            shape.heads,
            shape.heads,
            shape.qk,
            head_dim_vo=shape.v,
            causal=shape.causal,
            sm_scale=call.scale,
            q_data_type=dtype,
            kv_data_type=dtype,
        )

    out = torch.empty(q.shape[0], shape.heads, shape.v, dtype=dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if shape.lse else None

    def run() -> Any:
        return wrapper.run(q, k, v, out=out, lse=lse, return_lse=shape.lse)

    def read(raw: Any) -> tuple[Tensor, Tensor | None]:
        return (raw[0], raw[1] * math.log(2.0)) if shape.lse else (raw, None)  # the kernel's LSE is to base 2

    plan()
    return PeerCall(name, run, read, plan)
