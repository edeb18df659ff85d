"""The kernels of one vLLM worker: one selector per device, one binding per shape of attention layer, counts of what ran."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from mla_serve.backends.base import Limits
from mla_serve.errors import UserError
from mla_serve.selection import BoundSelector, DecisionTable, Selector, decision_sentence, default_table_path
from mla_serve.selection.bound import Kernel
from mla_serve.selection.candidates import native
from mla_serve.selection.entry import host_of
from mla_serve.selection.isolated import Isolated
from mla_serve.shapes import DType, MLADims
from mla_serve.vllm_plugin.config import PluginSettings
from mla_serve.vllm_plugin.shared import write_decisions

logger = logging.getLogger("vllm.mla_serve")

DTYPES: dict[torch.dtype, DType] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float8_e4m3fn: "float8_e4m3fn",
}


@dataclass
class Kernels:
    """What serves the layers of one kind in this process. `ran` counts calls by phase, kernel and layer.

    `dims.heads` are this rank's. Prefill and context are looked up in `bound` itself.
    """

    bound: BoundSelector
    uneven: BoundSelector  # without the kernels that take one number of query tokens from every request
    ran: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    _told: int = 0

    def decode(self, batch: int, kv_tokens: int, *, ragged: bool, q_len: int, graph: bool, even: bool) -> Kernel:
        """As `BoundSelector.decode`; `even`: every request has `q_len` new tokens, and not only one of them."""
        kernel = self.bound.decode(batch, kv_tokens, ragged=ragged, q_len=q_len, graph=graph)
        if even or not native(kernel.backend).even_queries:
            return kernel
        return self.uneven.decode(batch, kv_tokens, ragged=ragged, q_len=q_len, graph=graph)

    def count(self, phase: str, kernel: Kernel, layer: str = "") -> None:
        self.ran[phase, kernel.decision.label, layer] += 1

    def tell(self) -> None:
        """Once a step: other processes learn of decisions that are new, and a person through the log."""
        decisions = [*self.bound.decisions(), *self.uneven.decisions()]
        if len(decisions) == self._told:
            return
        for decision in decisions[self._told :]:
            logger.info("mla_serve: %s", decision_sentence(decision))
        self._told = len(decisions)
        write_decisions(decisions)


@cache
def settings() -> PluginSettings:
    """This process's settings."""
    return PluginSettings.read()


@cache
def _selectors(device: torch.device, layers: int) -> tuple[Selector, Selector]:
    """The selector of this process, and one like it without the kernels that want even batches."""
    every = _selector(device, layers)
    able = [backend for backend in every.backends if not backend.even_queries]
    some = Selector(
        device, policy=every.policy, pins={}, table=every.table, backends=able, layers=layers, clean_pool=True,
        measurer=every.measurer, shipped=every.shipped,
    )  # fmt: skip
    return every, some


def _selector(device: torch.device, layers: int) -> Selector:
    asked = settings()
    path = asked.decisions or default_table_path()
    # vLLM zero-fills its cache, and no request's NaN outlives it unseen: vLLM's own kernels rely on the same.
    made = Selector(
        device,
        policy=asked.policy,
        pins=asked.pins,
        table=DecisionTable.load(path),
        layers=layers,
        clean_pool=True,
        measurer=Isolated(device, clean_pool=True, seconds=asked.kernel_timeout),
    )
    here = host_of(made.fingerprint)
    if asked.decisions is not None and not any(host_of(decision.fingerprint) == here for decision in made.table):
        raise UserError(
            f"the decisions in {path} were made on another device than this one ({made.fingerprint.device}); probe here with "
            f"mla-serve probe --out {path}, or leave MLA_SERVE_DECISIONS out"
        )
    return made


_kernels: dict[Any, Kernels] = {}


def kernels_for(
    dims: MLADims, *, dtype: torch.dtype, cache_dtype: torch.dtype | None, page_size: int, device: torch.device, limits: Limits,
    layers: int,
) -> Kernels:  # fmt: skip
    """The kernels of this kind of layer, made at the first call. Raises UserError for pins or decisions that cannot serve."""
    key = (dims, dtype, cache_dtype, page_size, device, limits)
    if key not in _kernels:
        other = None if cache_dtype in (None, dtype) else DTYPES[cache_dtype]
        bound, uneven = (
            selector.bind(dims, dtype=DTYPES[dtype], page_size=page_size, limits=limits, cache_dtype=other)
            for selector in _selectors(device, layers)
        )
        _kernels[key] = Kernels(bound, uneven)
    return _kernels[key]


def counts() -> dict[str, int]:
    """How often each kernel ran, by "phase kernel layer", over all kinds of layers of this process."""
    total: Counter[str] = Counter()
    for kernels in _kernels.values():
        for (phase, kernel, layer), number in kernels.ran.items():
            total[f"{phase} {kernel} {layer}"] += number
    return dict(total)
