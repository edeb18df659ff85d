"""Absorbed attention inside vLLM: decodes, and short extensions, over the paged latent cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport, MultipleOf

from mla_serve.backends.base import BatchLayout, Plan
from mla_serve.errors import UserError
from mla_serve.selection.bound import Kernel
from mla_serve.shapes import MLADims
from mla_serve.vllm_plugin import compat
from mla_serve.vllm_plugin.kernels import Kernels, get_ready, kernels_for, limits_of, settings
from mla_serve.vllm_plugin.prefill import Prefill


class Backend(MLACommonBackend):
    """What vLLM asks before it builds anything. Takes any widths; see `Impl` for what is refused."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []  # any

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return compat.block_sizes()

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return True  # torch-mla runs anywhere; the others are chosen by what they say themselves

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder


@dataclass
class DecodeMetadata(MLACommonDecodeMetadata):
    """One step's decode: a kernel and its plan, shared by all layers."""

    kernel: Kernel | None = None
    plan: Plan | None = None
    kernels: Kernels | None = None


@dataclass
class Metadata(MLACommonMetadata[DecodeMetadata]):
    """vLLM's, but for its check of the head size, which asks the base class and not the backend in use."""

    def __post_init__(self) -> None:
        """Any head size is taken."""


@dataclass(slots=True)
class Captured:
    """What a CUDA graph was captured with: replays refresh the plan in place."""

    kernel: Kernel
    plan: Plan


