"""vLLM's MLA decode, absorbed: the backend, its metadata builder, and the impl that each layer has one of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, MultipleOf

from mla_serve.errors import UserError
from mla_serve.selection import Kernel
from mla_serve.vllm_plugin import compat, rope
from mla_serve.vllm_plugin.config import logger
from mla_serve.vllm_plugin.deployment import Deployment, Planned
from mla_serve.vllm_plugin.prefill import PrefillBackend
from mla_serve.vllm_plugin.probing import probe_at_start
from mla_serve.vllm_plugin.startup import check, expected_page_size, log_choices, reserve
from mla_serve.vllm_plugin.steps import Batch, DecodePlanner, Warm

__all__ = ["AttentionBackend", "Builder", "DecodeMetadata", "Impl", "Metadata"]


class AttentionBackend(MLACommonBackend):
    """What vLLM asks about before any layer exists."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.float16, torch.bfloat16]
    # float8 is refused later, with the reason, where the kernel takes no scale.
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []  # any

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(1)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Asked where nobody gives --block-size: the page that the fastest decode takes."""
        config = compat.current_config()
        layer = next(_layers(config), None)
        return default_block_size if layer is None else expected_page_size(Deployment.of(config), config, compat.dims_of(layer))

    @classmethod
    def supported_kv_cache_layouts(cls) -> Any:
        return compat.compact_layouts()

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # plans are made from the host's query lengths

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return True  # the selector knows which kernels run here


@dataclass
class DecodeMetadata(MLACommonDecodeMetadata):
    """A step's kernel and plan, shared by all layers."""

    planned: Planned


@dataclass
class Metadata(MLACommonMetadata[DecodeMetadata]):
    def __post_init__(self) -> None:
        """The base class would refuse widths that its own kernels do not take."""


class Builder(MLACommonMetadataBuilder[Metadata]):
    """Plans each step once. Under full CUDA graphs there is a kernel and a plan for each captured batch size."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        self._layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        self.planner = _planner(
            vllm_config, self._layer, kv_cache_spec.block_size, self._warm if device.type == "cuda" else None
        )
        self.reorder_batch_threshold = self.planner.absorb_up_to
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, Metadata)
        self._batch: Batch | None = None
        dims, page_size = self.planner.dims, self.planner.page_size
        log_choices(self.planner.deployment, dims, page_size, **_grid_of(vllm_config, page_size))

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """NEVER where only the last resort could be captured: replayed, it reads whatever the block table can hold."""
        for layer in _layers(vllm_config):
            reason = _planner(vllm_config, layer, kv_cache_spec.block_size).why_no_graphs()
            if reason is not None:
                if compat.full_graphs(vllm_config):
                    logger.warning("decodes are not captured in CUDA graphs: %s", reason)
                return AttentionCGSupport.NEVER
        return cls._cudagraph_support

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Metadata:
        self.planner.capturing = True
        try:
            return cast(Metadata, super().build_for_cudagraph_capture(common_attn_metadata))
        finally:
            self.planner.capturing = False

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        common = common_attn_metadata
        starts = common.query_start_loc_cpu.tolist()
        q_lens = tuple(end - start for start, end in pairwise(starts))
        self._batch = Batch(q_lens, compat.host_kv_lens(common), common.max_seq_len)
        if isinstance(self._prefill_backend, PrefillBackend):
            self._prefill_backend.host_q_lens = q_lens
        return cast(Metadata, super().build(common_prefix_len, common, fast_build))

    def _build_decode(
        self, block_table_tensor: Tensor, seq_lens_device: Tensor, query_start_loc_device: Tensor, num_decode_tokens: int,
        dcp_tot_seq_lens_device: Tensor | None = None, **_: Any,
    ) -> DecodeMetadata:  # fmt: skip
        """By keyword; which others there are depends on the version."""
        assert self._batch is not None
        planned = self.planner.plan(
            self._batch, query_start_loc_device, seq_lens_device, block_table_tensor, num_tokens=num_decode_tokens
        )
        return DecodeMetadata(block_table_tensor, seq_lens_device, dcp_tot_seq_lens_device, planned)

    def _warm(self, planned: Planned, tokens: int) -> None:
        """Runs a kernel on queries of zeros before it is captured: what it compiles or loads must not be part of a graph."""
        dims, cache = self.planner.dims, self._layer.kv_cache
        q_nope = torch.zeros(tokens, dims.heads, dims.latent, dtype=self.model_config.dtype, device=self.device)
        q_pe = q_nope.new_zeros(tokens, dims.heads, dims.rope)
        if self.planner.cache_dtype is not None:
            cache = cache.view(torch.float8_e4m3fn)
        planned.kernel.run_decode(q_nope, q_pe, cache, planned.plan, need_lse=False)


def _planner(config: Any, layer: Any, page_size: int, warm: Warm | None = None) -> DecodePlanner:
    """The planner of `layer` and those like it."""
    deployment = Deployment.of(config)
    return DecodePlanner(
        deployment, deployment.limits(compat.context_rows(config, page_size)), compat.dims_of(layer), scale=layer.scale,
        page_size=page_size, cache_dtype=compat.cache_dtype_of(layer.kv_cache_dtype), warm=warm,
    )  # fmt: skip


def _grid_of(config: Any, page_size: int) -> dict[str, Any]:
    """What of `config` the grid of shapes depends on beside the deployment's own."""
    return {"context_rows": compat.context_rows(config, page_size), "graphs": compat.full_graphs(config)}


