"""Multi-head latent attention over a mixed batch: decodes absorbed, prefills un-absorbed with their cached context in chunks.

Rows lie flat: the decodes' tokens first, then the prefills'. What depends on the batch alone (kernels, plans, slots) is in
`StepAttention`, made once per step and shared by all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mla_serve.backends.base import Plan
from mla_serve.backends.merge import merge
from mla_serve.engine.embedded.layers import Linear, Norm, few_rows
from mla_serve.engine.embedded.rope import rotate_
from mla_serve.shapes import MLADims

__all__ = ["Attention", "ContextChunk", "Kernel", "Planned", "StepAttention"]


class Kernel(Protocol):
    """What attention asks of a selected kernel; `selection.Kernel` is one."""

    def run_prefill(
        self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, need_lse: bool, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]: ...

    def run_decode(
        self, q_nope: Tensor, q_pe: Tensor, cache: Tensor, plan: Plan, *, cache_scale: float = 1.0, need_lse: bool,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]: ...  # fmt: skip


@dataclass(frozen=True, slots=True)
class Planned:
    """A kernel and its plan for this step."""

    kernel: Kernel
    plan: Plan


@dataclass(frozen=True, slots=True)
class ContextChunk:
    """A run of cached tokens that some prefills attend to. `rows` are the prefill rows of just those requests, which are
    neighbours; `slots` [keys] int64 are the cache slots of the tokens, request by request."""

    rows: slice
    slots: Tensor
    attend: Planned


@dataclass(frozen=True, slots=True)
class StepAttention:
    """All that one step's attention shares between layers. `slots` [tokens] int64: where each new latent goes."""

    turn: Tensor  # [tokens, 1, rope / 2] complex64
    slots: Tensor
    decodes: int  # rows that decode
    decode: Planned | None
    prefill: Planned | None
    context: Sequence[ContextChunk]


@dataclass(frozen=True, slots=True)
class Attention:
    """One layer's attention weights. `kv_b` serves both forms from one storage: as it lies, and as the views W_UK and W_UV.

    `down` gives, side by side, the query (or its low-rank form where there is `q_b`), the latent and the rope key, so that
    x is read once.
    """

    dims: MLADims
    down: Linear
    q_norm: Norm | None
    q_b: Linear | None
    kv_norm: Norm
    kv_b: Linear  # [heads * (nope + v), latent]
    out: Linear

    def add_to(self, total: Tensor, x: Tensor, cache: Tensor, step: StepAttention) -> None:
        """total += attention(x), in place. x [tokens, hidden]; cache [pages, page_size, latent + rope] gets the new latents."""
        d = self.dims
        q, latent = self.down(x).tensor_split((-d.latent_row,), dim=-1)
        if self.q_b is not None and self.q_norm is not None:
            q = self.q_b(self.q_norm(q))
        q = q.view(-1, d.heads, d.qk)  # [tokens, heads, qk]
        rotate_(q[..., d.nope :], step.turn)
        rotate_(latent[:, None, d.latent :], step.turn)
        latent[:, : d.latent] = self.kv_norm(latent[:, : d.latent])
        cache.view(-1, d.latent_row).index_copy_(0, step.slots, latent)

        heads = x.new_empty(x.shape[0], d.heads, d.v)
        if step.decode is not None:
            self._decode(q[: step.decodes], cache, step.decode, heads[: step.decodes])
        if step.prefill is not None:
            self._prefill(q[step.decodes :], latent[step.decodes :], cache, step, step.prefill, heads[step.decodes :])
        self.out.add_to(total, heads.flatten(1))

    def _decode(self, q: Tensor, cache: Tensor, decode: Planned, out: Tensor) -> None:
        """Absorbed: W_UK goes into the query, so that the cache is read as it lies; W_UV is applied to the result."""
        d = self.dims
        up = self.kv_b.weight.view(d.heads, d.nope + d.v, d.latent)
        absorbed = torch.bmm(q[..., : d.nope].transpose(0, 1), up[:, : d.nope]).transpose(0, 1)  # [tokens, heads, latent]
        mixed, _ = decode.kernel.run_decode(absorbed, q[..., d.nope :], cache, decode.plan, need_lse=False)
        if few_rows(mixed):
            out.copy_(torch.bmm(up[:, d.nope :], mixed.permute(1, 2, 0)).permute(2, 0, 1))
        else:
            torch.bmm(mixed.transpose(0, 1), up[:, d.nope :].transpose(1, 2), out=out.transpose(0, 1))

    def _prefill(self, q: Tensor, latent: Tensor, cache: Tensor, step: StepAttention, prefill: Planned, out: Tensor) -> None:
        """Un-absorbed: new tokens on themselves, causal, then each chunk of cached context, merged by LSE."""
        k, v = self._up(latent)
        _, lse = prefill.kernel.run_prefill(q, k, v, prefill.plan, need_lse=bool(step.context), out=out)
        if not step.context:
            return
        total = out.float()  # `out` itself in float32; in half precision each merge would round once more
        for chunk in step.context:
            k, v = self._up(cache.view(-1, self.dims.latent_row).index_select(0, chunk.slots))
            part, part_lse = chunk.attend.kernel.run_prefill(q[chunk.rows], k, v, chunk.attend.plan, need_lse=True)
            assert lse is not None, "a kernel asked for an LSE gave none"
            assert part_lse is not None, "a kernel asked for an LSE gave none"
            rows = total[chunk.rows]
            _, lse[chunk.rows] = merge(rows, lse[chunk.rows], part, part_lse, out=rows)
        if total is not out:
            out.copy_(total)

    def _up(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Latents [tokens, latent + rope] to keys [tokens, heads, nope + rope] and values [tokens, heads, v]."""
        d = self.dims
        up = self.kv_b(latent[:, : d.latent]).view(-1, d.heads, d.nope + d.v)  # [tokens, heads, nope + v]
        k = up.new_empty(up.shape[0], d.heads, d.qk)
        k[..., : d.nope] = up[..., : d.nope]
        k[..., d.nope :] = latent[:, None, d.latent :]
        return k, up[..., d.nope :]
