"""FlashInfer's decode kernels for Blackwell: trtllm-gen, CuTe DSL, XQA and CUTLASS, each with its own constraints.

Written against the interface of FlashInfer 0.6.14 and never run by us on such a GPU: like every kernel, they serve only after
the gate has compared them with the reference there. Their LSE is left out, since nobody has tested its base.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mla_serve.backends.base import AttentionError, Backend, BatchLayout, Kind, Limits, Plan, State
from mla_serve.backends.rows import blind_rows_on_device
from mla_serve.shapes import AttentionShape

__all__ = ["FlashInferCuteDsl", "FlashInferCutlass", "FlashInferTrtllmGen", "FlashInferXqa"]

_WORKSPACE = 128 << 20  # bytes, as FlashInfer's documentation asks for
_TABLE_TOKENS = 128  # a row of the block table must cover a multiple of as many tokens


@dataclass(slots=True)
class BlackwellState(State):
    """`workspace` holds semaphores, which must be 0 at first and which the kernels reset themselves."""

    workspace: Tensor


@dataclass(slots=True)
class BlackwellPlan(Plan):
    """The batch's tensors, or under a graph the copies that were captured; `table` is widened to a whole tile."""

    kv_lens: Tensor
    table: Tensor
    blind: Tensor
    q_len: int
    max_kv: int


