"""The look-up on the hot path: a model's calls to their kernels, decided once per bucket."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter_ns
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mla_serve.backends.base import AttentionError, Backend, BatchLayout, Limits, Plan, State
from mla_serve.backends.padded import Padding
from mla_serve.errors import UserError
from mla_serve.selection.decision import Decision
from mla_serve.selection.pins import PinError
from mla_serve.shapes import AttentionShape, DType, MLADims

if TYPE_CHECKING:
    from mla_serve.selection.selector import Selector

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """A backend (maybe padded) with the State it was prepared with, and the decision that chose it."""

    backend: Backend
    state: State
    decision: Decision

    def plan(self, batch: BatchLayout, *, scale: float, reuse: Plan | None = None) -> Plan:
        """See `Backend.plan`."""
        return self.backend.plan(self.state, batch, scale=scale, reuse=reuse)

    def run_prefill(
        self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, need_lse: bool, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """See `Backend.run_prefill`."""
        return self.backend.run_prefill(q, k, v, plan, need_lse=need_lse, out=out)

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
        """See `Backend.run_decode`."""
        return self.backend.run_decode(q_nope, q_pe, cache, plan, cache_scale=cache_scale, need_lse=need_lse, out=out)


class BoundSelector:
    """Kernels of one model on one device, by the integers of a step. A hit is one dictionary access.

    Token counts are totals over the batch's live requests; `batch` is at least 1. A miss decides, checks and prepares, and
    raises PinError or AttentionError. All buckets of a kernel that differ in sizes alone share one State, prepared for
    `limits`: workspaces and padded buffers are large, and Plans, which share nothing, carry what a step needs.
    """

    def __init__(
        self,
        selector: Selector,
        dims: MLADims,
        *,
        dtype: DType,
        page_size: int,
        limits: Limits,
        cache_dtype: DType | None = None,
    ) -> None:
        self.dims, self.dtype, self.page_size, self.limits, self.cache_dtype = dims, dtype, page_size, limits, cache_dtype
        self._selector = selector
        self._kernels: dict[tuple[int, ...], Kernel] = {}
        self._states: dict[tuple[str, Padding | None, AttentionShape], tuple[Backend, State]] = {}

    def prefill(self, batch: int, q_tokens: int, *, lse: bool) -> Kernel:
        """For new tokens on themselves; `lse` where cached context will be merged in."""
        key = (0, (batch - 1).bit_length(), ((q_tokens - 1) // batch).bit_length(), lse)
        kernel = self._kernels.get(key)
        return kernel if kernel is not None else self._bind(key)

    def context(self, batch: int, q_tokens: int, kv_tokens: int) -> Kernel:
        """For new tokens on a chunk of cached context, up-projected."""
        key = (
            1, (batch - 1).bit_length(), ((q_tokens - 1) // batch).bit_length(), ((kv_tokens - 1) // batch).bit_length(),
        )  # fmt: skip
        kernel = self._kernels.get(key)
        return kernel if kernel is not None else self._bind(key)

    def decode(self, batch: int, kv_tokens: int, *, ragged: bool, q_len: int = 1, graph: bool = False) -> Kernel:
        """For `q_len` new tokens per request on the cache, themselves included; `ragged`: the longest over twice the mean.

        `graph`: to be captured in a CUDA graph and replayed.
        """
        key = (2, (batch - 1).bit_length(), ((kv_tokens - 1) // batch).bit_length(), ragged, q_len, graph)
        kernel = self._kernels.get(key)
        return kernel if kernel is not None else self._bind(key)

    def reserve(self, shapes: Iterable[AttentionShape]) -> None:
        """Allocates what the kernels of these shapes need, so that look-ups of their like allocate little later.

        Each makes a plan of the least batch, too: some libraries take their workspaces then, and compile. A captured one makes
        none, since its buffers are its batch's own. Where a kernel cannot be had, what it says is a warning.
        """
        plans: dict[int, Plan] = {}  # all live at once, as those of one step are
        for shape in shapes:
            try:
                kernel = self._prepare(self._selector.decide(shape))
                if not shape.graph and id(kernel.state) not in plans:
                    plans[id(kernel.state)] = kernel.plan(self._least(shape), scale=1.0)
            except UserError as error:
                logger.warning("%s", error)

    def _least(self, shape: AttentionShape) -> BatchLayout:
        """One request with as few tokens as `shape` can have."""
        device, count = self._selector.device, shape.q_len if shape.absorbed else 1
        if not shape.absorbed:
            return BatchLayout.make([count], [count], device)
        table = torch.zeros(1, -(-count // self.page_size), dtype=torch.int32, device=device)
        return BatchLayout.make([count], [count], device, block_table=table, page_size=self.page_size)

    def decisions(self) -> list[Decision]:
        """All decisions in force, in the order in which they were first needed."""
        return [kernel.decision for kernel in self._kernels.values()]

    def refresh(self) -> None:
        """Decides all buckets again that were needed so far, after the table has changed. No Plan may be live.

        Where the new kernel cannot be had, the old one stays, with a warning.
        """
        for key, old in self._kernels.items():
            try:
                decision = self._selector.decide(old.decision.bucket.shape)
                same = (decision.winner, decision.padding) == (old.decision.winner, old.decision.padding)
                self._kernels[key] = replace(old, decision=decision) if same else self._prepare(decision)
            except UserError as error:
                logger.warning("%s stays with %s: %s", old.decision.bucket, old.decision.label, error)
        in_force = {self._alike(kernel.decision) for kernel in self._kernels.values()}
        self._states = {key: state for key, state in self._states.items() if key in in_force}

    def _bind(self, key: tuple[int, ...]) -> Kernel:
        shape = self._shape(key)
        decision = self._selector.decide(shape)
        try:
            kernel = self._prepare(decision)
        except AttentionError as error:
            if decision.policy == "pinned":
                raise PinError(f"the pinned kernel cannot serve {decision.bucket}: {error}") from error
            if decision.policy == "batch-invariant":  # another kernel would give other bits
                raise
            logger.warning("%s cannot be prepared for %s: %s", decision.label, decision.bucket, error)
            decision = self._selector.last_resort(decision.bucket, note=f"{decision.label} could not be prepared: {error}")
            kernel = self._prepare(decision)
        self._kernels[key] = kernel
        return kernel

    def _prepare(self, decision: Decision) -> Kernel:
        key = self._alike(decision)
        if key not in self._states:
            backend = self._selector.backend_of(decision)
            self._states[key] = backend, backend.prepare(decision.bucket.shape, self.limits)
        return Kernel(*self._states[key], decision)

    def _alike(self, decision: Decision) -> tuple[str, Padding | None, AttentionShape]:
        """What decisions have in common that share one State."""
        shape = decision.bucket.shape
        q_len = shape.q_len if shape.absorbed else 0  # kernels are built for a decode's query tokens per request
        return decision.winner, decision.padding, replace(shape, batch=0, q_len=q_len, kv_len=0, ragged=False)

    def _shape(self, key: tuple[int, ...]) -> AttentionShape:
        """The bucket of a key: its sizes are exponents of two."""
        phase, batch, *rest = key
        if phase == 0:
            q, lse = rest
            return AttentionShape.prefill(self.dims, batch=1 << batch, q_len=1 << q, dtype=self.dtype, lse=bool(lse))
        if phase == 1:
            q, kv = rest
            return AttentionShape.context(self.dims, batch=1 << batch, q_len=1 << q, kv_len=1 << kv, dtype=self.dtype)
        kv, ragged, q_len, graph = rest
        return AttentionShape.decode(
            self.dims,
            batch=1 << batch,
            kv_len=1 << kv,
            dtype=self.dtype,
            page_size=self.page_size,
            q_len=q_len,
            ragged=bool(ragged),
            cache_dtype=self.cache_dtype,
            graph=bool(graph),
        )


def benchmark_lookup(bound: BoundSelector, calls: int = 30_000) -> dict[str, float]:
    """Times look-ups that hit, one by one, over a mix of prefill, context and decode buckets.

    Returns `median_us` and `p99_us` in microseconds (the clock's own reading, some 0.05 us, included) and `calls`. Buckets
    that are not bound yet are decided first.
    """
    mix: list[Callable[[], Kernel]] = [
        lambda: bound.prefill(1, 300, lse=False),
        lambda: bound.context(2, 600, 5000),
        lambda: bound.decode(1, 700, ragged=False),
        lambda: bound.decode(13, 9000, ragged=True),
    ]
    for look_up in mix:
        look_up()
    times = []
    for number in range(calls):
        look_up = mix[number % len(mix)]
        start = perf_counter_ns()
        look_up()
        times.append(perf_counter_ns() - start)
    times.sort()
    return {"median_us": median(times) / 1e3, "p99_us": times[int(0.99 * len(times))] / 1e3, "calls": float(calls)}
