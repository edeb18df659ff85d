"""Our own decode kernel: absorbed paged attention in one launch, from Ampere up; on a CPU under Triton's interpreter."""

from __future__ import annotations

import math
import os
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from mla_serve.backends.base import AttentionError, Backend, BatchLayout, Kind, Limits, Plan, State
from mla_serve.backends.triton_mla_tuning import AMPERE_SHARED, INTERPRETER, Gpu, Tuning, choose, up
from mla_serve.shapes import AttentionShape

__all__ = ["TritonMLA", "TritonPlan", "TritonState"]

_WIDEST = 1024  # latent columns: a tile's sums are kept in registers


@dataclass(slots=True)
class TritonState(State):
    tuning: Tuning
    programs: int


@dataclass(slots=True)
class TritonPlan(Plan):
    """All that a run reads beside its inputs. The schedule's tensors and the workspace keep their addresses; see the kernel."""

    table: Tensor
    schedule: Tensor
    requests: Tensor
    starts: Tensor
    counters: Tensor
    partial: Tensor
    partial_lse: Tensor


class TritonMLA(Backend):
    """Any widths, page sizes, head counts and query tokens; uneven batches are balanced by a schedule made on the device."""

    name = "triton-mla"
    library = "triton"
    capturable = True
    takes_cache_scale = True

    def kind(self, shape: AttentionShape) -> Kind:
        """Flash by what it does; ranked last until it has run on a GPU, so that nobody gets it unmeasured."""
        return Kind.UNFUSED

    def available(self) -> str | None:
        if self.device.type == "cuda":
            capability = torch.cuda.get_device_capability(self.device)
            if capability < (8, 0):
                return f"needs sm_80 or newer, this is sm_{capability[0]}{capability[1]}"
        elif self.device.type != "cpu" or os.environ.get("TRITON_INTERPRET") != "1":
            return "needs a CUDA device of sm_80 or newer, or Triton's interpreter (TRITON_INTERPRET=1)"
        if find_spec("triton") is None:
            return "triton is not installed"
        try:
            _kernels()
        except (ImportError, OSError, RuntimeError, AttributeError) as error:
            return f"triton cannot be used ({type(error).__name__}: {error})"
        return None

    def supports(self, shape: AttentionShape) -> str | None:
        if not shape.absorbed:
            return "takes the absorbed form only"
        if shape.dtype not in ("float32", "bfloat16", "float16"):
            return f"takes float32, bfloat16 and float16, not {shape.dtype}"
        if shape.qk != shape.v + shape.rope:
            return f"takes keys of latent and rope, {shape.v} + {shape.rope}, not {shape.qk} wide"
        if shape.v > _WIDEST:
            return f"takes latents up to {_WIDEST} wide, not {shape.v}"
        if shape.cache_dtype == "float8_e4m3fn":
            gpu = self.gpu()
            if 0 < gpu.capability < 89:
                return f"takes a float8 cache from sm_89 on, this is sm_{gpu.capability}"
        return None

    def gpu(self) -> Gpu:
        """What the tuning depends on, of this device."""
        if self.device.type != "cuda":
            return INTERPRETER
        found: Any = torch.cuda.get_device_properties(self.device)  # torch's stubs lack `shared_memory_per_block_optin`
        if os.environ.get("DISABLE_MMA_V3") == "1":  # Triton then leaves Hopper's products out, as `--emulate sm80` asks it to
            return Gpu(80, found.multi_processor_count, min(AMPERE_SHARED, found.shared_memory_per_block_optin))
        return Gpu(found.major * 10 + found.minor, found.multi_processor_count, found.shared_memory_per_block_optin)

    def workspace_bytes(self, shape: AttentionShape) -> int:
        gpu = self.gpu()
        tuning = choose(shape, gpu)
        return 2 * gpu.multiprocessors * tuning.programs * tuning.block_m * (up(shape.v) + 1) * 4

    def prepare(self, shape: AttentionShape, limits: Limits) -> TritonState:
        self.require(shape)
        gpu = self.gpu()
        tuning = choose(shape, gpu)
        return TritonState(shape, limits, tuning, gpu.multiprocessors * tuning.programs)

    def plan(self, state: State, batch: BatchLayout, *, scale: float, reuse: Plan | None = None) -> TritonPlan:
        assert isinstance(state, TritonState)
        table = batch.block_table
        if table is None or batch.page_size is None:
            raise AttentionError(f"{self.name} needs a block table and a page size in its BatchLayout")
        graph, n = state.shape.graph, batch.num_requests
        plan = reuse if isinstance(reuse, TritonPlan) else self._new_plan(state, batch, scale)
        if graph:
            if plan.table.shape != table.shape:
                raise AttentionError(
                    f"a graph captured for a block table of {list(plan.table.shape)} cannot replay {list(table.shape)}"
                )
            plan.table.copy_(table)
        else:
            plan.table = table if table.stride(1) == 1 else table.contiguous()
            if plan.requests.shape[0] < n:
                plan.requests = plan.requests.new_empty(n, 5)
        plan.state, plan.batch, plan.scale = state, batch, scale
        most = up(max(n, state.limits.max_requests))
        with self._on_device():
            _kernels()[0][(1,)](
                batch.query_start_loc, batch.kv_lens, plan.schedule, plan.requests, plan.starts, plan.counters,
                n, -(-state.tuning.least_keys // state.tuning.block_n),
                HEADS=state.shape.heads, PROGRAMS=state.programs, BLOCK_M=state.tuning.block_m, BLOCK_N=state.tuning.block_n,
                BLOCK_REQUESTS=most, BLOCK_PROGRAMS=up(state.programs), LOG_REQUESTS=most.bit_length() - 1,
            )  # fmt: skip
        return plan

    def _new_plan(self, state: TritonState, batch: BatchLayout, scale: float) -> TritonPlan:
        assert batch.block_table is not None
        table, slots = batch.block_table, 2 * state.programs
        device, width = table.device, up(max(16, state.shape.v))
        with torch.inference_mode(False):  # written again at every step, in whatever mode
            schedule = torch.empty(3, dtype=torch.int32, device=device)
            requests = torch.empty(batch.num_requests, 5, dtype=torch.int32, device=device)
            starts = torch.empty(state.programs, dtype=torch.int32, device=device)
            counters = torch.empty(2, slots, dtype=torch.int32, device=device)
            partial = torch.empty(slots, state.tuning.block_m, width, device=device)
            partial_lse = torch.empty(slots, state.tuning.block_m, device=device)
            if state.shape.graph:
                table = torch.empty_like(table, memory_format=torch.contiguous_format)
        return TritonPlan(state, batch, scale, table, schedule, requests, starts, counters, partial, partial_lse)

    def _on_device(self) -> Any:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

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
        """As the contract says; not differentiable. Scores, softmax, sums and LSE are float32 whatever the inputs' dtypes."""
        assert isinstance(plan, TritonPlan)
        assert isinstance(plan.state, TritonState)
        tokens, heads, latent = q_nope.shape
        rope, tuning = q_pe.shape[2], plan.state.tuning
        q_nope, q_pe = _dense(q_nope), _dense(q_pe)
        if cache.stride(2) != 1:
            raise AttentionError(f"{self.name} takes a cache whose last dimension is dense, not strides {cache.stride()}")
        result = torch.empty((tokens, heads, latent), dtype=q_nope.dtype, device=q_nope.device) if out is None else out
        lse = torch.empty((tokens, heads), dtype=torch.float32, device=q_nope.device) if need_lse else None
        with self._on_device():
            _kernels()[1][(plan.state.programs,)](
                q_nope, q_pe if rope else q_nope, cache, result, result if lse is None else lse, plan.table,
                plan.schedule, plan.requests, plan.starts, plan.partial, plan.partial_lse, plan.counters,
                tokens, q_nope.stride(0), q_nope.stride(1), q_pe.stride(0), q_pe.stride(1),
                cache.stride(0), cache.stride(1), result.stride(0), result.stride(1), plan.table.stride(0),
                plan.scale * cache_scale / math.log(2.0), cache_scale, tuning.fan,
                NEED_LSE=need_lse, HEADS=heads, LATENT=latent, ROPE=rope, PAGE=cache.shape[1],
                BLOCK_M=tuning.block_m, BLOCK_N=tuning.block_n, BLOCK_L=plan.partial.shape[2], BLOCK_R=up(max(16, rope)),
                PART=min(tuning.part, plan.partial.shape[2]), SWAP=tuning.swap,
                INTERPRETED=q_nope.device.type == "cpu",
                num_warps=tuning.warps, num_stages=tuning.stages,
            )  # fmt: skip
        return result, lse


def _kernels() -> tuple[Any, Any]:
    """The schedule's kernel and decode's. Triton is imported here, on first use: it is large, and not everywhere."""
    schedule = import_module("mla_serve.backends.triton_mla_schedule")
    decode = import_module("mla_serve.backends.triton_mla_kernel")
    return schedule.plan_kernel, decode.decode_kernel


def _dense(t: Tensor) -> Tensor:
    return t if t.stride(2) == 1 or not t.shape[2] else t.contiguous()
