"""Measuring when vLLM starts, in the one moment for it: the device is set up, nothing is loaded, memory not yet accounted."""

from __future__ import annotations

import time

from mla_serve.selection.probe import probe
from mla_serve.shapes import MLADims
from mla_serve.vllm_plugin import compat
from mla_serve.vllm_plugin.config import logger
from mla_serve.vllm_plugin.deployment import Deployment

__all__ = ["probe_at_start"]

PATIENCE = 900.0  # seconds beyond the budget: the kernel that is being measured when it is spent may still be compiling


def probe_at_start(
    deployment: Deployment,
    dims: MLADims,
    page_size: int,
    *,
    context_rows: int,
    graphs: bool,
    ranks: compat.Ranks = compat.ALONE,
) -> None:
    """Measures this deployment's grid as the settings ask, once for all layers of these widths, and waits for the end.

    It runs in a process of its own. That one starts after vLLM's first look at the memory and has ended when this returns,
    before weights are loaded, memory is profiled and graphs are captured. Of the ranks that share each layer the first one
    measures; the others wait for it and read its file, so that all choose alike. Raises UserError where that takes too long.
    """
    settings, selector = deployment.settings, deployment.selector
    if settings.probe == "off":
        return

    rank, wait = ranks

    def measure() -> None:
        try:
            if rank == 0:
                first_measures()
        finally:
            wait(settings.budget + PATIENCE)
        if rank:
            selector.table.refresh()

    def first_measures() -> None:
        began = time.monotonic()
        work = [(selector, deployment.grid(dims, page_size, context_rows, graphs=graphs))]
        if extensions := deployment.extensions(dims, page_size):
            work.append((deployment.flexible, extensions))
        done = 0
        try:
            for asked, shapes in work:
                left = settings.budget - (time.monotonic() - began)
                wanted = [shape for shape in shapes if deployment.pinned(shape.phase) is None]
                if settings.probe == "missing":
                    wanted = [shape for shape in wanted if asked.measured(shape) is None]
                if wanted:
                    probe(asked, wanted, again=settings.probe == "all", budget_s=max(0.0, left))
                done += len(wanted)
        finally:
            selector.close()
        logger.info("measured attention kernels for %d shapes in %.1f s", done, time.monotonic() - began)

    deployment.once("probe", dims, page_size, measure)
