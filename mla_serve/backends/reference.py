"""The oracle: attention written out in float32, one request at a time. Slow, and meant to be read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from mla_serve.backends.base import AttentionError, Backend, BatchLayout, Kind, Plan
from mla_serve.shapes import AttentionShape

__all__ = ["Reference", "reference_decode", "reference_prefill"]


@contextmanager
def _exact_float32() -> Iterator[None]:
    """Matrix products in plain float32: on Ampere and later TF32 would keep 10 bits of the mantissa."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """One request: q [Sq, heads, qk], k [Sk, heads, qk], v [Sk, heads, v] -> out [Sq, heads, v], lse [Sq, heads]."""
    sq, sk = q.shape[0], k.shape[0]
    if sk == 0:
        return q.new_zeros(sq, q.shape[1], v.shape[2]), q.new_full((sq, q.shape[1]), float("-inf"))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if causal:
        last = torch.arange(sq, device=q.device) + (sk - sq)  # bottom-right: query i sees keys up to Sk - Sq + i
        hidden = torch.arange(sk, device=q.device) > last[:, None]
        scores = scores.masked_fill(hidden, float("-inf"))
    lse = scores.logsumexp(-1)
    # A query that sees no key has no softmax; its weights are 0.
    weights = (scores - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1)).exp()
    return torch.einsum("hqk,khd->qhd", weights, v), lse.transpose(0, 1)


def reference_prefill(
    q: Tensor, k: Tensor, v: Tensor, batch: BatchLayout, *, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Un-absorbed attention: q [tokens, heads, qk], k [kv tokens, heads, qk], v [kv tokens, heads, v], any float dtype.

    Returns out [tokens, heads, v] and the natural-log LSE [tokens, heads], both float32. Rows of no request are 0 and -inf.
    """
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], device=q.device)
    lse = torch.full((q.shape[0], q.shape[1]), float("-inf"), device=q.device)
    q_starts, k_starts = batch.query_start_loc.tolist(), batch.kv_start_loc.tolist()
    with _exact_float32():
        for i in range(batch.num_requests):
            rows, keys = slice(q_starts[i], q_starts[i + 1]), slice(k_starts[i], k_starts[i + 1])
            out[rows], lse[rows] = _attend(q[rows].float(), k[keys].float(), v[keys].float(), scale=scale, causal=causal)
    return out, lse


def reference_decode(
    q_nope: Tensor, q_pe: Tensor, cache: Tensor, batch: BatchLayout, *, scale: float, cache_scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Absorbed attention over the paged cache, causal: q_nope [tokens, heads, latent], q_pe [tokens, heads, rope].

    cache [pages, page_size, latent + rope]; stored values times `cache_scale` are the latents. Returns out
    [tokens, heads, latent] and the natural-log LSE [tokens, heads], both float32. Raises AttentionError without a block table.
    """
    if batch.block_table is None:
        raise AttentionError("absorbed attention needs a block table in its BatchLayout")
    latent = q_nope.shape[2]
    q = torch.cat([q_nope.float(), q_pe.float()], dim=-1)
    out = torch.zeros_like(q_nope, dtype=torch.float32)
    lse = torch.full(q_nope.shape[:2], float("-inf"), device=q.device)
    q_starts, kv_lens = batch.query_start_loc.tolist(), batch.kv_lens.tolist()
    with _exact_float32():
        for i, kv_len in enumerate(kv_lens):
            rows = slice(q_starts[i], q_starts[i + 1])
            pages = batch.block_table[i, : -(-kv_len // cache.shape[1])].long()
            latents = cache[pages].flatten(0, 1)[:kv_len].float() * cache_scale  # [kv, latent + rope]
            k = latents.unsqueeze(1).expand(-1, q.shape[1], -1)  # one key head for all query heads
            out[rows], lse[rows] = _attend(q[rows], k, k[..., :latent], scale=scale, causal=True)
    return out, lse


class Reference(Backend):
    """The oracle behind the contract, so that the suite can judge its own laws. Never a candidate: it is there to be right."""

    name = "reference"
    takes_cache_scale = True
    batch_invariant = True

    def kind(self, shape: AttentionShape) -> Kind:
        return Kind.UNFUSED

    def available(self) -> str | None:
        return None

    def supports(self, shape: AttentionShape) -> str | None:
        return None

    def run_prefill(
        self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, need_lse: bool, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        result, lse = reference_prefill(q, k, v, plan.batch, scale=plan.scale, causal=plan.state.shape.causal)
        return result.to(q.dtype) if out is None else out.copy_(result), lse if need_lse else None

    def run_decode(
        self,
        q_nope: Tensor,
        q_pe: Tensor,
        cache: Tensor,
        plan: Plan,
        *,
        cache_scale: float = 1.0,
        need_lse: bool,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        result, lse = reference_decode(q_nope, q_pe, cache, plan.batch, scale=plan.scale, cache_scale=cache_scale)
        return result.to(q_nope.dtype) if out is None else out.copy_(result), lse if need_lse else None
