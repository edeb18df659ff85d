"""All that differs between versions of vLLM, 0.26 to 0.33, told by what is there and never by a number."""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_serve.errors import UserError
from mla_serve.shapes import rope_parameters

logger = logging.getLogger("vllm.mla_serve")

WORKS_WITH = "vLLM 0.26 to 0.33"

NEEDED = {
    "vllm.v1.attention.backends.registry": ("AttentionBackendEnum", "register_backend"),
    "vllm.v1.attention.backends.mla.prefill.registry": ("MLAPrefillBackendEnum", "register_mla_prefill_backend"),
}

CPU_DECODE, CPU_PREFILL = ("CPU_MLA", "AMX_MLA"), ("CPU", "ZEN_CPU")
# What vLLM takes first by the major compute capability; elsewhere Triton and FlashAttention.
CUDA_DECODE, CUDA_PREFILL = {9: "FLASH_ATTN_MLA", 10: "FLASHINFER_MLA"}, {10: "TRTLLM_RAGGED"}


def require_vllm() -> None:
    """Raises UserError unless this vLLM has the plug points that this package knows."""
    for module, names in NEEDED.items():
        try:
            found = importlib.import_module(module)
        except ImportError as error:
            raise _unknown(f"it has no {module} ({error})") from error
        for name in names:
            if not hasattr(found, name):
                raise _unknown(f"{module} has no {name}")


def _unknown(reason: str) -> UserError:
    from vllm import __version__

    return UserError(
        f"mla_serve does not know vLLM {__version__}: {reason}; it works with {WORKS_WITH}, so install one of those, or leave "
        "the plugin out with VLLM_PLUGINS"
    )


def take_place(backend: str, prefill: str, *, default: bool) -> None:
    """Registers import paths as CUSTOM; with `default` also in the place of this platform's own MLA members.

    vLLM's CPU platform never asks for CUSTOM, which is why its members are replaced there.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum, register_mla_prefill_backend
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    decodes, prefills = ["CUSTOM"], ["CUSTOM"]
    if default and current_platform.is_cpu():
        decodes += CPU_DECODE
        prefills += CPU_PREFILL
    elif default:
        capability = current_platform.get_device_capability()
        major = 0 if capability is None else capability.major
        decodes.append(CUDA_DECODE.get(major, "TRITON_MLA"))
        prefills.append(CUDA_PREFILL.get(major, "FLASH_ATTN"))
    for name in decodes:
        if name in AttentionBackendEnum.__members__:
            register_backend(AttentionBackendEnum[name], backend)
    for name in prefills:
        if name in MLAPrefillBackendEnum.__members__:
            register_mla_prefill_backend(MLAPrefillBackendEnum[name], prefill)


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk of cached context, as the kernels need it. `rows` are the prefill's tokens that it concerns.

    Device tensors `query_start_loc` and `kv_start_loc` [requests + 1] and `kv_lens` [requests], int32; then host lengths.
    """

    rows: slice
    query_start_loc: Tensor
    kv_start_loc: Tensor
    kv_lens: Tensor
    q_lens: tuple[int, ...]
    kv_tokens: int
    max_q: int
    max_kv: int
    kv_lens_host: tuple[int, ...] | None


def query_lens(metadata: Any) -> list[int] | None:
    """Query tokens of each request of a prefill, on the host; None where this vLLM keeps them on the device alone."""
    lens = getattr(metadata, "query_lens_cpu", None)
    if lens is not None:
        return [int(n) for n in lens.tolist()]
    start = metadata.query_start_loc
    return [int(n) for n in start.diff().tolist()] if start.device.type == "cpu" else None


