"""FlashAttention 2, 3 and 4: un-absorbed attention, and in version 3 the absorbed form too.

Version 3 has an argument `qv` beside q: scores are q k^T + qv v^T. With the rope parts as q and k and the latents as v, that is
absorbed MLA over a paged cache, one read of each latent for both products.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_serve.backends.base import AttentionError, Backend, BatchLayout, Kind, Limits, Plan, State, torch_dtype
from mla_serve.backends.flash_attention_libraries import DISTRIBUTIONS, Library, Paged, Varlen, find
from mla_serve.backends.rows import blind, blind_rows_on_device
from mla_serve.shapes import AttentionShape

__all__ = ["FlashAttention2", "FlashAttention3", "FlashAttention4"]


@dataclass(slots=True)
class FlashPlan(Plan):
    """`schedule` is FlashAttention-3's division of a decode among the SMs.

    Under a graph the tensors of the batch are copied into the first plan's own, whose addresses were captured. `blind` [tokens]
    is True for rows that see no key, None where there are none.
    """

    blind: Tensor | None
    kv_lens: Tensor
    q_starts: Tensor
    table: Tensor | None = None
    schedule: Tensor | None = None
    max_kv: int = 0


class _FlashAttention(Backend):
    """What the versions share: finding the library, ragged rows, the LSE's layout."""

    version: int

    @property
    def libraries(self) -> tuple[str, ...]:
        return DISTRIBUTIONS[self.version]

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._found: Library | str | None = None

    @property
    def _library(self) -> Library | str:
        if self._found is None:
            self._found = find(self.version)
            if isinstance(self._found, Library):
                self.library = self._found.distribution
        return self._found

    def kind(self, shape: AttentionShape) -> Kind:
        return Kind.FLASH

    def available(self) -> str | None:
        if self.device.type != "cuda":
            return f"needs a CUDA device, this is {self.device.type}"
        reason = self._wrong_gpu(torch.cuda.get_device_capability(self.device))
        return reason or (None if isinstance(self._library, Library) else self._library)

    def _wrong_gpu(self, capability: tuple[int, int]) -> str | None:
        return None if capability >= (8, 0) else f"needs sm_80, {_this(capability)}"

    def supports(self, shape: AttentionShape) -> str | None:
        if shape.dtype not in ("bfloat16", "float16"):
            return f"takes bfloat16 and float16, not {shape.dtype}"
        if shape.absorbed:
            return self._decode_refusal(shape)
        if shape.graph:
            return "is called with each batch's longest lengths, so a graph cannot be replayed with others"
        if shape.qk % 8 or shape.v % 8:
            return f"needs widths in multiples of 8, not {shape.qk}/{shape.v}"
        return self._width_refusal(shape.qk, shape.v)

    def _width_refusal(self, qk: int, v: int) -> str | None:
        if qk != v:
            return f"needs equal QK and V widths ({qk}, {v})"
        return None if qk <= 256 else f"needs widths up to 256, not {qk}"

    def _decode_refusal(self, shape: AttentionShape) -> str | None:
        return "has no absorbed form"

    def prepare(self, shape: AttentionShape, limits: Limits) -> State:
        self.require(shape)
        return State(shape, limits)

    def plan(self, state: State, batch: BatchLayout, *, scale: float, reuse: Plan | None = None) -> Plan:
        without_keys = blind(batch, causal=state.shape.causal)
        if not isinstance(reuse, FlashPlan):
            return FlashPlan(state, batch, scale, without_keys, batch.kv_lens, batch.query_start_loc)
        reuse.state, reuse.batch, reuse.scale, reuse.blind = state, batch, scale, without_keys
        return reuse

    def run_prefill(
        self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, need_lse: bool, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        assert isinstance(plan, FlashPlan)
        batch, library = plan.batch, self._library
        assert isinstance(library, Library)
        tokens = batch.num_tokens if k.shape[0] else 0
        result = q.new_empty(q.shape[0], q.shape[1], v.shape[2]) if out is None else out
        lse = None
        if tokens:
            lengths = Varlen(batch.query_start_loc, batch.kv_start_loc, batch.max_q, batch.max_kv)
            _, found = library.prefill(q[:tokens], k, v, lengths, plan.scale, plan.state.shape.causal, result[:tokens])
            lse = _natural(found, plan.blind) if need_lse else None
        return _with_the_rest(result, lse, tokens, need_lse=need_lse)


class FlashAttention2(_FlashAttention):
    """FlashAttention-2, from Ampere up. Equal widths only."""

    name = "fa2"
    version = 2


class FlashAttention4(_FlashAttention):
    """FlashAttention-4, in CuTe, for Hopper and Blackwell; compiled when a width is first used."""

    name = "fa4"
    version = 4

    def _wrong_gpu(self, capability: tuple[int, int]) -> str | None:
        return None if capability[0] in (9, 10, 11) else f"needs sm_90, sm_100 or sm_110, {_this(capability)}"

    def _width_refusal(self, qk: int, v: int) -> str | None:
        if torch.cuda.get_device_capability(self.device)[0] == 9:
            return None if qk <= 256 and v <= 256 else f"takes widths up to 256 on Hopper, not {qk}/{v}"
        if max(qk, v) <= 128 or (qk, v) in ((192, 128), (256, 256)):
            return None
        return f"takes widths up to 128, 192/128 or 256/256 on Blackwell, not {qk}/{v}"


class FlashAttention3(_FlashAttention):
    """FlashAttention-3, for Hopper: unequal widths natively, and absorbed decode."""

    name = "fa3"
    version = 3
    capturable = True
    leaks_nan = True  # seen with 128 query tokens a request

    def _wrong_gpu(self, capability: tuple[int, int]) -> str | None:
        return None if capability[0] == 9 else f"needs sm_90, {_this(capability)}"

    def _width_refusal(self, qk: int, v: int) -> str | None:
        if qk == v:
            return super()._width_refusal(qk, v)
        if (128 < qk <= 192 and 96 < v <= 128) or (qk <= 64 and v <= 512):
            return None
        return f"takes unequal widths of 129 to 192 with V of 97 to 128, or up to 64 with V up to 512, not {qk}/{v}"

    def _decode_refusal(self, shape: AttentionShape) -> str | None:
        if not 0 < shape.rope <= 64 or not 256 <= shape.v <= 512 or shape.rope % 8 or shape.v % 8:
            return f"takes rope up to 64 and a latent rank of 256 to 512, in multiples of 8, not {shape.rope} and {shape.v}"
        if shape.cache_dtype not in (None, shape.dtype):
            return f"takes a cache of the queries' dtype, {shape.dtype}, not {shape.cache_dtype}"
        if (shape.page_size or 0) % 16:
            return f"takes pages of a multiple of 16 tokens, not {shape.page_size}"
        library = self._library
        return None if isinstance(library, Library) and library.decode else "the one that is installed has no absorbed form"

    def plan(self, state: State, batch: BatchLayout, *, scale: float, reuse: Plan | None = None) -> Plan:
        shape = state.shape
        if not shape.absorbed:
            return super().plan(state, batch, scale=scale, reuse=reuse)
        without_keys = blind_rows_on_device(batch, causal=True) if shape.graph else blind(batch, causal=True)
        table = batch.block_table
        if table is None or batch.page_size is None:
            raise AttentionError(f"{self.name} needs a block table and a page size in its BatchLayout")
        if not isinstance(reuse, FlashPlan):
            kv_lens, q_starts = batch.kv_lens, batch.query_start_loc
            if shape.graph:
                kv_lens, q_starts, table = _own(kv_lens), _own(q_starts), _own(table)
                assert without_keys is not None
                without_keys = _own(without_keys)
            reuse = FlashPlan(state, batch, scale, without_keys, kv_lens, q_starts, table)
        elif shape.graph:
            assert reuse.table is not None
            if reuse.table.shape != table.shape:
                raise AttentionError(
                    f"a graph captured for a block table of {list(reuse.table.shape)} cannot replay {list(table.shape)}"
                )
            reuse.kv_lens.copy_(batch.kv_lens)
            reuse.q_starts.copy_(batch.query_start_loc)
            reuse.table.copy_(table)
            assert reuse.blind is not None
            assert without_keys is not None
            reuse.blind[: without_keys.shape[0]].copy_(without_keys)
        else:
            reuse.blind = without_keys
            reuse.kv_lens, reuse.q_starts, reuse.table = batch.kv_lens, batch.query_start_loc, table
        reuse.state, reuse.batch, reuse.scale = state, batch, scale
        # What a graph was captured for holds for every replay, so it is the most that the table can hold.
        reuse.max_kv = table.shape[1] * batch.page_size if shape.graph else max(1, batch.max_kv)
        self._reschedule(reuse)
        return reuse

    def _reschedule(self, plan: FlashPlan) -> None:
        library, shape = self._library, plan.state.shape
        assert isinstance(library, Library)
        if library.schedule is None:
            return
        fresh = library.schedule(
            batch_size=plan.kv_lens.shape[0], max_seqlen_q=_most(plan), max_seqlen_k=plan.max_kv,
            num_heads_q=shape.heads, num_heads_kv=1, headdim=shape.rope, headdim_v=shape.v, cache_seqlens=plan.kv_lens,
            qkv_dtype=torch_dtype(shape.dtype), page_size=plan.batch.page_size, cu_seqlens_q=plan.q_starts, causal=True,
            num_splits=0,
        )  # fmt: skip
        if shape.graph and plan.schedule is not None:
            plan.schedule.copy_(fresh)
        else:
            plan.schedule = fresh

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
        assert isinstance(plan, FlashPlan)
        assert plan.table is not None
        library = self._library
        assert isinstance(library, Library)
        assert library.decode is not None
        if cache_scale != 1.0:
            raise AttentionError(f"{self.name} takes no scale for its cache")
        latent, graph = q_nope.shape[2], plan.state.shape.graph
        tokens = q_nope.shape[0] if graph else plan.batch.num_tokens
        result = torch.empty_like(q_nope, memory_format=torch.contiguous_format) if out is None else out
        lse = None
        if tokens:
            paged = Paged(plan.q_starts, _most(plan), plan.kv_lens, plan.max_kv, plan.table, plan.schedule)
            keys = cache.unsqueeze(2)  # one key head
            _, found = library.decode(
                q_pe[:tokens], q_nope[:tokens], keys[..., latent:], keys[..., :latent], paged, plan.scale, result[:tokens]
            )
            lse = _natural(found, plan.blind) if need_lse else None
        return _with_the_rest(result, lse, tokens, need_lse=need_lse)


def _most(plan: FlashPlan) -> int:
    """Query tokens of the longest request; what a graph was captured for holds for every replay."""
    return plan.state.shape.q_len if plan.state.shape.graph else max(1, plan.batch.max_q)


def _own(tensor: Tensor) -> Tensor:
    """A copy that every step may write, in whatever mode it runs."""
    with torch.inference_mode(False):
        return torch.empty_like(tensor, memory_format=torch.contiguous_format).copy_(tensor)


def _natural(lse: Tensor, blind: Tensor | None) -> Tensor:
    """[tokens, heads], a view of FlashAttention's [heads, tokens], whose rows without keys are +inf."""
    lse = lse.transpose(0, 1)
    return lse if blind is None else lse.masked_fill_(blind[:, None], -math.inf)


def _with_the_rest(out: Tensor, lse: Tensor | None, tokens: int, *, need_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Adds what rows of no request hold, those from `tokens` on."""
    if tokens < out.shape[0]:
        out[tokens:].zero_()
        if need_lse:
            rest = torch.full((out.shape[0] - tokens, out.shape[1]), -math.inf, dtype=torch.float32, device=out.device)
            lse = rest if lse is None else torch.cat([lse, rest])
    return out, lse


def _this(capability: tuple[int, int]) -> str:
    return f"this is sm_{capability[0]}{capability[1]}"
