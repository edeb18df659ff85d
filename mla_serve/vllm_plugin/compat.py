"""The one place that knows how vLLM's versions differ. What a version has is found out by looking, not by its number."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from mla_serve.errors import UserError
from mla_serve.shapes import DType, MLADims

__all__ = [
    "ALONE",
    "Chunk",
    "Ranks",
    "chunks_of",
    "compact_layouts",
    "context_rows",
    "current_config",
    "dims_of",
    "dtype_name",
    "full_graphs",
    "host_kv_lens",
    "offer_to_workers",
    "refuse_parallelism",
    "register_classes",
    "tensor_ranks",
    "worker_device",
]

KNOWN = "0.26 to 0.33"
_CPU_ATTENTION, _CPU_PREFILL = ("CPU_MLA", "AMX_MLA"), ("CPU", "ZEN_CPU")
_CUDA_ATTENTION = ("FLASHINFER_MLA", "FLASH_ATTN_MLA", "TRITON_MLA")  # the first choice on sm_100, sm_90, and all others
_CUDA_PREFILL = ("FLASH_ATTN",)


def _from(module: str, *names: str) -> list[Any]:
    """Names of one of vLLM's modules. Raises UserError where this vLLM has not got them."""
    import vllm

    try:
        found = import_module(f"vllm.{module}")
        return [getattr(found, name) for name in names]
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"mla_serve's attention backend works with vLLM {KNOWN}; this is {vllm.__version__}, where {error}; install one of "
            "those, or name another --attention-backend and set VLLM_PLUGINS= to leave mla_serve out"
        ) from error


def register_classes(attention: str, prefill: str, *, default: bool) -> None:
    """Puts the class paths behind CUSTOM and, with `default`, behind what vLLM would take by itself on this platform.

    vLLM looks at no CUSTOM on a CPU, so there `default` is the only way in. On a GPU vLLM's members of sparse attention stay.
    """
    members, register = _from("v1.attention.backends.registry", "AttentionBackendEnum", "register_backend")
    prefill_members, register_prefill = _from(
        "v1.attention.backends.mla.prefill.registry", "MLAPrefillBackendEnum", "register_mla_prefill_backend"
    )
    names, prefill_names = ["CUSTOM"], ["CUSTOM"]
    if default:
        (platform,) = _from("platforms", "current_platform")
        names += _CPU_ATTENTION if platform.is_cpu() else _CUDA_ATTENTION
        prefill_names += _CPU_PREFILL if platform.is_cpu() else _CUDA_PREFILL
    for name in names:
        if name in members.__members__:
            register(members[name], attention)
    for name in prefill_names:
        if name in prefill_members.__members__:
            register_prefill(prefill_members[name], prefill)


def current_config() -> Any:
    """vLLM's configuration of the engine that is being built in this thread."""
    (get,) = _from("config", "get_current_vllm_config")
    return get()


def worker_device() -> torch.device:
    """The device of this worker process."""
    (platform,) = _from("platforms", "current_platform")
    return torch.device("cpu") if platform.is_cpu() else torch.device("cuda", torch.cuda.current_device())


Ranks = tuple[int, Callable[[float], None]]
ALONE: Ranks = (0, lambda _: None)


def tensor_ranks() -> Ranks:
    """This process among those that share each layer, and how to wait until all of them have come so far.

    Waiting raises UserError after so many seconds.
    """
    (group_of,) = _from("distributed.parallel_state", "get_tp_group")
    try:
        group = group_of()
    except AssertionError:  # nothing is distributed
        return ALONE

    def wait(seconds: float) -> None:
        if group.world_size == 1:
            return
        try:
            torch.distributed.monitored_barrier(group.cpu_group, timedelta(seconds=seconds))
        except RuntimeError as error:
            raise UserError(
                f"another rank has not finished measuring attention kernels within {seconds:g} seconds; lower "
                "MLA_SERVE_BUDGET, or measure before with mla-serve probe"
            ) from error

    return group.rank_in_group, wait


def dtype_name(dtype: torch.dtype) -> DType:
    """Raises UserError for a dtype that no kernel of ours computes in."""
    names: dict[torch.dtype, DType] = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
    if dtype not in names:
        raise UserError(f"mla_serve's kernels compute in {', '.join(names.values())}, not {dtype}; pass --dtype bfloat16")
    return names[dtype]