def context_chunks(metadata: Any, q_lens: list[int]) -> list[Chunk]:
    """The chunks of a prefill, in the order in which vLLM will ask for them."""
    context = metadata.chunked_context
    if context is None:
        return []
    if hasattr(context, "chunks"):  # 0.32: requests that still have context, each chunk with its own rows
        return [
            Chunk(
                rows=chunk.token_slice,
                query_start_loc=chunk.query_start_loc,
                kv_start_loc=chunk.cu_seq_lens,
                kv_lens=chunk.cu_seq_lens.diff(),
                q_lens=tuple(q_lens[chunk.request_slice]),
                kv_tokens=chunk.num_context_tokens,
                max_q=chunk.max_query_len,
                max_kv=chunk.max_seq_len,
                kv_lens_host=_host(chunk.seq_lens),
            )
            for chunk in context.chunks
        ]
    return [  # 0.26: every chunk is of all requests, of which some may have no tokens in it
        Chunk(
            rows=slice(0, sum(q_lens)),
            query_start_loc=metadata.query_start_loc,
            kv_start_loc=context.cu_seq_lens[index],
            kv_lens=context.cu_seq_lens[index].diff(),
            q_lens=tuple(q_lens),
            kv_tokens=int(context.seq_tot[index]),
            max_q=metadata.max_query_len,
            max_kv=int(context.max_seq_lens[index]),
            kv_lens_host=_host(getattr(context, "seq_lens", [None] * (index + 1))[index]),
        )
        for index in range(len(context.seq_tot))
    ]


def _host(lens: Any) -> tuple[int, ...] | None:
    return tuple(int(n) for n in lens.tolist()) if isinstance(lens, Tensor) and lens.device.type == "cpu" else None


def chunk_index(chunk: Any, chunk_idx: int | None) -> int:
    """Which chunk a call means: 0.26 counts them, 0.32 hands the chunk itself over."""
    if chunk_idx is not None:
        return chunk_idx
    return chunk if isinstance(chunk, int) else int(chunk.index)


def kv_lens_bound(common: Any) -> Tensor | None:
    """Key tokens of each request on the host, exact outside asynchronous speculative decoding; None where there are none."""
    for name in ("seq_lens_cpu_upper_bound", "_seq_lens_cpu"):
        lens = getattr(common, name, None)
        if lens is not None:
            return lens
    return None


def on_cpu() -> bool:
    """Whether this is vLLM's CPU platform."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def block_sizes() -> list[Any]:
    """Pages that vLLM may allocate: any on a CPU; on a GPU multiples of 64 tokens, which every kernel of ours takes."""
    from vllm.v1.attention.backend import MultipleOf

    return [MultipleOf(1)] if on_cpu() else [64]


def layers(config: Any) -> int:
    """Attention layers that share one step's plans: those of this pipeline rank."""
    return max(1, int(config.model_config.get_num_layers(config.parallel_config)))


def context_workspace(config: Any) -> int:
    """The most cached tokens that vLLM up-projects at a time."""
    from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder

    return int(MLACommonMetadataBuilder.determine_chunked_prefill_workspace_size(config))


def cache_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the latent cache by vLLM's name for it."""
    if name.startswith("fp8"):
        return torch.float8_e4m3fn
    return dtype if name == "auto" else getattr(torch, name)


def refuse_parallelism(config: Any) -> None:
    """Raises UserError for what divides one request's attention, or overlaps two batches, in ways that were never tested."""
    parallel = config.parallel_config
    if getattr(parallel, "decode_context_parallel_size", 1) > 1 or getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        raise UserError(
            "mla_serve does not take part in context parallelism; set --decode-context-parallel-size and "
            "--prefill-context-parallel-size to 1, or choose another --attention-backend"
        )
    if getattr(parallel, "enable_dbo", False):
        raise UserError(
            "mla_serve was not tested with dual-batch overlap; leave out --enable-dbo, or choose another --attention-backend"
        )


def warn_about_rope(config: Any) -> None:
    """On a CPU vLLM turns MLA's queries wrongly where RoPE is plain: its operator takes [tokens, heads * rope] only."""
    rope = rope_parameters(config.model_config.hf_text_config.to_dict())
    off = "-rotary_embedding" in (config.compilation_config.custom_ops or ())
    if on_cpu() and rope["rope_type"] == "default" and not off:
        logger.warning(
            "mla_serve: vLLM's RoPE operator for CPUs gives wrong answers with MLA models of plain RoPE, as this one is; add "
            '--compilation-config \'{"custom_ops": ["-rotary_embedding"]}\''
        )


def uses_graphs(config: Any) -> bool:
    """Whether vLLM will capture decodes whole."""
    mode = getattr(config.compilation_config, "cudagraph_mode", None)
    return not on_cpu() and not config.model_config.enforce_eager and mode is not None and mode.has_full_cudagraphs()
