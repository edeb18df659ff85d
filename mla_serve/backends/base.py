"""The contract of an attention backend: prepare once, plan once per step, run once per layer.

A backend wraps the kernels of one library on one device. It knows its library and nothing else: not the engine, not the
selector, not the other backends. `tests/backends/` holds the laws that each must pass; they are the other half of this file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate

import torch
from torch import Tensor

from mla_serve.errors import UserError
from mla_serve.shapes import AttentionShape

__all__ = ["AttentionError", "Backend", "BatchLayout", "Kind", "Limits", "Plan", "State", "torch_dtype"]


class AttentionError(UserError):
    """A kernel was asked for something it cannot do. The message names the backend and says why."""


class Kind(IntEnum):
    """Class of a kernel, the availability policy's rank: lower is better, flash and fused rank alike there."""

    FLASH = 0
    FUSED = 1
    UNFUSED = 2


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest call a State must serve, so that buffers are allocated once.

    `max_tokens` counts the query tokens of one call, `max_kv_tokens` the keys of one un-absorbed call (all requests together).
    """

    max_requests: int
    max_tokens: int
    max_kv_tokens: int


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Where each request's rows lie in the flat tensors of one step.

    The first `live_requests` of `num_requests` rows are real; the rest (graph padding) have length 0. Device tensors are int32:
    `query_start_loc` and `kv_start_loc` [num_requests + 1], `kv_lens` [num_requests], `block_table` [num_requests, max pages]
    (absorbed only; entries past a request's last page are never read). The host copies are None, or only upper bounds
    (`host_lens_exact` False), where the lengths live on the device alone. `max_q` and `max_kv` are upper bounds in tokens.
    """

    num_requests: int
    live_requests: int
    num_tokens: int
    max_q: int
    max_kv: int
    query_start_loc: Tensor
    kv_start_loc: Tensor
    kv_lens: Tensor
    q_lens_host: tuple[int, ...] | None
    kv_lens_host: tuple[int, ...] | None
    host_lens_exact: bool = True
    block_table: Tensor | None = None
    page_size: int | None = None

    @classmethod
    def make(
        cls,
        q_lens: Sequence[int],
        kv_lens: Sequence[int],
        device: torch.device,
        *,
        block_table: Tensor | None = None,
        page_size: int | None = None,
        live_requests: int | None = None,
    ) -> BatchLayout:
        """From host lengths, one entry per request. Raises ValueError if the lists differ in length or hold negatives."""
        if len(q_lens) != len(kv_lens) or min((*q_lens, *kv_lens), default=0) < 0:
            raise ValueError(f"need one query and one key length >= 0 per request, got {list(q_lens)} and {list(kv_lens)}")
        query_start = list(accumulate(q_lens, initial=0))
        kv_start = list(accumulate(kv_lens, initial=0))
        flat = torch.tensor([*query_start, *kv_start, *kv_lens], dtype=torch.int32).to(device, non_blocking=True)
        n = len(q_lens)
        return cls(
            num_requests=n,
            live_requests=n if live_requests is None else live_requests,
            num_tokens=query_start[-1],
            max_q=max(q_lens, default=0),
            max_kv=max(kv_lens, default=0),
            query_start_loc=flat[: n + 1],
            kv_start_loc=flat[n + 1 : 2 * n + 2],
            kv_lens=flat[2 * n + 2 :],
            q_lens_host=tuple(q_lens),
            kv_lens_host=tuple(kv_lens),
            block_table=block_table,
            page_size=page_size,
        )


@dataclass(slots=True)
class State:
    """What `prepare` allocates for one shape: subclasses add wrappers, workspaces, persistent buffers."""

    shape: AttentionShape
    limits: Limits


@dataclass(slots=True)
class Plan:
    """One step's schedule, shared by all layers of that step. Several may be live at once and share no mutable buffer."""

    state: State
    batch: BatchLayout
    scale: float