class Builder(MLACommonMetadataBuilder[Metadata]):
    """Chooses and plans once a step. A batch size that was captured keeps its kernel for as long as the process lives."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device, **more: Any) -> None:
        self.reorder_batch_threshold = settings().absorbed_tokens
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, **{"metadata_cls": Metadata, **more})
        layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        dims = MLADims(self.num_heads, layer.qk_nope_head_dim, layer.qk_rope_head_dim, layer.v_head_dim, layer.kv_lora_rank)
        self._scale = float(layer.scale)
        self._exact = vllm_config.speculative_config is None
        self._expected = settings().expected_context or max(1, vllm_config.model_config.max_model_len // 2)
        self._captured: dict[tuple[int, int], Captured] = {}
        self._capturing = False
        self._common: Any = None
        self.kernels: Kernels = kernels_for(
            dims, dtype=vllm_config.model_config.dtype,
            cache_dtype=compat.cache_dtype(layer.kv_cache_dtype, vllm_config.model_config.dtype),
            page_size=kv_cache_spec.block_size, device=device,
            limits=limits_of(vllm_config), layers=compat.layers(vllm_config),
        )  # fmt: skip

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Metadata:
        """Lengths are made up there, so the kernel is chosen for the context that is expected."""
        self._capturing = True
        try:
            return super().build_for_cudagraph_capture(common_attn_metadata)
        finally:
            self._capturing = False

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        self._common = common_attn_metadata
        prefill = self._prefill_backend
        if isinstance(prefill, Prefill):
            prefill.host_query_lens = [int(n) for n in common_attn_metadata.query_start_loc_cpu.diff().tolist()]
        try:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        finally:
            self._common = None

    def _build_decode(
        self, block_table_tensor: Tensor, seq_lens_device: Tensor, max_seq_len: int, query_start_loc_cpu: Tensor,
        query_start_loc_device: Tensor, num_decode_tokens: int, max_query_len: int | None = None,
        dcp_tot_seq_lens_device: Tensor | None = None, **_: Any,
    ) -> DecodeMetadata:  # fmt: skip
        batch = self._layout(block_table_tensor, seq_lens_device, max_seq_len, query_start_loc_cpu, query_start_loc_device)
        kernel, plan = self._plan(batch)
        self.kernels.tell()
        return DecodeMetadata(block_table_tensor, seq_lens_device, dcp_tot_seq_lens_device, kernel, plan, self.kernels)

    def _layout(self, table: Tensor, seq_lens: Tensor, max_seq_len: int, start_cpu: Tensor, start: Tensor) -> BatchLayout:
        n = seq_lens.shape[0]
        q_lens = [int(length) for length in start_cpu.diff().tolist()]
        bound = compat.kv_lens_bound(self._common)
        host = None if bound is None else tuple(int(length) for length in bound[:n].tolist())
        kv_lens = seq_lens.int()
        return BatchLayout(
            num_requests=n, live_requests=sum(length > 0 for length in q_lens), num_tokens=int(start_cpu[-1]),
            max_q=max(q_lens), max_kv=max(host) if host else max_seq_len, query_start_loc=start.int(),
            kv_start_loc=torch.nn.functional.pad(kv_lens.cumsum(0, dtype=torch.int32), (1, 0)), kv_lens=kv_lens,
            q_lens_host=tuple(q_lens), kv_lens_host=host, host_lens_exact=self._exact and host is not None,
            block_table=table, page_size=self.kv_cache_spec.block_size,
        )  # fmt: skip

    def _plan(self, batch: BatchLayout) -> tuple[Kernel, Plan]:
        size = (batch.num_requests, batch.max_q)
        held = self._captured.get(size)
        if held is not None:
            return held.kernel, held.kernel.plan(batch, scale=self._scale, reuse=held.plan)
        live = max(1, batch.live_requests)
        if self._capturing:
            kernel = self.kernels.decode(live, live * self._expected, ragged=False, q_len=batch.max_q, graph=True, even=True)
            self._captured[size] = Captured(kernel, kernel.plan(batch, scale=self._scale))
            return kernel, self._captured[size].plan
        total = sum(batch.kv_lens_host) if batch.kv_lens_host else live * batch.max_kv
        kernel = self.kernels.decode(
            live, max(total, 1), ragged=batch.max_kv * live > 2 * total, q_len=batch.max_q, graph=False, even=_even(batch)
        )
        return kernel, kernel.plan(batch, scale=self._scale)


def _even(batch: BatchLayout) -> bool:
    """Whether every live request has as many query tokens as every other."""
    assert batch.q_lens_host is not None
    return all(length in (0, batch.max_q) for length in batch.q_lens_host)


class Impl(MLACommonImpl[Metadata]):
    """One layer. Refuses at start, by name, what it was never shown to get right."""

    can_return_lse_for_decode: bool = True
    lse_base_on_e: bool = True
    supports_quant_query_input: bool = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.supports_quant_query_input = False  # the base class's constructor says yes
        config = get_current_vllm_config()
        compat.refuse_parallelism(config)
        if compat.on_cpu() and self.kv_cache_dtype != "auto":
            raise UserError(f"the latent cache cannot be {self.kv_cache_dtype} on a CPU; leave --kv-cache-dtype out")
        compat.warn_about_rope(config)
        dims = MLADims(self.num_heads, self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim, self.kv_lora_rank)
        get_ready(dims, config, cache_dtype=compat.cache_dtype(self.kv_cache_dtype, config.model_config.dtype))

    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_c_and_k_pe_cache: Tensor, attn_metadata: Metadata, layer: Any
    ) -> tuple[Tensor, Tensor | None]:
        """q [tokens, heads, latent + rope], or its two parts; out [tokens, heads, latent]."""
        decode = attn_metadata.decode
        assert decode is not None
        assert decode.kernel is not None
        assert decode.plan is not None
        assert decode.kernels is not None
        nope, rope = q if isinstance(q, tuple) else (q[..., : self.kv_lora_rank], q[..., self.kv_lora_rank :])
        quantized = kv_c_and_k_pe_cache.dtype == torch.float8_e4m3fn
        scale = float(layer._k_scale_float) if quantized else 1.0
        found = decode.kernel.run_decode(nope, rope, kv_c_and_k_pe_cache, decode.plan, cache_scale=scale, need_lse=False)
        decode.kernels.count("decode", decode.kernel, layer.layer_name)
        return found[0], None

    def do_kv_cache_update(
        self, kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_cache_dtype: str, k_scale: Tensor,
        **more: Any,
    ) -> None:  # fmt: skip
        """New latents into their slots; a slot of -1 is padding. vLLM's own operator for it has no CPU form."""
        if kv_cache.device.type != "cpu":
            super().do_kv_cache_update(kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale, **more)
            return
        if not kv_cache.numel():
            return
        slots = slot_mapping.flatten()
        real = slots >= 0
        latents = torch.cat([kv_c_normed, k_pe.squeeze(1)], dim=-1)[: slots.shape[0]]
        kv_cache.view(-1, kv_cache.shape[-1])[slots[real].long()] = latents[real].to(kv_cache.dtype)
