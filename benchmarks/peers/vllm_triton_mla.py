"""vLLM's Triton MLA decode, with vLLM's own rule for the number of KV splits; what it falls back to on Ampere and Ada."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from mla_serve.selection.inputs import Call
from mla_serve.shapes import AttentionShape

from . import PeerCall, attempt

NAME = "vllm-triton-mla"
TOKENS_PER_SPLIT = 512
SPLITS_PER_SM = 2


def calls(shape: AttentionShape, call: Call) -> Iterator[PeerCall]:
    if not shape.absorbed:
        return
    if call.tensors[0].device.type != "cuda":
        yield PeerCall(NAME, why_not="needs a CUDA device")
    elif shape.q_len != 1:
        yield PeerCall(NAME, why_not="takes one query token per request")
    else:
        yield attempt(NAME, lambda: _decode(shape, call))


def kv_splits(max_kv: int, sm_count: int) -> int:
    """vLLM's rule: a split per 512 keys of the longest request, rounded up to a power of two, at most two per SM."""
    ideal = 1 << (max(1, max_kv // TOKENS_PER_SPLIT) - 1).bit_length()
    return min(ideal, SPLITS_PER_SM * sm_count)


def _decode(shape: AttentionShape, call: Call) -> PeerCall:
    from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd

    q_nope, q_pe, cache = call.tensors
    batch, device = call.batch, q_nope.device
    splits = kv_splits(batch.max_kv, torch.cuda.get_device_properties(device).multi_processor_count)
    partial = torch.empty(batch.num_requests, shape.heads, splits, shape.v + 1, dtype=torch.float32, device=device)
    one = torch.ones((), dtype=torch.float32, device=device)
    keys = cache.unsqueeze(2)

    def run() -> Any:
        q = torch.cat((q_nope, q_pe), dim=-1)
        out = torch.zeros_like(q_nope)
        lse = torch.zeros(q.shape[:2], dtype=torch.float32 if shape.lse else q.dtype, device=device)
        decode_attention_fwd(
            q, keys, keys[..., : shape.v], out, lse, batch.block_table, batch.kv_lens, partial, splits, call.scale,
            cache.shape[1], k_scale=one, v_scale=one, is_mla=True,
        )  # fmt: skip
        return out, lse

    return PeerCall(NAME, run, lambda raw: (raw[0], raw[1] if shape.lse else None), settings=f"{splits} KV splits")
