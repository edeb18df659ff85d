"""Transformer Engine: `DotProductAttention` in inference, natively and with V zero-padded to the Q/K width.

Equal lengths go as dense batches (`bshd`), others packed (`thd`). `settings` says which class of kernel it picks for itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F

from mla_serve.backends.base import torch_dtype
from mla_serve.backends.padded import Padding
from mla_serve.selection.inputs import Call
from mla_serve.shapes import AttentionShape

from . import PeerCall, attempt, trimmed

NAME = "transformer-engine"


def calls(shape: AttentionShape, call: Call) -> Iterator[PeerCall]:
    if shape.absorbed:
        return
    if call.tensors[0].device.type != "cuda":
        yield PeerCall(NAME, why_not="needs a CUDA device")
    elif shape.lse:
        yield PeerCall(NAME, why_not="returns no LSE")
    else:
        yield attempt(NAME, lambda: _prefill(shape, call, None))
        if shape.qk != shape.v:
            equal = Padding.of(shape, qk=max(shape.qk, shape.v), v=max(shape.qk, shape.v))
            yield attempt(NAME, lambda: _prefill(shape, call, equal), equal)


def _prefill(shape: AttentionShape, call: Call, padding: Padding | None) -> PeerCall:
    from transformer_engine.pytorch import DotProductAttention
    from transformer_engine.pytorch.attention.dot_product_attention.utils import AttentionParams, get_attention_backend

    q, k, v = call.tensors
    batch, width = call.batch, shape.v if padding is None else padding.v
    even = len(set(batch.q_lens_host or ())) == 1 and batch.q_lens_host == batch.kv_lens_host
    layout, mask = ("bshd", "causal" if shape.causal else "no_mask") if even else ("thd", "padding_causal")
    module = DotProductAttention(
        shape.heads, (shape.qk, width), num_gqa_groups=shape.heads, attention_dropout=0.0, qkv_format=layout,
        attn_mask_type=mask, softmax_scale=call.scale,
    ).eval()  # fmt: skip
    flash, *middle, _, _ = get_attention_backend(  # (flash, [its kind], fused, its kind, unfused, available), by version
        AttentionParams(
            qkv_dtype=torch_dtype(shape.dtype), qkv_layout=f"{layout}_{layout}_{layout}", batch_size=batch.num_requests,
            num_heads=shape.heads, num_gqa_groups=shape.heads, max_seqlen_q=batch.max_q, max_seqlen_kv=batch.max_kv,
            num_tokens_q=batch.num_tokens, num_tokens_kv=k.shape[0], head_dim_qk=shape.qk, head_dim_v=width,
            attn_mask_type=mask, is_training=False,
        )
    )  # fmt: skip
    queries, keys = q.clone(), k.clone()  # its layouts are told by storages: an engine allocates these alone

    def run() -> Any:
        values = v.contiguous() if padding is None else F.pad(v, (0, padding.v - shape.v))
        if even:
            n = batch.num_requests
            parts = [rows.view(n, -1, *rows.shape[1:]) for rows in (queries, keys, values)]
            found = module(*parts)
        else:
            found = module(
                queries, keys, values, cu_seqlens_q=batch.query_start_loc, cu_seqlens_kv=batch.kv_start_loc,
                max_seqlen_q=batch.max_q, max_seqlen_kv=batch.max_kv,
            )  # fmt: skip
        return trimmed(found.reshape(q.shape[0], shape.heads, width), shape.v)

    kernel = "flash" if flash else "fused" if middle[-2] else "unfused"
    return PeerCall(
        NAME, run, lambda raw: (raw, None), padding=padding, capturable=False, settings=f"{kernel}, {layout}"
    )  # fmt: skip