def _layers(config: Any) -> Iterator[Any]:
    """The attention layers of the model under `config` that are served by `Impl`."""
    for layer in config.compilation_config.static_forward_context.values():
        if isinstance(getattr(layer, "impl", None), Impl):
            yield layer


class Impl(MLACommonImpl[Metadata]):
    """A layer's decode. Prefill is the base class's, which calls the prefill backend."""

    can_return_lse_for_decode = False  # asked for by decode context parallelism alone, which is refused
    supports_dcp = False
    supports_pcp = False

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, alibi_slopes: list[float] | None,
        sliding_window: int | None, kv_cache_dtype: str, logits_soft_cap: float | None, attn_type: str,
        kv_sharing_target_layer_name: str | None, **mla_args: Any,
    ) -> None:  # fmt: skip
        """As vLLM calls it. Raises UserError for settings that cannot be met; the first layer's call measures, if asked to."""
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap,
            attn_type, kv_sharing_target_layer_name, **mla_args,
        )  # fmt: skip
        for name, value in (("ALiBi", alibi_slopes), ("a sliding window", sliding_window), ("a soft cap", logits_soft_cap)):
            if value:
                raise UserError(f"mla_serve's attention backend has no {name}; name another --attention-backend")
        if attn_type != AttentionType.DECODER:
            raise UserError(f"mla_serve's attention backend serves decoders, not {attn_type}; name another --attention-backend")
        self.supports_quant_query_input = False  # queries keep their dtype over a float8 cache
        config = compat.current_config()
        compat.refuse_parallelism(config)
        rope.warn_if_faulty(config)
        self.deployment = Deployment.of(config)
        dims = compat.dims_of(self)
        cache_dtype = compat.cache_dtype_of(kv_cache_dtype)
        page_size = check(self.deployment, config, dims, cache_dtype)
        ranks = compat.tensor_ranks()
        probe_at_start(self.deployment, dims, page_size, **_grid_of(config, page_size), ranks=ranks)
        reserve(self.deployment, dims, page_size, cache_dtype, **_grid_of(config, page_size))

    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_c_and_k_pe_cache: Tensor, attn_metadata: Metadata, layer: Any
    ) -> tuple[Tensor, Tensor | None]:
        """q [tokens, heads, latent + rope] or its two parts; cache [pages, page, latent + rope]."""
        assert attn_metadata.decode is not None
        planned = attn_metadata.decode.planned
        q_nope, q_pe = q if isinstance(q, tuple) else q.tensor_split((self.kv_lora_rank,), dim=-1)
        label = planned.kernel.decision.label
        self.deployment.counts.runs["decode", label, layer.layer_name] += 1
        scale = layer._k_scale_float if planned.kernel.state.shape.cache_dtype is not None else 1.0
        kernel: Kernel = planned.kernel
        return kernel.run_decode(q_nope, q_pe, kv_c_and_k_pe_cache, planned.plan, cache_scale=scale, need_lse=False)

    def do_kv_cache_update(
        self, kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_cache_dtype: str, k_scale: Tensor,
        *rest: Any, **more: Any,
    ) -> None:  # fmt: skip
        """Writes new latents to their slots; negative slots are padding. vLLM's own operator does it but on a CPU."""
        if kv_cache.device.type != "cpu":
            super().do_kv_cache_update(kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale, *rest, **more)
            return
        if not kv_cache.numel():
            return
        slots = slot_mapping.flatten().long()
        rows = torch.cat([kv_c_normed[: slots.numel()], k_pe[: slots.numel()].flatten(1)], dim=-1).to(kv_cache.dtype)
        real = slots >= 0
        kv_cache.view(-1, kv_cache.shape[-1]).index_copy_(0, slots[real], rows[real])
