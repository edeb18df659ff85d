"""What the classes that vLLM makes per layer share in a worker process: the selector, its kernels, counts of their use."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from mla_serve.backends.base import Limits, Plan
from mla_serve.selection import BoundSelector, Decision, DecisionTable, Kernel, Selector, default_table_path
from mla_serve.selection.probe import grid
from mla_serve.shapes import AttentionShape, DType, MLADims, Phase
from mla_serve.vllm_plugin import compat
from mla_serve.vllm_plugin.config import RPC, Settings
from mla_serve.vllm_plugin.table import own_decisions

__all__ = ["Deployment", "Planned", "Size", "absorb_by_widths", "deployments"]

_LIVE: list[Deployment] = []


@dataclass(slots=True)
class Planned:
    """A kernel and its plan for a step."""

    kernel: Kernel
    plan: Plan


@dataclass(slots=True)
class Counts:
    """How often each kernel was planned (once a step) and run (once a layer), by phase, kernel and, of decodes, layer.

    A replayed CUDA graph runs its layers without Python: only the plan is counted then.
    """

    steps: Counter[tuple[str, str]] = field(default_factory=Counter)
    runs: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def to_json(self) -> dict[str, Any]:
        return {
            "steps": [{"phase": phase, "kernel": kernel, "count": n} for (phase, kernel), n in self.steps.items()],
            "runs": [
                {"phase": phase, "kernel": kernel, "layer": layer, "count": n}
                for (phase, kernel, layer), n in self.runs.items()
            ],
        }


@dataclass(frozen=True, slots=True)
class Size:
    """What of vLLM's configuration a deployment depends on.

    `verified` counts the query tokens of a request that speculative decoding verifies, 1 without it. `host_lens` is False where
    that happens while the host plans the next step.
    """

    dtype: DType
    layers: int
    max_model_len: int
    max_requests: int
    max_tokens: int
    host_lens: bool
    verified: int = 1

    @classmethod
    def of(cls, config: Any) -> Size:
        """`config` is a VllmConfig."""
        model, scheduler = config.model_config, config.scheduler_config
        speculative = getattr(config, "speculative_config", None)
        ahead = getattr(scheduler, "async_scheduling", False)
        return cls(
            dtype=compat.dtype_name(model.dtype),
            layers=max(1, model.get_num_layers(config.parallel_config)),
            max_model_len=model.max_model_len,
            max_requests=scheduler.max_num_seqs,
            max_tokens=scheduler.max_num_batched_tokens,
            host_lens=speculative is None or not ahead,
            verified=compat.verified_tokens(config),
        )


class Deployment:
    """The kernels of one configuration in this process. Made by `of`; raises UserError for settings that cannot be met."""

    def __init__(self, settings: Settings, device: torch.device, size: Size) -> None:
        self.settings, self.device, self.size = settings, device, size
        self.counts = Counts()
        path = Path(settings.decisions) if settings.decisions else default_table_path()
        self.selector = Selector(
            device,
            policy=settings.policy,
            pins=settings.pinned,
            table=DecisionTable(path),
            layers=size.layers,
            host_lens=size.host_lens,
            clean_pool=True,  # the pool is zeroed when allocated, and vLLM's own FA3 and FlashInfer read it in the same way
        )
        if settings.decisions and settings.probe == "off":
            own_decisions(path, self.selector.fingerprint)
        self._flexible: Selector | None = None
        self._bound: dict[Any, BoundSelector] = {}
        self._done: set[tuple[str, MLADims, int]] = set()

    @staticmethod
    def of(config: Any, device: torch.device | None = None) -> Deployment:
        """The deployment of a VllmConfig in this process."""
        return _deployment(Settings.load(), device or compat.worker_device(), Size.of(config))

    def limits(self, context_rows: int) -> Limits:
        """The largest call there can be, `context_rows` being the cached tokens that are up-projected at a time."""
        size = self.size
        return Limits(size.max_requests, size.max_tokens, max(size.max_tokens, context_rows))

    def bind(
        self, dims: MLADims, page_size: int, limits: Limits, *, cache_dtype: DType | None = None, even: bool = True
    ) -> BoundSelector:
        """The look-up for one kind of layer. `even` False: of kernels that take requests with unequal query lengths."""
        key = dims, page_size, limits, cache_dtype, even
        if key not in self._bound:
            selector = self.selector if even else self.flexible
            self._bound[key] = selector.bind(
                dims, dtype=self.size.dtype, page_size=page_size, limits=limits, cache_dtype=cache_dtype
            )
        return self._bound[key]

    @property
    def flexible(self) -> Selector:
        """Like `selector`, of the kernels that take a mixture of query lengths in one decode."""
        if self._flexible is None:
            main = self.selector
            kernels = [backend for backend in main.backends if not backend.even_queries]
            names = {backend.name for backend in kernels}
            pins = {phase: pin for phase, pin in self.settings.pins if pin.partition("+")[0] in names}
            self._flexible = Selector(
                self.device, policy=self.settings.policy, pins=pins, table=main.table, backends=kernels, layers=main.layers,
                host_lens=main.host_lens, clean_pool=main.clean_pool, measurer=main.measurer, shipped=main.shipped,
            )  # fmt: skip
        return self._flexible

    def absorb_up_to(self, dims: MLADims) -> int:
        """Query tokens up to which a request counts as a decode; over `verified` only where the kernel takes mixtures."""
        pin = self.pinned(Phase.DECODE)
        if any(backend.name == pin and backend.even_queries for backend in self.selector.backends):
            return self.size.verified
        asked = self.settings.absorb_up_to
        if asked is None:
            asked = 1 if self.device.type == "cpu" else absorb_by_widths(dims)
        return max(asked, self.size.verified)

    def extension(self, dims: MLADims) -> int:
        """The query tokens that kernels are asked for where a batch's are a mixture, or more than are verified: the most.

        One number, since each has buffers of its own.
        """
        return 1 << (self.absorb_up_to(dims) - 1).bit_length()

    def page_size(self, dims: MLADims) -> int:
        """Tokens per page where nobody says: what the fastest decode of this model takes, as far as that is known."""
        return self.selector.page_size(dims, dtype=self.size.dtype, batch=min(32, self.size.max_requests))

    def extensions(self, dims: MLADims, page_size: int) -> list[AttentionShape]:
        """Short extensions of cached contexts that this deployment serves absorbed, to be measured with `flexible`."""
        q_len, longest = self.extension(dims), self.size.max_model_len
        if self.absorb_up_to(dims) <= self.size.verified:
            return []
        lens = sorted({min(length, longest) for length in (1024, 4096, 16384)})
        return [
            AttentionShape.decode(dims, batch=batch, kv_len=length, dtype=self.size.dtype, page_size=page_size, q_len=q_len)
            for batch in (1, 4)
            for length in lens
            if batch <= self.size.max_requests
        ]

    def grid(self, dims: MLADims, page_size: int, context_chunk: int, *, graphs: bool) -> list[AttentionShape]:
        """The shapes that this deployment may see; decodes also as captured graphs where there are any.

        With speculative decoding also those that verify drafts.
        """
        shapes: dict[AttentionShape, None] = {}
        for graph in (False, True) if graphs else (False,):
            found = grid(
                dims, dtype=self.size.dtype, page_size=page_size, max_model_len=self.size.max_model_len,
                max_batch=self.size.max_requests, device=self.device, max_tokens=self.size.max_tokens,
                context_chunk=context_chunk, graph=graph,
            )  # fmt: skip
            shapes.update(dict.fromkeys(found))
        if self.size.verified > 1:
            decodes = [shape for shape in shapes if shape.absorbed]
            shapes.update(dict.fromkeys(replace(shape, q_len=self.size.verified) for shape in decodes))
        return list(shapes)

    def once(self, what: str, dims: MLADims, page_size: int, do: Callable[[], None]) -> None:
        """Calls `do` the first time it is asked to for these widths and pages."""
        key = (what, dims, page_size)
        if key not in self._done:
            self._done.add(key)
            do()

    def decisions(self) -> list[Decision]:
        """All decisions in force, without repetition."""
        found = {decision.bucket: decision for bound in self._bound.values() for decision in bound.decisions()}
        return list(found.values())

    def pinned(self, phase: Phase) -> str | None:
        """The name of the kernel that is pinned for `phase`."""
        pin = self.settings.pinned.get(phase.value)
        return None if pin is None else pin.partition("+")[0]


def absorb_by_widths(dims: MLADims) -> int:
    """Query tokens of a request up to which the absorbed form is less arithmetic on a long context, down to a power of two.

    Per key and head, the absorbed form multiplies 2 latent + rope elements for each query token, the un-absorbed one
    nope + rope + v, and once, to make the key and value, latent (nope + v).
    """
    more = (2 * dims.latent + dims.rope) - (dims.qk + dims.v)
    if more <= 0:
        return 512
    return 1 << max(0, (dims.latent * (dims.nope + dims.v) // more).bit_length() - 1)


@lru_cache(maxsize=8)
def _deployment(settings: Settings, device: torch.device, size: Size) -> Deployment:
    deployment = Deployment(settings, device, size)
    _LIVE.append(deployment)
    compat.offer_to_workers(RPC, _snapshot)
    return deployment


def _snapshot(_: Any) -> str:
    """A worker's answer to RPC: JSON, the decisions in force and the counts of all its deployments."""
    live = deployments()
    return json.dumps(
        {
            "decisions": [decision.to_json() for deployment in live for decision in deployment.decisions()],
            "counts": [deployment.counts.to_json() for deployment in live],
        }
    )


def deployments() -> list[Deployment]:
    """All of this process, in the order in which they were made."""
    return list(_LIVE)
