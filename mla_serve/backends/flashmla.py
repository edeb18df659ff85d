"""FlashMLA's dense decode for Hopper: absorbed, pages of 64, widths 576 and 512; vLLM's bundle or the stand-alone package.

Its schedule is made on the device by the first call that is given none, from the lengths alone, and every later call of the
step reuses it. A captured graph keeps the addresses of its first schedule, so there a step's plan makes a call of its own, on
one page of zeros, and copies the schedule that comes out.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from mla_serve.backends.base import AttentionError, Backend, BatchLayout, Kind, Limits, Plan, State, torch_dtype
from mla_serve.shapes import AttentionShape

__all__ = ["FlashMLA"]


@dataclass(slots=True)
class FlashMLAPlan(Plan):
    """`schedule` is the library's scheduler metadata. Under a graph `kv_lens` and `table` are the captured ones."""

    blind: Tensor  # [rows, q_len], True where a query sees no key
    kv_lens: Tensor
    table: Tensor
    q_len: int
    schedule: Any


class FlashMLA(Backend):
    """Any number of query heads runs; heads times query tokens fill tiles of 64 rows, so padding to 64 is worth a try."""

    name = "flashmla"
    library = "flash-mla"
    capturable = True
    even_queries = True
    page_sizes = (64,)
    padded_head_counts = (64, 128)

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._found: Any = None
        self._writes_into = False

    @property
    def libraries(self) -> tuple[str, ...]:
        return ("vllm", "flash-mla")

    def kind(self, shape: AttentionShape) -> Kind:
        return Kind.FLASH

    def available(self) -> str | None:
        if self.device.type != "cuda":
            return f"needs a CUDA device, this is {self.device.type}"
        capability = torch.cuda.get_device_capability(self.device)
        if capability[0] != 9:
            return f"needs sm_90, this is sm_{capability[0]}{capability[1]}"
        if self._found is None:
            self._found = self._find()
        return self._found if isinstance(self._found, str) else None

    def _find(self) -> Any:
        """The module with `flash_mla_with_kvcache`, or why there is none."""
        tried = []
        for distribution, package, module in (
            ("vllm", "vllm", "vllm.third_party.flashmla.flash_mla_interface"),
            ("flash-mla", "flash_mla", "flash_mla"),
        ):
            if find_spec(package) is None:
                tried.append(f"{distribution} is not installed")
                continue
            try:
                found = import_module(module)
                first = next(iter(inspect.signature(found.get_mla_metadata).parameters.values()))
            except (ImportError, OSError, RuntimeError, AttributeError) as error:
                tried.append(f"{distribution} cannot be used ({type(error).__name__}: {error})")
                continue
            if first.kind is not inspect.Parameter.VAR_POSITIONAL:
                tried.append(f"{distribution} has an interface from before 2026")
                continue
            self.library = distribution
            self._writes_into = "out" in inspect.signature(found.flash_mla_with_kvcache).parameters
            return found
        return "; ".join(tried)

    def supports(self, shape: AttentionShape) -> str | None:
        if not shape.absorbed:
            return "takes the absorbed form only"
        if shape.dtype not in ("bfloat16", "float16"):
            return f"takes bfloat16 and float16, not {shape.dtype}"
        if shape.page_size not in self.page_sizes:
            return f"takes pages of 64 tokens, not {shape.page_size}"
        if (shape.v, shape.rope) != (512, 64):
            return f"takes a latent rank of 512 and rope 64, not {shape.v} and {shape.rope}"
        if shape.cache_dtype not in (None, shape.dtype):
            return f"takes a cache of the queries' dtype, {shape.dtype}, not {shape.cache_dtype}"
        return None

    def prepare(self, shape: AttentionShape, limits: Limits) -> State:
        self.require(shape)
        return State(shape, limits)

    def plan(self, state: State, batch: BatchLayout, *, scale: float, reuse: Plan | None = None) -> FlashMLAPlan:
        table, graph = batch.block_table, state.shape.graph
        if table is None or batch.page_size is None:
            raise AttentionError(f"{self.name} needs a block table and a page size in its BatchLayout")
        q_len = state.shape.q_len if graph else max(1, batch.max_q)
        live = batch.num_tokens // q_len
        even = live * q_len == batch.num_tokens and (
            live == batch.live_requests if batch.q_lens_host is None else all(n == q_len for n in batch.q_lens_host[:live])
        )
        if not even:
            raise AttentionError(f"{self.name} takes the same number of query tokens from every request, {q_len} of each")
        rows = batch.num_requests if graph else live
        kv_lens, table = batch.kv_lens[:rows], table[:rows]
        if not isinstance(reuse, FlashMLAPlan):
            without_keys = _blind(kv_lens, q_len)
            if graph:
                with torch.inference_mode(False):  # written again at every step, in whatever mode
                    kv_lens, table, without_keys = (
                        torch.empty_like(t, memory_format=torch.contiguous_format).copy_(t)
                        for t in (kv_lens, table, without_keys)
                    )
            reuse = FlashMLAPlan(state, batch, scale, without_keys, kv_lens, table, q_len, self._new_schedule())
        elif graph:
            if reuse.table.shape != table.shape:
                raise AttentionError(
                    f"a graph captured for a block table of {list(reuse.table.shape)} cannot replay {list(table.shape)}"
                )
            reuse.kv_lens.copy_(kv_lens)
            reuse.table.copy_(table)
            reuse.blind.copy_(_blind(kv_lens, q_len))
        else:
            reuse.blind = _blind(kv_lens, q_len)
            reuse.kv_lens, reuse.table, reuse.schedule = kv_lens, table, self._new_schedule()
        reuse.state, reuse.batch, reuse.scale, reuse.q_len = state, batch, scale, q_len
        if graph:
            self._reschedule(reuse)
        return reuse

    def _new_schedule(self) -> Any:
        return self._found.get_mla_metadata()[0]

    def _reschedule(self, plan: FlashMLAPlan) -> None:
        """Schedules for the lengths in `plan`, into the tensors that a graph may have captured."""
        shape, rows = plan.state.shape, plan.kv_lens.shape[0]
        dtype, fresh = torch_dtype(shape.dtype), self._new_schedule()
        with torch.inference_mode(False), torch.no_grad():
            q = torch.zeros(rows, plan.q_len, shape.heads, shape.qk, dtype=dtype, device=self.device)
            page = torch.zeros(1, 64, 1, shape.qk, dtype=dtype, device=self.device)
            self._found.flash_mla_with_kvcache(
                q, page, torch.zeros_like(plan.table), plan.kv_lens, shape.v, fresh, softmax_scale=plan.scale, causal=True
            )
        if plan.schedule.tile_scheduler_metadata is None:
            plan.schedule = fresh
        else:
            plan.schedule.tile_scheduler_metadata.copy_(fresh.tile_scheduler_metadata)
            plan.schedule.num_splits.copy_(fresh.num_splits)

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
        assert isinstance(plan, FlashMLAPlan)
        if cache_scale != 1.0:
            raise AttentionError(f"{self.name} takes no scale for its cache")
        tokens, heads, latent = q_nope.shape
        rows, q_len = plan.kv_lens.shape[0], plan.q_len
        result = torch.empty_like(q_nope, memory_format=torch.contiguous_format) if out is None else out
        live = rows * q_len
        lse = None
        if live:
            q = torch.cat([q_nope[:live], q_pe[:live]], dim=-1).view(rows, q_len, heads, -1)
            # Where it takes an output, it is laid out as it computes: one key head, and all query rows that share it.
            into = {"out": result[:live].view(rows, 1, q_len * heads, latent)} if self._writes_into else {}
            answer, found = self._found.flash_mla_with_kvcache(
                q, cache.unsqueeze(2), plan.table, plan.kv_lens, latent, plan.schedule, softmax_scale=plan.scale, causal=True,
                **into,
            )  # fmt: skip
            if not into:
                result[:live].view(rows, q_len, heads, latent).copy_(answer)
            if need_lse:  # [rows, heads, q_len], +inf where there are no keys
                lse = found.masked_fill(plan.blind[:, None], -math.inf).transpose(1, 2).reshape(live, heads)
        if live < tokens:
            result[live:].zero_()
            rest = torch.full((tokens - live, heads), -math.inf, dtype=torch.float32, device=q_nope.device)
            lse = (rest if lse is None else torch.cat([lse, rest])) if need_lse else None
        return result, lse


def _blind(kv_lens: Tensor, q_len: int) -> Tensor:
    """[rows, q_len]: the last query of a request sees all its keys, the one before it one fewer."""
    return torch.arange(q_len, device=kv_lens.device) < q_len - kv_lens[:, None]
