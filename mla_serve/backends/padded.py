"""The padded form of a backend: pad, run, trim. The only place that pads.

Zeros appended to queries and keys leave every logit as it was; zeros appended to values become output columns that are cut off;
an appended query head attends to something and is cut off. The scale is the plan's and knows nothing of any of it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mla_serve.backends.base import AttentionError, Backend, BatchLayout, Kind, Limits, Plan, State, torch_dtype
from mla_serve.shapes import AttentionShape

__all__ = ["Padded", "Padding"]


@dataclass(frozen=True, slots=True)
class Padding:
    """Padded sizes: Q/K width, value width and query heads, each at least the native one."""

    qk: int
    v: int
    heads: int

    @classmethod
    def of(cls, shape: AttentionShape, *, qk: int | None = None, v: int | None = None, heads: int | None = None) -> Padding:
        return cls(qk or shape.qk, v or shape.v, heads or shape.heads)

    def to_json(self) -> dict[str, int]:
        return asdict(self)


@dataclass(slots=True)
class PaddedState(State):
    """The inner backend's State and the buffers that inputs are copied into: one per input that grows, by its name.

    A buffer is written and read inside one run call and carries nothing from a plan to a run, or from one run to the next.
    So all Plans of this State may use it, as long as their runs are on one stream, which puts them in an order; a second
    stream needs a State of its own, as it does for any backend's workspace.
    """

    inner: State
    buffers: dict[str, Tensor]


@dataclass(slots=True)
class PaddedPlan(Plan):
    inner: Plan


class Padded(Backend):
    """`inner` behind zero-padding: widths in the un-absorbed form, query heads in the absorbed one.

    (A padded latent would be a layout of the cache, chosen when it is allocated, not a copy in every step.)
    """

    def __init__(self, inner: Backend, padding: Padding) -> None:
        super().__init__(inner.device)
        self.inner, self.padding = inner, padding
        self.name, self.library = f"{inner.name}+pad", inner.library
        self.gives_lse, self.capturable, self.needs_host_lens = inner.gives_lse, inner.capturable, inner.needs_host_lens
        self.takes_cache_scale, self.batch_invariant = inner.takes_cache_scale, inner.batch_invariant
        self.page_sizes, self.leaks_nan, self.even_queries = inner.page_sizes, inner.leaks_nan, inner.even_queries

    @property
    def libraries(self) -> tuple[str, ...]:
        return self.inner.libraries

    def padded(self, shape: AttentionShape) -> AttentionShape:
        """The shape that the inner backend sees."""
        return shape.widened(qk=self.padding.qk, v=self.padding.v, heads=self.padding.heads)

    def kind(self, shape: AttentionShape) -> Kind:
        return self.inner.kind(self.padded(shape))

    def available(self) -> str | None:
        return self.inner.available()

    def workspace_bytes(self, shape: AttentionShape) -> int:
        return self.inner.workspace_bytes(self.padded(shape))

    def supports(self, shape: AttentionShape) -> str | None:
        pad = self.padding
        if pad.qk < shape.qk or pad.v < shape.v or pad.heads < shape.heads:
            return f"cannot pad {shape.qk}/{shape.v} and {shape.heads} heads down to {pad.qk}/{pad.v} and {pad.heads}"
        if shape.absorbed and (pad.qk, pad.v) != (shape.qk, shape.v):
            return "widths are padded in prefill and context only; a padded latent is a layout of the cache"
        if not shape.absorbed and pad.heads != shape.heads:
            return "query heads are padded in decode only"
        if self.inner.head_counts is not None and pad.heads not in self.inner.head_counts:
            return f"{self.inner.name} takes {', '.join(map(str, self.inner.head_counts))} heads, not {pad.heads}"
        return self.inner.supports(self.padded(shape))

    def prepare(self, shape: AttentionShape, limits: Limits) -> PaddedState:
        self.require(shape)
        pad, dtype = self.padding, torch_dtype(shape.dtype)
        if shape.absorbed:
            tokens = min(limits.max_tokens, limits.max_requests * shape.q_len)
            sizes = {"q_nope": (tokens, shape.v), "q_pe": (tokens, shape.rope)}
        else:
            tokens, kv_tokens = limits.max_tokens, limits.max_kv_tokens
            sizes = {"q": (tokens, pad.qk), "k": (kv_tokens, pad.qk), "v": (kv_tokens, pad.v)}
        native = {"q": shape.qk, "k": shape.qk, "v": shape.v}
        # Uninitialised: a large one costs a CPU no memory until its rows are used.
        # Normal tensors in any mode: one made in inference mode could not be written outside it.
        with torch.inference_mode(False):
            buffers = {
                name: torch.empty(rows, pad.heads, width, dtype=dtype, device=self.device)
                for name, (rows, width) in sizes.items()
                if pad.heads > shape.heads or width > native.get(name, width)
            }
        return PaddedState(shape, limits, self.inner.prepare(self.padded(shape), limits), buffers)

    def plan(self, state: State, batch: BatchLayout, *, scale: float, reuse: Plan | None = None) -> PaddedPlan:
        assert isinstance(state, PaddedState)
        if not isinstance(reuse, PaddedPlan):
            return PaddedPlan(state, batch, scale, self.inner.plan(state.inner, batch, scale=scale))
        reuse.inner = self.inner.plan(state.inner, batch, scale=scale, reuse=reuse.inner)
        reuse.state, reuse.batch, reuse.scale = state, batch, scale
        return reuse

    def run_prefill(
        self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, need_lse: bool, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        assert isinstance(plan, PaddedPlan)
        state, width = plan.state, v.shape[2]
        assert isinstance(state, PaddedState)
        q, k, v = (self._pad(state, name, rows) for name, rows in (("q", q), ("k", k), ("v", v)))
        wide, lse = self.inner.run_prefill(q, k, v, plan.inner, need_lse=need_lse, out=out if width == self.padding.v else None)
        if wide.shape[2] == width:
            return wide, lse
        trimmed = wide[..., :width]
        return trimmed.contiguous() if out is None else out.copy_(trimmed), lse

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
        assert isinstance(plan, PaddedPlan)
        state, heads = plan.state, q_nope.shape[1]
        assert isinstance(state, PaddedState)
        wide, lse = self.inner.run_decode(
            self._pad(state, "q_nope", q_nope),
            self._pad(state, "q_pe", q_pe),
            cache,
            plan.inner,
            cache_scale=cache_scale,
            need_lse=need_lse,
            out=out if heads == self.padding.heads else None,
        )
        if wide.shape[1] == heads:
            return wide, lse
        trimmed = wide[:, :heads]
        trimmed = trimmed.contiguous() if out is None else out.copy_(trimmed)
        return trimmed, None if lse is None else lse[:, :heads].contiguous()

    def _pad(self, state: PaddedState, name: str, rows: Tensor) -> Tensor:
        """`rows` [tokens, heads, width], or its zero-padded copy in a buffer of the State."""
        buffer = state.buffers.get(name)
        if buffer is None:
            return rows
        tokens, heads, width = rows.shape
        if torch.is_grad_enabled() and rows.requires_grad:  # autograd may keep this input: no buffer, nothing in place
            return F.pad(rows, (0, buffer.shape[2] - width, 0, buffer.shape[1] - heads))
        if tokens > buffer.shape[0]:
            raise AttentionError(f"{self.name} was prepared for {buffer.shape[0]} rows of {name} and got {tokens}")
        padded = buffer[:tokens]
        padded[:, :heads, :width] = rows
        # Zeroed every time: whoever read the buffer last may have written into it.
        padded[:, :heads, width:] = 0
        padded[:, heads:] = 0
        return padded
