"""Measuring when vLLM starts, in the one moment for it: the device is set up, nothing is loaded, memory not yet accounted."""

from __future__ import annotations

import time

from mla_serve.selection.probe import probe
from mla_serve.shapes import MLADims
from mla_serve.vllm_plugin.config import logger
from mla_serve.vllm_plugin.deployment import Deployment

__all__ = ["probe_at_start"]


def probe_at_start(deployment: Deployment, dims: MLADims, page_size: int, *, context_rows: int, graphs: bool) -> None:
    """Measures this deployment's grid as the settings ask, once for all layers of these widths, and waits for the end.

    It runs in a process of its own. That one starts after vLLM's first look at the memory and has ended when this returns,
    before weights are loaded, memory is profiled and graphs are captured. Ranks of one host that share a decision file share
    the work.
    """
    settings, selector = deployment.settings, deployment.selector
    if settings.probe == "off":
        return

    def measure() -> None:
        began = time.monotonic()
        shapes = deployment.grid(dims, page_size, context_rows, graphs=graphs)
        shapes = [shape for shape in shapes if deployment.pinned(shape.phase) is None]
        if settings.probe == "missing":
            shapes = [shape for shape in shapes if selector.measured(shape) is None]
        try:
            probe(selector, shapes, again=settings.probe == "all", budget_s=settings.budget)
        finally:
            selector.close()
        logger.info("measured attention kernels for %d shapes in %.1f s", len(shapes), time.monotonic() - began)

    deployment.once("probe", dims, page_size, measure)
