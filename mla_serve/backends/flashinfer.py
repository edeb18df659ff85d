"""FlashInfer: `BatchMLAPagedAttentionWrapper` for decode, `BatchPrefillWithRaggedKVCacheWrapper` for prefill and context.

Both exist as fa2 (Ampere and later) and fa3 (Hopper); kernels are compiled when a width is first planned. Plans are made on the
host from exact host lengths. The block table is handed over as it is, a row a request, so planning copies nothing back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mla_serve.backends.base import AttentionError, Backend, BatchLayout, Kind, Limits, Plan, State, torch_dtype
from mla_serve.backends.flashinfer_plans import Pool
from mla_serve.backends.rows import blind_rows
from mla_serve.shapes import AttentionShape

__all__ = ["FlashInferFa2", "FlashInferFa3"]

_FLOAT8 = "float8_e4m3fn"
_LN2 = math.log(2.0)
_NO_KEYS = -1e4  # FlashInfer's LSE of a row without keys is a large negative number (5e4 times log2(e) or less), not -inf
_INDICES = 1 << 20  # bytes of a schedule: at most 16,384 pieces of work, nine int32 each, and the merge's
_SPLIT_ROWS = 64  # query rows of a block whose state may have to be merged


@dataclass(slots=True, weakref_slot=True)
class FlashInferPlan(Plan):
    """`wrapper` has planned this step. `blind` [tokens] is True for rows that see no key, None where there are none.

    `table` is the captured copy of the block table, None outside graphs.
    """

    wrapper: Any
    blind: Tensor | None = None
    table: Tensor | None = None


class _FlashInfer(Backend):
    """What fa2 and fa3 share."""

    library = "flashinfer-python"
    capturable = True
    needs_host_lens = True
    generation: str  # FlashInfer's name of the kernels
    widths: tuple[tuple[int, int], ...]  # (qk, v) of the un-absorbed form that it has kernels for

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._decode, self._ragged = Pool(self._new_decode), Pool(self._new_ragged)

    def kind(self, shape: AttentionShape) -> Kind:
        return Kind.FLASH

    def available(self) -> str | None:
        if self.device.type != "cuda":
            return f"needs a CUDA device, this is {self.device.type}"
        missing = None if find_spec("flashinfer") else "flashinfer is not installed (pip install flashinfer-python)"
        return self._wrong_gpu(torch.cuda.get_device_capability(self.device)) or missing

    def _wrong_gpu(self, capability: tuple[int, int]) -> str | None:
        have = f"this is sm_{capability[0]}{capability[1]}"
        return None if capability >= (8, 0) else f"needs sm_80, {have}"

    def supports(self, shape: AttentionShape) -> str | None:
        if shape.dtype not in ("bfloat16", "float16"):
            return f"takes bfloat16 and float16, not {shape.dtype}"
        if shape.absorbed:
            return self._decode_refusal(shape)
        if shape.graph:
            return "its ragged kernels are scheduled by each batch's lengths, so a graph cannot be replayed with others"
        if (shape.qk, shape.v) not in self.widths:
            known = ", ".join(f"{qk}/{v}" for qk, v in self.widths)
            return f"has kernels for widths {known}, not {shape.qk}/{shape.v}"
        return None

    def _decode_refusal(self, shape: AttentionShape) -> str | None:
        if (shape.v, shape.rope) != (512, 64):
            return f"takes a latent rank of 512 and rope 64, not {shape.v} and {shape.rope}"
        if shape.cache_dtype == _FLOAT8:
            if self.generation != "fa3":
                return "reads a float8 cache through its fa3 kernels only"
            return None if shape.dtype == "bfloat16" else f"reads a float8 cache with bfloat16 queries, not {shape.dtype}"
        if shape.cache_dtype not in (None, shape.dtype):
            return f"takes a cache of the queries' dtype, {shape.dtype}, not {shape.cache_dtype}"
        return None

    def _new_decode(self, **graph: Any) -> Any:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        multiprocessors = torch.cuda.get_device_properties(self.device).multi_processor_count
        partial = 2 * multiprocessors * _SPLIT_ROWS * (512 * 2 + 4)  # bytes of the states that are merged, output and LSE
        wrapper = BatchMLAPagedAttentionWrapper(self._bytes(partial + (1 << 20)), backend=self.generation, **graph)
        wrapper._int_workspace_buffer = self._bytes(_INDICES)  # the 8 MiB it takes by itself are mostly never used
        wrapper._pin_memory_int_workspace_buffer = torch.empty(_INDICES, dtype=torch.uint8, pin_memory=True)
        return wrapper

    def _new_ragged(self) -> Any:
        from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

        # fa2 splits the keys of few and long requests and merges the parts; fa3 does not.
        size = 256 << 20 if self.generation == "fa2" else 16 << 20
        return BatchPrefillWithRaggedKVCacheWrapper(self._bytes(size), "NHD", backend=self.generation)

    def _bytes(self, count: int) -> Tensor:
        with torch.inference_mode(False):
            return torch.zeros(count, dtype=torch.uint8, device=self.device)

    def prepare(self, shape: AttentionShape, limits: Limits) -> State:
        self.require(shape)
        return State(shape, limits)

    def plan(self, state: State, batch: BatchLayout, *, scale: float, reuse: Plan | None = None) -> FlashInferPlan:
        super().plan(state, batch, scale=scale)  # refuses missing or inexact host lengths
        plan = reuse if isinstance(reuse, FlashInferPlan) else self._fresh(state, batch, scale)
        plan.state, plan.batch, plan.scale = state, batch, scale
        (self._plan_decode if state.shape.absorbed else self._plan_ragged)(plan)
        return plan

    def _fresh(self, state: State, batch: BatchLayout, scale: float) -> FlashInferPlan:
        shape = state.shape
        if not shape.graph:
            pool = self._decode if shape.absorbed else self._ragged
            wrapper = pool.lend()
            plan = FlashInferPlan(state, batch, scale, wrapper)
            pool.until_gone(plan, wrapper)
            return plan
        table, requests = _table(self.name, batch), batch.num_requests

        def buffer(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=self.device)

        with torch.inference_mode(False):
            kept = torch.zeros_like(table, memory_format=torch.contiguous_format)
            wrapper = self._new_decode(
                use_cuda_graph=True, qo_indptr=buffer(requests + 1), kv_indptr=buffer(requests + 1),
                kv_indices=kept.view(-1), kv_len_arr=buffer(requests),
            )  # fmt: skip
        return FlashInferPlan(state, batch, scale, wrapper, table=kept)

    def _plan_decode(self, plan: FlashInferPlan) -> None:
        batch, shape = plan.batch, plan.state.shape
        table = _table(self.name, batch)
        if plan.table is not None and plan.table.shape != table.shape:
            raise AttentionError(
                f"a graph captured for a block table of {list(plan.table.shape)} cannot replay one of {list(table.shape)}"
            )
        assert batch.q_lens_host is not None
        assert batch.kv_lens_host is not None
        dtype = torch_dtype(shape.dtype)
        # Row i of the table begins at page i * width; only that many entries of a row are read as its length needs.
        starts = torch.arange(batch.num_requests + 1, dtype=torch.int32) * table.shape[1]
        self._decode.staging.plan(
            plan.wrapper, _starts(batch.q_lens_host), starts, table.reshape(-1),
            torch.tensor(batch.kv_lens_host, dtype=torch.int32), shape.heads, shape.v, shape.rope, batch.page_size,
            max(batch.q_lens_host, default=1) > 1 or (shape.graph and shape.q_len > 1), plan.scale, dtype,
            torch_dtype(shape.cache_dtype) if shape.cache_dtype else dtype,
        )  # fmt: skip

    def _plan_ragged(self, plan: FlashInferPlan) -> None:
        batch, shape = plan.batch, plan.state.shape
        assert batch.q_lens_host is not None
        assert batch.kv_lens_host is not None
        dtype = torch_dtype(shape.dtype)
        plan.blind = blind_rows(batch, causal=shape.causal, device=self.device)
        self._ragged.staging.plan(
            plan.wrapper, _starts(batch.q_lens_host), _starts(batch.kv_lens_host), shape.heads, shape.heads, shape.qk,
            head_dim_vo=shape.v, causal=shape.causal, sm_scale=plan.scale, q_data_type=dtype, kv_data_type=dtype,
        )  # fmt: skip

    def run_prefill(
        self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, need_lse: bool, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        assert isinstance(plan, FlashInferPlan)
        tokens = plan.batch.num_tokens
        result = q.new_empty(q.shape[0], q.shape[1], v.shape[2]) if out is None else out
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if need_lse else None
        if tokens and k.shape[0]:
            part = result[:tokens], None if lse is None else lse[:tokens]
            plan.wrapper.run(q[:tokens], k, v, out=part[0], lse=part[1], return_lse=need_lse)
            if part[1] is not None:
                part[1].mul_(_LN2)
            if plan.blind is not None:
                part[0].masked_fill_(plan.blind[:, None, None], 0.0)
                if part[1] is not None:
                    part[1].masked_fill_(plan.blind[:, None], -math.inf)
        else:
            tokens = 0
        _clear(result, lse, tokens)
        return result, lse

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
        assert isinstance(plan, FlashInferPlan)
        latent, tokens = q_nope.shape[2], plan.batch.num_tokens
        result = torch.empty_like(q_nope, memory_format=torch.contiguous_format) if out is None else out
        lse = torch.empty(q_nope.shape[:2], dtype=torch.float32, device=q_nope.device) if need_lse else None
        scales = {}
        if cache.dtype == torch.float8_e4m3fn:
            scales = {"ckv_scale": cache_scale, "kpe_scale": cache_scale}
        elif cache_scale != 1.0:
            raise AttentionError(f"{self.name} scales a float8 cache only, this one is {cache.dtype}")
        plan.wrapper.run(
            q_nope, q_pe, cache[..., :latent], cache[..., latent:], out=result, lse=lse, return_lse=need_lse,
            return_lse_base_on_e=need_lse, **scales,
        )  # fmt: skip
        if lse is not None:
            lse.masked_fill_(lse < _NO_KEYS, -math.inf)
        if not plan.state.shape.graph:
            _clear(result, lse, tokens)
        return result, lse


def _starts(lens: tuple[int, ...]) -> Tensor:
    """Host prefix sums [requests + 1], int32."""
    return torch.tensor([*accumulate(lens, initial=0)], dtype=torch.int32)


def _table(name: str, batch: BatchLayout) -> Tensor:
    if batch.block_table is None or batch.page_size is None:
        raise AttentionError(f"{name} needs a block table and a page size in its BatchLayout")
    return batch.block_table


def _clear(out: Tensor, lse: Tensor | None, tokens: int) -> None:
    """Rows of no request."""
    if tokens < out.shape[0]:
        out[tokens:].zero_()
        if lse is not None:
            lse[tokens:].fill_(-math.inf)


class FlashInferFa2(_FlashInfer):
    """FlashInfer's kernels for Ampere and everything later."""

    name = "flashinfer-fa2"
    generation = "fa2"
    widths = ((192, 128), (64, 64), (128, 128), (256, 256))


class FlashInferFa3(_FlashInfer):
    """FlashInfer's kernels for Hopper."""

    name = "flashinfer-fa3"
    generation = "fa3"
    takes_cache_scale = True
    widths = ((192, 128), (64, 64), (128, 128), (256, 256))

    def _wrong_gpu(self, capability: tuple[int, int]) -> str | None:
        return None if capability[0] == 9 else f"needs sm_90, this is sm_{capability[0]}{capability[1]}"
