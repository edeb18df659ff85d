"""The kernels of one vLLM worker: one selector per device, one binding per shape of attention layer, counts of what ran."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from io import StringIO
from typing import Any

import torch
from rich.console import Console

from mla_serve.backends.base import Limits
from mla_serve.errors import UserError
from mla_serve.selection import (
    BoundSelector,
    Decision,
    DecisionTable,
    Selector,
    decision_sentence,
    default_table_path,
    render_table,
)
from mla_serve.selection.bound import Kernel
from mla_serve.selection.candidates import native
from mla_serve.selection.entry import host_of
from mla_serve.selection.isolated import Isolated
from mla_serve.shapes import DType, MLADims
from mla_serve.vllm_plugin import compat
from mla_serve.vllm_plugin.config import PluginSettings
from mla_serve.vllm_plugin.probing import probe_at_start
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
_probed: set[Any] = set()


def get_ready(dims: MLADims, config: Any, *, cache_dtype: torch.dtype | None) -> None:
    """To be called when a layer is made, which is before vLLM profiles its memory; the first call of a kind does the work.

    Measures what is asked for at start, then chooses the kernels of the largest batches, so that their workspaces are part of
    what vLLM sees in use. Raises UserError for pins, decisions or a page size with which nothing could serve.
    """
    device, page = torch.device(config.device_config.device_type), int(config.cache_config.block_size or 16)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    model, scheduler = config.model_config, config.scheduler_config
    if (dims, model.dtype) in _probed:
        return
    _probed.add((dims, model.dtype))
    context = compat.context_workspace(config)
    limits = limits_of(config)
    kernels = kernels_for(
        dims,
        dtype=model.dtype,
        cache_dtype=cache_dtype,
        page_size=page,
        device=device,
        limits=limits,
        layers=compat.layers(config),
    )
    selector, _ = _selectors(device, compat.layers(config))
    decisions = probe_at_start(
        selector, settings(), dims, config=config, page_size=page, context=context, graph=compat.uses_graphs(config)
    )
    requests, tokens = int(scheduler.max_num_seqs), int(scheduler.max_num_batched_tokens)
    kernels.bound.prefill(1, tokens, lse=False)
    kernels.bound.prefill(1, tokens, lse=True)
    kernels.bound.context(1, tokens, context)
    kernels.bound.decode(requests, requests * model.max_model_len, ragged=False, graph=False)
    if decisions:
        log_table(decisions)


def log_table(decisions: Sequence[Decision]) -> None:
    """One table in vLLM's log: bucket, kernel, padding, times of the best native and padded form, floor, policy."""
    text = StringIO()
    render_table(decisions, Console(file=text, width=240))
    logger.info("mla_serve: kernels by shape\n%s", text.getvalue())


def limits_of(config: Any) -> Limits:
    """The largest call of any layer."""
    tokens = int(config.scheduler_config.max_num_batched_tokens)
    return Limits(int(config.scheduler_config.max_num_seqs), tokens, max(tokens, compat.context_workspace(config)))


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
