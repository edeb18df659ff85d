"""Where FlashAttention is found: in vLLM's bundle or in the stand-alone packages, behind one calling convention.

All give a natural-log LSE [heads, tokens], take rows packed by `cu_seqlens`, and align a causal mask at the bottom right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import Tensor

Result = tuple[Tensor, Tensor]  # out [tokens, heads, v], lse [heads, tokens]


@dataclass(frozen=True, slots=True)
class Varlen:
    """The lengths of one call; device tensors are int32."""

    q_starts: Tensor
    k_starts: Tensor
    max_q: int
    max_k: int


@dataclass(frozen=True, slots=True)
class Paged:
    """A decode's query lengths and what of the cache it reads; `schedule` is FlashAttention-3's own, or None."""

    q_starts: Tensor
    max_q: int
    kv_lens: Tensor
    max_kv: int
    block_table: Tensor
    schedule: Tensor | None


@dataclass(frozen=True, slots=True)
class Library:
    """One installed FlashAttention. `distribution` is what a decision's version is of.

    `prefill(q, k, v, lengths, scale, causal, out)`; `decode(q_pe, q_nope, k_pe, latents, paged, scale, out)` and `schedule`
    in version 3 only, where `schedule` may be None.
    """

    distribution: str
    prefill: Callable[[Tensor, Tensor, Tensor, Varlen, float, bool, Tensor | None], Result]
    decode: Callable[[Tensor, Tensor, Tensor, Tensor, Paged, float, Tensor | None], Result] | None = None
    schedule: Callable[..., Tensor] | None = None


DISTRIBUTIONS = {2: ("vllm", "flash-attn"), 3: ("vllm", "flash-attn-3"), 4: ("vllm", "flash-attn-4")}


def find(version: int) -> Library | str:
    """The library that has FlashAttention `version` (2, 3 or 4), or why there is none."""
    tried = []
    for look in (_bundle, {2: _package_2, 3: _package_3, 4: _package_4}[version]):
        try:
            found = look(version)
        except (ImportError, OSError, RuntimeError, AttributeError) as error:  # a build for another torch fails in its own way
            tried.append(f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}")
            continue
        if isinstance(found, Library):
            return found
        tried.append(found)
    return "; ".join(tried)


def _bundle(version: int) -> Library | str:
    if find_spec("vllm") is None or find_spec("vllm.vllm_flash_attn") is None:
        return "vLLM, which has a copy, is not installed"
    bundle: Any = import_module("vllm.vllm_flash_attn.flash_attn_interface")
    if not getattr(bundle, f"FA{version}_AVAILABLE", False):
        why = getattr(bundle, f"FA{version}_UNAVAILABLE_REASON", None)
        return f"vLLM's bundle has no FlashAttention-{version}" + (f" ({why})" if why else "")
    if version == 4:
        import_module("vllm.vllm_flash_attn.cute.interface")  # written in a language that has to be installed too
    return Library("vllm", *_of_vllm(bundle, version))


def _of_vllm(bundle: Any, version: int) -> tuple[Any, Any, Any]:
    def prefill(q: Tensor, k: Tensor, v: Tensor, at: Varlen, scale: float, causal: bool, out: Tensor | None) -> Result:
        result: Result = bundle.flash_attn_varlen_func(
            q, k, v, max_seqlen_q=at.max_q, cu_seqlens_q=at.q_starts, max_seqlen_k=at.max_k, cu_seqlens_k=at.k_starts,
            softmax_scale=scale, causal=causal, return_softmax_lse=True, out=out, fa_version=version,
        )  # fmt: skip
        return result

    def decode(
        q_pe: Tensor, q_nope: Tensor, k_pe: Tensor, latents: Tensor, at: Paged, scale: float, out: Tensor | None
    ) -> Result:  # fmt: skip
        result: Result = bundle.flash_attn_varlen_func(
            q=q_pe, k=k_pe, v=latents, q_v=q_nope, max_seqlen_q=at.max_q, cu_seqlens_q=at.q_starts, max_seqlen_k=at.max_kv,
            seqused_k=at.kv_lens, block_table=at.block_table, softmax_scale=scale, causal=True, return_softmax_lse=True,
            out=out, fa_version=3, scheduler_metadata=at.schedule, num_splits=0,
        )  # fmt: skip
        return result

    return (prefill, decode, bundle.get_scheduler_metadata) if version == 3 else (prefill, None, None)


def _package_2(version: int) -> Library | str:
    if find_spec("flash_attn") is None:
        return "the package flash-attn is not installed"
    package: Any = import_module("flash_attn.flash_attn_interface")

    def prefill(q: Tensor, k: Tensor, v: Tensor, at: Varlen, scale: float, causal: bool, out: Tensor | None) -> Result:
        result, lse, _ = package.flash_attn_varlen_func(
            q, k, v, at.q_starts, at.k_starts, at.max_q, at.max_k, softmax_scale=scale, causal=causal, return_attn_probs=True
        )
        return (result if out is None else out.copy_(result)), lse

    return Library("flash-attn", prefill)


def _package_3(version: int) -> Library | str:
    if find_spec("flash_attn_interface") is None:
        return "the package flash-attn-3 is not installed"
    package: Any = import_module("flash_attn_interface")

    def prefill(q: Tensor, k: Tensor, v: Tensor, at: Varlen, scale: float, causal: bool, out: Tensor | None) -> Result:
        result, lse = package.flash_attn_varlen_func(
            q, k, v, at.q_starts, at.k_starts, at.max_q, at.max_k, softmax_scale=scale, causal=causal, return_attn_probs=True
        )
        return (result if out is None else out.copy_(result)), lse

    def decode(
        q_pe: Tensor, q_nope: Tensor, k_pe: Tensor, latents: Tensor, at: Paged, scale: float, out: Tensor | None
    ) -> Result:  # fmt: skip
        result, lse, *_ = package.flash_attn_with_kvcache(
            q_pe, k_pe, latents, qv=q_nope, cache_seqlens=at.kv_lens, page_table=at.block_table, cu_seqlens_q=at.q_starts,
            max_seqlen_q=at.max_q, softmax_scale=scale, causal=True, num_splits=0, return_softmax_lse=True,
        )  # fmt: skip
        return (result if out is None else out.copy_(result)), lse

    return Library("flash-attn-3", prefill, decode)


def _package_4(version: int) -> Library | str:
    if find_spec("flash_attn") is None or find_spec("flash_attn.cute") is None:
        return "the package flash-attn-4 (flash_attn.cute) is not installed"
    package: Any = import_module("flash_attn.cute.interface")

    def prefill(q: Tensor, k: Tensor, v: Tensor, at: Varlen, scale: float, causal: bool, out: Tensor | None) -> Result:
        result, lse = package.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=at.q_starts, cu_seqlens_k=at.k_starts, max_seqlen_q=at.max_q, max_seqlen_k=at.max_k,
            softmax_scale=scale, causal=causal, return_lse=True,
        )  # fmt: skip
        return (result if out is None else out.copy_(result)), lse

    return Library("flash-attn-4", prefill)