class Backend(ABC):
    """One library's attention kernels on one device.

    Class flags say what a candidate is filtered by: `gives_lse`; `capturable` (the same answer when captured once in a CUDA
    graph and replayed with other lengths); `needs_host_lens` (plan reads exact host lengths); `takes_cache_scale` (a float8
    latent cache); `page_sizes` and `head_counts` (None: any); `padded_head_counts` (where any is legal, those that are worth
    padding to); `leaks_nan` (may let NaN in unread slots of the cache through, as 0 * NaN; finite garbage never);
    `even_queries` (a decode takes the same number of query tokens from every request, or is refused at its plan);
    `batch_invariant` (it has a mode, asked for by the shape's flag of that name, in which a request's output and
    LSE are the same bits whoever its batch mates are and whether or not an LSE is asked for).
    """

    name: str
    library: str = "torch"  # distribution whose version a decision depends on
    gives_lse: bool = True
    capturable: bool = False
    needs_host_lens: bool = False
    takes_cache_scale: bool = False
    batch_invariant: bool = False
    leaks_nan: bool = False
    even_queries: bool = False
    page_sizes: tuple[int, ...] | None = None
    head_counts: tuple[int, ...] | None = None
    padded_head_counts: tuple[int, ...] = ()

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def libraries(self) -> tuple[str, ...]:
        """Every distribution that `library` may turn out to be, known before anything is imported."""
        return (self.library,)

    @abstractmethod
    def kind(self, shape: AttentionShape) -> Kind:
        """The kernel class this backend would use for `shape`. Only the availability policy asks."""

    @abstractmethod
    def available(self) -> str | None:
        """None if the library can run on this device, else why not, for a person. May import the library; runs no kernel."""

    @abstractmethod
    def supports(self, shape: AttentionShape) -> str | None:
        """None if `shape` can be run as it is, else the reason, for a person. Called only where `available()` is None."""

    def workspace_bytes(self, shape: AttentionShape) -> int:
        """Memory that a run of `shape` needs beside its inputs and output, about; 0 where it is little."""
        return 0

    def prepare(self, shape: AttentionShape, limits: Limits) -> State:
        """Allocates once for `shape` and everything up to `limits`. Raises AttentionError if `supports` would refuse."""
        self.require(shape)
        return State(shape, limits)

    def plan(self, state: State, batch: BatchLayout, *, scale: float, reuse: Plan | None = None) -> Plan:
        """Schedules one step. With `reuse` (an earlier Plan of this State) its buffers are refreshed in place, as graphs need.

        `scale` multiplies the logits; it comes from `shapes.softmax_scale` and never from a width. `batch` must fit the
        State's limits. Raises AttentionError where `needs_host_lens` and the host lengths are missing or inexact.
        """
        if self.needs_host_lens and (batch.kv_lens_host is None or not batch.host_lens_exact):
            raise AttentionError(f"{self.name} plans from exact host lengths, and this batch has none")
        if reuse is None:
            return Plan(state, batch, scale)
        reuse.state, reuse.batch, reuse.scale = state, batch, scale
        return reuse

    def run_prefill(
        self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, need_lse: bool, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Un-absorbed attention over packed rows; causal (bottom-right) if the State's shape is.

        q [tokens, heads, qk], k [kv tokens, heads, qk], v [kv tokens, heads, v], any strides with a dense last dimension; they
        and the storage behind them are left as they are. Returns out [tokens, heads, v], contiguous (written into `out` where
        given), and the natural-log LSE [tokens, heads] in float32, or None. A request without keys gives zeros and -inf.
        """
        raise AttentionError(f"{self.name} has no un-absorbed form")

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
        """Absorbed attention over the paged latent cache, causal (bottom-right) among a request's query tokens.

        q_nope [tokens, heads, latent] (already multiplied by W_UK), q_pe [tokens, heads, rope], cache
        [pages, page_size, latent + rope]; stored values times `cache_scale` are the latents. Returns out
        [tokens, heads, latent], contiguous, and the natural-log LSE [tokens, heads] in float32, or None.
        """
        raise AttentionError(f"{self.name} has no absorbed form")

    def require(self, shape: AttentionShape) -> None:
        """Raises AttentionError with the reason unless this backend is available and takes `shape`."""
        reason = self.available() or self.supports(shape)
        if reason is not None:
            raise AttentionError(f"{self.name} cannot run {shape.phase.value} attention here: {reason}")


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a `shapes.DType`; raises ValueError for any other name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {name!r}; use float32, bfloat16 or float16")
    return dtype
