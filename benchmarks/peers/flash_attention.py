"""FlashAttention-3 and -2: vLLM's bundle (`vllm.vllm_flash_attn`) or the stand-alone packages, whichever is there.

FA3 serves prefill natively (Q/K and V widths may differ) and absorbed decode (`qv`); FA2 wants equal widths and has no absorbed
form. num_splits is 0 (FlashAttention's own heuristic) and the scheduler's metadata is made at plan time, as vLLM does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mla_serve.backends.padded import Padding
from mla_serve.selection.inputs import Call
from mla_serve.shapes import AttentionShape

from . import PeerCall, attempt, trimmed


def calls(shape: AttentionShape, call: Call) -> Iterator[PeerCall]:
    if call.tensors[0].device.type != "cuda":
        yield from (PeerCall(name, why_not="needs a CUDA device") for name in ("fa3", "fa2"))
        return
    if shape.absorbed:
        yield attempt("fa3", lambda: _decode(shape, call))
        yield PeerCall("fa2", why_not="has no absorbed form")
        return
    yield attempt("fa3", lambda: _prefill("fa3", 3, shape, call, None))
    if shape.qk == shape.v:
        yield attempt("fa2", lambda: _prefill("fa2", 2, shape, call, None))
        return
    yield PeerCall("fa2", why_not=f"needs equal QK and V widths, not {shape.qk}/{shape.v}")
    equal = Padding.of(shape, v=shape.qk)
    for name, version in (("fa3", 3), ("fa2", 2)):
        yield attempt(name, lambda n=name, v=version: _prefill(n, v, shape, call, equal), equal)  # type: ignore[misc]


def _bundle(version: int) -> Any:
    """vLLM's bundled FlashAttention, for a version that runs here; raises RuntimeError with its own reason."""
    from vllm import vllm_flash_attn

    if not vllm_flash_attn.is_fa_version_supported(version):
        raise RuntimeError(vllm_flash_attn.fa_version_unsupported_reason(version))
    return vllm_flash_attn


def _decode(shape: AttentionShape, call: Call) -> PeerCall:
    bundle = _bundle(3)
    q_nope, q_pe, cache = call.tensors
    batch = call.batch
    rope, latent = cache[..., shape.v :].unsqueeze(2), cache[..., : shape.v].unsqueeze(2)
    kept: list[Tensor] = []

    def plan() -> None:
        fresh = bundle.get_scheduler_metadata(
            batch_size=batch.num_requests,
            max_seqlen_q=batch.max_q,
            max_seqlen_k=batch.max_kv,
            num_heads_q=shape.heads,
            num_heads_kv=1,
            headdim=shape.rope,
            headdim_v=shape.v,
            cache_seqlens=batch.kv_lens,
            qkv_dtype=cache.dtype,
            page_size=cache.shape[1],
            cu_seqlens_q=batch.query_start_loc,
            causal=True,
            num_splits=0,
        )
        if kept:
            kept[0].copy_(fresh)  # in place: a captured graph holds the first one's address
        else:
            kept.append(fresh)

    def run() -> Any:
        return bundle.flash_attn_varlen_func(
            q=q_pe,
            k=rope,
            v=latent,
            q_v=q_nope,
            max_seqlen_q=batch.max_q,
            cu_seqlens_q=batch.query_start_loc,
            max_seqlen_k=batch.max_kv,
            seqused_k=batch.kv_lens,
            block_table=batch.block_table,
            softmax_scale=call.scale,
            causal=True,
            return_softmax_lse=shape.lse,
            fa_version=3,
            scheduler_metadata=kept[0],
            num_splits=0,
        )

    plan()
    return PeerCall("fa3", run, _reader(shape), plan, settings="num_splits 0, scheduler metadata at plan")


def _prefill(name: str, version: int, shape: AttentionShape, call: Call, padding: Padding | None) -> PeerCall:
    bundle = _bundle(version)
    q, k, v = call.tensors
    batch = call.batch

    def run() -> Any:
        values = v if padding is None else F.pad(v, (0, padding.v - shape.v))
        raw = bundle.flash_attn_varlen_func(
            q,
            k,
            values,
            max_seqlen_q=batch.max_q,
            cu_seqlens_q=batch.query_start_loc,
            max_seqlen_k=batch.max_kv,
            cu_seqlens_k=batch.kv_start_loc,
            softmax_scale=call.scale,
            causal=shape.causal,
            return_softmax_lse=shape.lse,
            fa_version=version,
        )
        if padding is None:
            return raw
        return (trimmed(raw[0], shape.v), raw[1]) if shape.lse else trimmed(raw, shape.v)

    return PeerCall(name, run, _reader(shape), padding=padding, settings="num_splits 0" if version == 3 else None)


def _reader(shape: AttentionShape) -> Any:
    """Its LSE is natural, [heads, tokens]."""

    def read(raw: Any) -> tuple[Tensor, Tensor | None]:
        out, lse = raw if shape.lse else (raw, None)
        assert torch.is_tensor(out)
        return out, None if lse is None else lse.transpose(0, 1)

    return read
