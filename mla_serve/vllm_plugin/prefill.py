"""vLLM's MLA prefill, un-absorbed: new tokens on themselves and on chunks of cached context, a kernel chosen per batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

from mla_serve.backends.base import BatchLayout
from mla_serve.selection import BoundSelector
from mla_serve.shapes import AttentionShape
from mla_serve.vllm_plugin import compat
from mla_serve.vllm_plugin.deployment import Deployment, Planned

__all__ = ["PrefillBackend"]


class PrefillBackend(MLAPrefillBackend):
    """One instance belongs to each metadata builder, which prepares it once per step; all layers then run it.

    Takes any widths. A builder that has the step's query lengths on the host, of all requests with the prefills last, may set
    `host_q_lens` before `prepare_metadata`.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.float16, torch.bfloat16]

    def __init__(
        self, num_heads: int, scale: float, kv_lora_rank: int, qk_nope_head_dim: int, qk_rope_head_dim: int, v_head_dim: int,
        vllm_config: Any,
    ) -> None:  # fmt: skip
        """As vLLM calls it. Raises UserError for settings that cannot be met, and pins that cannot run this model."""
        super().__init__(num_heads, scale, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim, vllm_config)
        compat.refuse_parallelism(vllm_config)
        self.dims = compat.dims_of(self)
        self.deployment = Deployment.of(vllm_config)
        dtype = self.deployment.size.dtype
        for shape in (
            AttentionShape.prefill(self.dims, batch=1, q_len=1, dtype=dtype, lse=False),
            AttentionShape.context(self.dims, batch=1, q_len=1, kv_len=1, dtype=dtype),
        ):
            self.deployment.selector.decide(shape)  # a pinned kernel that cannot run this model is told now
        self.host_q_lens: Sequence[int] | None = None
        self._bound: BoundSelector | None = None
        self._new: Planned | None = None
        self._chunks: list[Planned] = []

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    def supports_out(self) -> bool:
        return True

    def prepare_metadata(self, prefill_metadata: Any) -> None:
        """Chooses kernels and makes plans for a step: one for its new tokens and one for each chunk of context."""
        self._prefill_metadata = prefill_metadata
        starts = prefill_metadata.query_start_loc
        if self.host_q_lens is not None:
            lens = self.host_q_lens[1 - starts.shape[0] :]
        else:  # another's builder
            known = getattr(prefill_metadata, "query_lens_cpu", None)
            lens = (starts.diff() if known is None else known).tolist()
        chunks = compat.chunks_of(prefill_metadata, lens)
        bound = self._kernels()
        batch = _layout(starts, starts, lens, lens)
        self._new = self._plan(bound.prefill(len(lens), max(1, sum(lens)), lse=bool(chunks)), batch)
        self._chunks = [
            self._plan(
                bound.context(len(chunk.kv_lens), max(1, sum(chunk.q_lens)), max(1, sum(chunk.kv_lens))),
                _layout(chunk.q_starts, chunk.kv_starts, chunk.q_lens, chunk.kv_lens),
            )
            for chunk in chunks
        ]
        for phase, planned in [("prefill", self._new), *(("context", planned) for planned in self._chunks)]:
            self.deployment.counts.steps[phase, planned.kernel.decision.label] += 1

    def run_prefill_new_tokens(
        self, q: Tensor, k: Tensor, v: Tensor, return_softmax_lse: bool, out: Tensor | None = None,
        output_scale: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """q, k [tokens, heads, nope + rope], v [tokens, heads, v]; the LSE [heads, tokens], natural log."""
        assert output_scale is None, "supports_quant_output says no"
        assert self._new is not None, "prepare_metadata comes first"
        result, lse = self._run("prefill", self._new, q, k, v, need_lse=return_softmax_lse, out=out)
        return result if lse is None else (result, lse)

    def run_prefill_context_chunk(
        self, chunk: Any = None, q: Tensor | None = None, k: Tensor | None = None, v: Tensor | None = None,
        out: Tensor | None = None, *, chunk_idx: int | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """On a chunk of context: its object (0.32 and later) or its number (0.26)."""
        if chunk_idx is None:
            chunk_idx = chunk if isinstance(chunk, int) else chunk.index
        assert q is not None
        assert k is not None
        assert v is not None
        result, lse = self._run("context", self._chunks[chunk_idx], q, k, v, need_lse=True, out=out)
        assert lse is not None, "a kernel asked for an LSE gave none"
        return result, lse

    def _kernels(self) -> BoundSelector:
        if self._bound is None:
            page_size = self.vllm_config.cache_config.block_size
            limits = self.deployment.limits(compat.context_rows(self.vllm_config, page_size))
            self._bound = self.deployment.bind(self.dims, page_size, limits)
        return self._bound

    def _plan(self, kernel: Any, batch: BatchLayout) -> Planned:
        return Planned(kernel, kernel.plan(batch, scale=self.scale))

    def _run(
        self, phase: str, planned: Planned, q: Tensor, k: Tensor, v: Tensor, *, need_lse: bool, out: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        self.deployment.counts.runs[phase, planned.kernel.decision.label, ""] += 1
        result, lse = planned.kernel.run_prefill(q, k, v, planned.plan, need_lse=need_lse, out=out)
        return result, None if lse is None else lse.transpose(0, 1).contiguous()


def _layout(q_starts: Tensor, kv_starts: Tensor, q_lens: Sequence[int], kv_lens: Sequence[int]) -> BatchLayout:
    """From vLLM's device tensors and the host's lengths, so that nothing is copied."""
    return BatchLayout(
        num_requests=len(q_lens),
        live_requests=len(q_lens),
        num_tokens=sum(q_lens),
        max_q=max(q_lens, default=0),
        max_kv=max(kv_lens, default=0),
        query_start_loc=q_starts,
        kv_start_loc=kv_starts,
        kv_lens=kv_starts.diff(),
        q_lens_host=tuple(q_lens),
        kv_lens_host=tuple(kv_lens),
    )
