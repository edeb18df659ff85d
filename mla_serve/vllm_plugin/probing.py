"""Measuring at start, before vLLM profiles its memory: the grid of this model, in a process of its own, within a budget.

vLLM compares the GPU's memory with a snapshot from before the model was loaded and stops where a process that it saw there
has ended meanwhile; so ours starts after that snapshot and is gone before this function returns.
"""

from __future__ import annotations

import logging
import time
from typing import Any, cast

import torch

from mla_serve.selection import Decision, Selector, grid, probe
from mla_serve.shapes import AttentionShape, Bucket, DType, MLADims
from mla_serve.vllm_plugin.config import PluginSettings

logger = logging.getLogger("vllm.mla_serve")


def probe_at_start(
    selector: Selector, settings: PluginSettings, dims: MLADims, *, config: Any, page_size: int, context: int, graph: bool
) -> list[Decision]:
    """Measures what `settings.probe` asks for. Of several ranks that share the table's file, one measures a bucket and the
    others wait for it; each reads the file, so that all decide alike. Raises UserError where nothing can be measured."""
    if settings.probe == "off" or settings.policy != "measured":
        return []
    scheduler = config.scheduler_config
    shapes = grid(
        dims, dtype=_name(config.model_config.dtype), page_size=page_size, max_model_len=config.model_config.max_model_len,
        max_batch=int(scheduler.max_num_seqs), device=selector.device, max_tokens=int(scheduler.max_num_batched_tokens),
        context_chunk=context, graph=graph,
    )  # fmt: skip
    shapes = [shape for shape in shapes if settings.probe == "all" or not _known(selector, shape)]
    if not shapes:
        return []
    logger.info("mla_serve: measuring the kernels of %d shapes before serving", len(shapes))
    began = time.monotonic()

    def progress(done: int, total: int, decision: Decision | None) -> None:
        told = f"{decision.bucket}: {decision.label}" if decision else "no kernel can"
        logger.info("mla_serve: %d of %d: %s", done, total, told)

    try:
        found = probe(selector, shapes, progress=progress, again=settings.probe == "all", budget_s=settings.budget)
    finally:
        selector.close()
    selector.table.save()
    logger.info("mla_serve: measured %d shapes in %.1f s", len(found), time.monotonic() - began)
    return found


def _known(selector: Selector, shape: AttentionShape) -> bool:
    """Whether this very bucket was measured here, or came with the package."""
    if selector.measured(shape) is not None:
        return True
    return selector.shipped.get(Bucket.of(shape), "measured", selector.fingerprint) is not None


def _name(dtype: torch.dtype) -> DType:
    return cast(DType, str(dtype).removeprefix("torch."))
