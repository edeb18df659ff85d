"""Un-absorbed attention inside vLLM: new tokens and chunks of cached context, each by the kernel chosen for its shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

from mla_serve.backends.base import BatchLayout, Plan
from mla_serve.selection.bound import Kernel
from mla_serve.shapes import MLADims
from mla_serve.vllm_plugin import compat
from mla_serve.vllm_plugin.kernels import Kernels, kernels_for, limits_of


@dataclass(frozen=True, slots=True)
class Planned:
    kernel: Kernel
    plan: Plan


class Prefill(MLAPrefillBackend):
    """vLLM makes one per layer, and for each metadata builder a clone, which alone is asked to prepare and to run.

    Takes any widths. LSEs are natural logarithms, [heads, tokens].
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]

    def __init__(
        self, num_heads: int, scale: float, kv_lora_rank: int, qk_nope_head_dim: int, qk_rope_head_dim: int, v_head_dim: int,
        vllm_config: Any, **more: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            num_heads=num_heads, scale=scale, kv_lora_rank=kv_lora_rank, qk_nope_head_dim=qk_nope_head_dim,
            qk_rope_head_dim=qk_rope_head_dim, v_head_dim=v_head_dim, vllm_config=vllm_config, **more,
        )  # fmt: skip
        self._dims = MLADims(num_heads, qk_nope_head_dim, qk_rope_head_dim, v_head_dim, kv_lora_rank)
        self._kernels: Kernels | None = None
        self._new: Planned | None = None
        self._chunks: list[Planned] = []
        self.host_query_lens: list[int] | None = None  # of the whole batch, told by our metadata builder

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    def supports_out(self) -> bool:
        return True

    def prepare_metadata(self, prefill_metadata: Any) -> None:
        """Chooses and plans for all calls of this step, which its layers share."""
        super().prepare_metadata(prefill_metadata)
        start = prefill_metadata.query_start_loc
        kernels = self._kernels or self._bind(start.device)
        lens = compat.query_lens(prefill_metadata)
        if lens is None and self.host_query_lens is not None:
            lens = self.host_query_lens[1 - start.shape[0] :]  # the prefills come last
        if lens is None:  # one copy from the device, once a step: only where vLLM's own builder is older than its host copy
            lens = [int(n) for n in start.diff().tolist()]
        chunks = compat.context_chunks(prefill_metadata, lens)
        self._new = self._plan_new(kernels, lens, start, lse=bool(chunks))
        self._chunks = [self._plan_chunk(kernels, chunk) for chunk in chunks]
        kernels.tell()

    def run_prefill_new_tokens(
        self, q: Tensor, k: Tensor, v: Tensor, return_softmax_lse: bool, out: Tensor | None = None,
        output_scale: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """q, k [tokens, heads, nope + rope], v [tokens, heads, v]; out [tokens, heads, v], with the LSE [heads, tokens]."""
        assert output_scale is None, "quantized output was never offered"
        found, lse = self._run("prefill", self._new, q, k, v, need_lse=return_softmax_lse, out=out)
        return (found, lse.t().contiguous()) if return_softmax_lse and lse is not None else found

    def run_prefill_context_chunk(
        self, chunk: Any = None, q: Tensor | None = None, k: Tensor | None = None, v: Tensor | None = None,
        out: Tensor | None = None, *, chunk_idx: int | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The same on the context tokens of one chunk, without a mask."""
        assert q is not None
        assert k is not None
        assert v is not None
        planned = self._chunks[compat.chunk_index(chunk, chunk_idx)]
        found, lse = self._run("context", planned, q, k, v, need_lse=True, out=out)
        assert lse is not None, "a kernel asked for an LSE gave none"
        return found, lse.t().contiguous()

    def _run(
        self, phase: str, planned: Planned | None, q: Tensor, k: Tensor, v: Tensor, *, need_lse: bool, out: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        assert planned is not None, "vLLM ran a prefill that it had not prepared"
        assert self._kernels is not None
        self._kernels.count(phase, planned.kernel)
        return planned.kernel.run_prefill(q, k, v, planned.plan, need_lse=need_lse, out=out)

    def _bind(self, device: torch.device) -> Kernels:
        """Not at construction: vLLM makes one per layer, before it knows its cache."""
        config = self.vllm_config
        self._kernels = kernels_for(
            self._dims, dtype=config.model_config.dtype, cache_dtype=None, page_size=config.cache_config.block_size or 16,
            device=device, limits=limits_of(config), layers=compat.layers(config),
        )  # fmt: skip
        return self._kernels

    def _plan_new(self, kernels: Kernels, lens: list[int], start: Tensor, *, lse: bool) -> Planned:
        total = sum(lens)
        batch = BatchLayout(
            num_requests=len(lens), live_requests=len(lens), num_tokens=total, max_q=max(lens), max_kv=max(lens),
            query_start_loc=start.int(), kv_start_loc=start.int(), kv_lens=start.diff().int(),
            q_lens_host=tuple(lens), kv_lens_host=tuple(lens),
        )  # fmt: skip
        kernel = kernels.bound.prefill(len(lens), total, lse=lse)
        return Planned(kernel, kernel.plan(batch, scale=self.scale))

    def _plan_chunk(self, kernels: Kernels, chunk: compat.Chunk) -> Planned:
        n = len(chunk.q_lens)
        batch = BatchLayout(
            num_requests=n, live_requests=n, num_tokens=sum(chunk.q_lens), max_q=chunk.max_q, max_kv=chunk.max_kv,
            query_start_loc=chunk.query_start_loc.int(), kv_start_loc=chunk.kv_start_loc.int(), kv_lens=chunk.kv_lens.int(),
            q_lens_host=chunk.q_lens, kv_lens_host=chunk.kv_lens_host,
        )  # fmt: skip
        kernel = kernels.bound.context(n, batch.num_tokens, chunk.kv_tokens)
        return Planned(kernel, kernel.plan(batch, scale=self.scale))
