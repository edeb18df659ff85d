"""An attention backend for mla_serve in one file: un-absorbed attention by matrix products over blocks of queries.

torch's flash kernel for CPUs wants equal Q/K and value widths, and torch's math operator multiplies queries with keys that the
causal mask then hides. This one takes unequal widths as they are, like DeepSeek's 192 and 128, and stops each block of queries
at its last visible key, which leaves out nearly half of the work of a long prompt. Of short contexts it makes one block, where
it has nothing to leave out; there others are faster. Which is which is for the clock to say.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_serve.backends.base import Backend, Kind, Plan
from mla_serve.shapes import AttentionShape

__all__ = ["BlockedMath"]

BLOCK = 128  # query rows at a time: their scores, in float32, stay in the cache of a core
LONGEST = 4096  # keys; beyond, a block's scores leave the cache and a tiled kernel is the better tool


class BlockedMath(Backend):
    """Un-absorbed attention on a CPU in float32, any widths, with LSE."""

    name = "blocked-math"
    library = "my-attention-backend"  # a new version of it makes the decisions it won stale
    needs_host_lens = True

    def kind(self, shape: AttentionShape) -> Kind:
        return Kind.UNFUSED

    def available(self) -> str | None:
        return None if self.device.type == "cpu" else f"is written for CPUs, this is {self.device.type}"

    def supports(self, shape: AttentionShape) -> str | None:
        if shape.absorbed:
            return "takes the un-absorbed form only, not the paged latent cache"
        if shape.graph:
            return "follows each batch's lengths, so a captured graph cannot be replayed with others"
        if shape.dtype != "float32":
            return f"takes float32, not {shape.dtype}"
        if shape.kv_len > LONGEST:
            return f"takes up to {LONGEST} keys, not {shape.kv_len}"
        return None

    def run_prefill(
        self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, need_lse: bool, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        result = torch.zeros(*q.shape[:2], v.shape[2], dtype=q.dtype) if out is None else out.zero_()
        lse = torch.full(q.shape[:2], float("-inf"))
        row, key, causal = 0, 0, plan.state.shape.causal
        for q_len, kv_len in zip(plan.batch.q_lens_host or (), plan.batch.kv_lens_host or (), strict=True):
            rows, keys = slice(row, row + q_len), slice(key, key + kv_len)
            if q_len and kv_len:
                _attend(q[rows], k[keys], v[keys], plan.scale, causal, result[rows], lse[rows])
            row, key = row + q_len, key + kv_len
        return result, lse if need_lse else None


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, out: Tensor, lse: Tensor) -> None:
    """One request, block by block: q [Sq, heads, qk], k [Sk, heads, qk], v [Sk, heads, v] into out and lse [Sq, heads]."""
    first_seen = k.shape[0] - q.shape[0]  # bottom-right: query i sees keys up to Sk - Sq + i
    q, k, v = q.transpose(0, 1), k.permute(1, 2, 0), v.transpose(0, 1)  # [heads, Sq, qk], [heads, qk, Sk], [heads, Sk, v]
    for at in range(0, q.shape[1], BLOCK):
        end = min(at + BLOCK, q.shape[1])
        seen = min(k.shape[2], end + first_seen) if causal else k.shape[2]
        if seen <= 0:
            continue  # these queries see no key: zeros and -inf, as they are
        scores = torch.bmm(q[:, at:end], k[..., :seen]).mul_(scale)  # [heads, rows, seen]
        if causal:
            ahead = torch.arange(seen) > torch.arange(at, end).unsqueeze(1) + first_seen
            scores.masked_fill_(ahead, float("-inf"))
        sums = scores.logsumexp(-1)
        weights = scores.sub_(sums.masked_fill(sums == float("-inf"), 0.0).unsqueeze(-1)).exp_()
        out[at:end] = torch.bmm(weights, v[:, :seen]).transpose(0, 1)
        lse[at:end] = sums.transpose(0, 1)