def dims_of(owner: Any) -> MLADims:
    """The widths of a layer, an impl or a prefill backend of vLLM."""
    return MLADims(
        heads=owner.num_heads, nope=owner.qk_nope_head_dim, rope=owner.qk_rope_head_dim, v=owner.v_head_dim,
        latent=owner.kv_lora_rank,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of cached context: queries at `q_starts` on keys at `kv_starts`, [requests + 1] each, and their host lengths."""

    q_starts: Tensor
    kv_starts: Tensor
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]


def chunks_of(metadata: Any, q_lens: Sequence[int]) -> list[Chunk]:
    """The context chunks of a prefill batch, of which `q_lens` are the query lengths.

    Since 0.32 a chunk holds neighbouring requests and their queries; in 0.26 each holds all requests of the batch.
    """
    context = metadata.chunked_context
    if context is None:
        return []
    if hasattr(context, "chunks"):
        return [
            Chunk(chunk.query_start_loc, chunk.cu_seq_lens, tuple(q_lens[chunk.request_slice]), tuple(chunk.seq_lens.tolist()))
            for chunk in context.chunks
        ]
    return [
        Chunk(metadata.query_start_loc, starts, tuple(q_lens), tuple(lens.tolist()))
        for starts, lens in zip(context.cu_seq_lens, context.seq_lens, strict=True)
    ]


def host_kv_lens(common: Any) -> tuple[int, ...] | None:
    """Host copies of all key lengths of a batch, exact unless drafts are verified asynchronously; None where there are none."""
    lens = getattr(common, "seq_lens_cpu_upper_bound", None)
    return None if lens is None else tuple(lens.tolist())


def offer_to_workers(name: str, function: Callable[[Any], Any]) -> None:
    """Lets `collective_rpc(name)` call `function(worker)` in every worker process: this is called in each of them."""
    (worker,) = _from("v1.worker.worker_base", "WorkerBase")
    if not hasattr(worker, name):
        setattr(worker, name, function)


def full_graphs(config: Any) -> bool:
    """Whether whole decode steps are captured in CUDA graphs, as far as that is settled."""
    mode = getattr(config.compilation_config, "cudagraph_mode", None)
    return bool(mode is not None and mode.has_full_cudagraphs())


def context_rows(config: Any, page_size: int) -> int:
    """Cached tokens that vLLM gathers and up-projects at a time once its pages have `page_size` tokens."""
    (builder,) = _from("model_executor.layers.attention.mla_attention", "MLACommonMetadataBuilder")
    settled = copy.copy(config)  # the page may not be settled in `config` yet
    settled.cache_config = copy.copy(config.cache_config)
    settled.cache_config.block_size = page_size
    return int(builder.determine_chunked_prefill_workspace_size(settled))


def compact_layouts() -> Any:
    """The cache layouts in which a layer's pages lie side by side; None where vLLM has no other (0.26)."""
    (backend,) = _from("v1.attention", "backend")
    layouts = getattr(backend, "KVCacheLayout", None)
    return None if layouts is None else (layouts["LBNHC"], layouts["LBHNC"])


def refuse_parallelism(config: Any) -> None:
    """Raises UserError for the ways of splitting a batch that these classes do not serve."""
    parallel = config.parallel_config
    for name, flag in (
        ("decode_context_parallel_size", "--decode-context-parallel-size"),
        ("prefill_context_parallel_size", "--prefill-context-parallel-size"),
    ):
        if getattr(parallel, name, 1) > 1:
            raise UserError(
                f"mla_serve's attention backend does not serve {flag} above 1; leave it out, or name another backend"
            )
    if getattr(parallel, "enable_dbo", False) or getattr(parallel, "use_ubatching", False):
        raise UserError(
            "mla_serve's attention backend does not serve dual-batch overlap; leave out --enable-dbo, or name another backend"
        )


def cache_dtype_of(name: str) -> DType | None:
    """The dtype of vLLM's `kv_cache_dtype`; None where the cache has the model's own."""
    return "float8_e4m3fn" if name.startswith("fp8") else None


def verified_tokens(config: Any) -> int:
    """Query tokens of a request that one step of speculative decoding verifies; 1 without it."""
    speculative = getattr(config, "speculative_config", None)
    return 1 + (getattr(speculative, "num_speculative_tokens", None) or 0)