class _Blackwell(Backend):
    """What the four share: [requests, query tokens, heads, latent + rope] in, one cache of latents and rope parts."""

    library = "flashinfer-python"
    gives_lse = False
    capturable = True
    even_queries = True
    page_sizes = (32, 64)
    capabilities: tuple[int, ...] = (10,)  # major ones
    entry: str  # FlashInfer's name of the kernels
    latents: tuple[int, ...] = (512,)
    most_queries: int | None = None

    def kind(self, shape: AttentionShape) -> Kind:
        return Kind.FLASH

    def available(self) -> str | None:
        if self.device.type != "cuda":
            return f"needs a CUDA device, this is {self.device.type}"
        major, minor = torch.cuda.get_device_capability(self.device)
        if major not in self.capabilities:
            return f"needs {' or '.join(f'sm_{number}0' for number in self.capabilities)}, this is sm_{major}{minor}"
        return None if find_spec("flashinfer") else "flashinfer is not installed (pip install flashinfer-python)"

    def supports(self, shape: AttentionShape) -> str | None:
        if not shape.absorbed:
            return "takes the absorbed form only"
        if shape.dtype != "bfloat16" or shape.cache_dtype not in (None, "bfloat16"):
            return f"takes bfloat16 queries and cache here, not {shape.dtype} and {shape.cache_dtype or shape.dtype}"
        if shape.v not in self.latents or shape.rope != 64:
            known = " or ".join(map(str, self.latents))
            return f"takes a latent rank of {known} and rope 64, not {shape.v} and {shape.rope}"
        if shape.page_size not in self.page_sizes:
            return f"takes pages of {' or '.join(map(str, self.page_sizes))} tokens, not {shape.page_size}"
        if self.head_counts is not None and shape.heads not in self.head_counts:
            return f"takes {' or '.join(map(str, self.head_counts))} query heads, not {shape.heads}"
        if self.most_queries is not None and shape.q_len > self.most_queries:
            return f"takes {self.most_queries} query token of each request, not {shape.q_len}"
        return None

    def prepare(self, shape: AttentionShape, limits: Limits) -> BlackwellState:
        self.require(shape)
        with torch.inference_mode(False):
            return BlackwellState(shape, limits, torch.zeros(_WORKSPACE, dtype=torch.uint8, device=self.device))

    def plan(self, state: State, batch: BatchLayout, *, scale: float, reuse: Plan | None = None) -> BlackwellPlan:
        graph, table, page = state.shape.graph, batch.block_table, batch.page_size
        if table is None or page is None:
            raise AttentionError(f"{self.name} needs a block table and a page size in its BatchLayout")
        q_len = state.shape.q_len if graph else max(1, batch.max_q)
        live = batch.num_tokens // q_len
        even = live == batch.live_requests if batch.q_lens_host is None else set(batch.q_lens_host[:live]) <= {q_len}
        if live * q_len != batch.num_tokens or not even:
            raise AttentionError(f"{self.name} takes the same number of query tokens from every request, {q_len} of each")
        rows = batch.num_requests if graph else live
        short = -table.shape[1] % (_TABLE_TOKENS // page)
        fresh = batch.kv_lens[:rows], F.pad(table[:rows], (0, short)), blind_rows_on_device(batch, causal=True)
        max_kv = table.shape[1] * page if graph else max(1, batch.max_kv)
        if not isinstance(reuse, BlackwellPlan):
            if graph:
                with torch.inference_mode(False):  # written again at every step, in whatever mode
                    fresh = (fresh[0].clone(), fresh[1].clone(), fresh[2].clone())
            return BlackwellPlan(state, batch, scale, *fresh, q_len, max_kv)
        if graph:
            if reuse.table.shape != fresh[1].shape:
                raise AttentionError(
                    f"a graph captured for {list(reuse.table.shape)} pages cannot replay {list(fresh[1].shape)}"
                )
            reuse.kv_lens.copy_(fresh[0])
            reuse.table.copy_(fresh[1])
            reuse.blind[: fresh[2].shape[0]].copy_(fresh[2])
        else:
            reuse.kv_lens, reuse.table, reuse.blind, reuse.q_len, reuse.max_kv = *fresh, q_len, max_kv
        reuse.state, reuse.batch, reuse.scale = state, batch, scale
        return reuse

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
        assert isinstance(plan, BlackwellPlan)
        if need_lse or cache_scale != 1.0:
            raise AttentionError(f"{self.name} gives no LSE and scales no cache here")
        rows = plan.kv_lens.shape[0] * plan.q_len
        result = torch.empty_like(q_nope, memory_format=torch.contiguous_format) if out is None else out
        if rows:
            found = self._attend(q_nope[:rows], q_pe[:rows], cache, plan)
            blind = plan.blind[:rows, None, None]
            result[:rows] = found.reshape(result[:rows].shape).masked_fill(blind, 0.0)
        result[rows:].zero_()
        return result, None

    def _attend(self, q_nope: Tensor, q_pe: Tensor, cache: Tensor, plan: BlackwellPlan) -> Tensor:
        """out [rows, heads, latent], or any shape of as many elements in that order."""
        from flashinfer.mla import trtllm_batch_decode_with_kv_cache_mla

        assert isinstance(plan.state, BlackwellState)
        shape = plan.state.shape
        q = torch.cat([q_nope, q_pe], dim=-1).view(-1, plan.q_len, shape.heads, shape.qk)
        found: Tensor = trtllm_batch_decode_with_kv_cache_mla(
            query=q, kv_cache=cache, workspace_buffer=plan.state.workspace, qk_nope_head_dim=128, kv_lora_rank=shape.v,
            qk_rope_head_dim=shape.rope, block_tables=plan.table, seq_lens=plan.kv_lens, max_seq_len=plan.max_kv,
            bmm1_scale=plan.scale, bmm2_scale=1.0, backend=self.entry,
        )  # fmt: skip
        return found


class FlashInferTrtllmGen(_Blackwell):
    """TensorRT-LLM's generated kernels, for sm_100 and sm_103."""

    name = "flashinfer-trtllm-gen"
    entry = "trtllm-gen"
    latents = (512, 256)


class FlashInferCuteDsl(_Blackwell):
    """FlashInfer's own kernels in the CuTe language, for sm_100 and later."""

    name = "flashinfer-cute-dsl"
    entry = "cute-dsl"


class FlashInferXqa(_Blackwell):
    """XQA, for sm_120 and sm_121: 128 heads, one query token."""

    name = "flashinfer-xqa"
    entry = "xqa"
    capabilities = (12,)
    head_counts = (128,)
    most_queries = 1


class FlashInferCutlass(_Blackwell):
    """CUTLASS, for sm_100 and sm_110, through the MLA wrapper: 128 heads, one query token."""

    name = "flashinfer-cutlass"
    entry = "cutlass"
    capabilities = (10, 11)
    head_counts = (128,)
    most_queries = 1

    def _attend(self, q_nope: Tensor, q_pe: Tensor, cache: Tensor, plan: BlackwellPlan) -> Tensor:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        assert isinstance(plan.state, BlackwellState)
        latent = q_nope.shape[2]
        wrapper: Any = BatchMLAPagedAttentionWrapper(plan.state.workspace, backend="cutlass")
        # It has no argument for the scale of the logits and takes (128 + 64) ** -0.5 for granted.
        ratio = plan.scale / (128 + 64) ** -0.5
        found: Tensor = wrapper.run(
            (q_nope * ratio).contiguous(), (q_pe * ratio).contiguous(), cache[..., :latent], cache[..., latent:],
            kv_len=plan.kv_lens, page_table=plan.table,
        )  # fmt: skip
        return found
