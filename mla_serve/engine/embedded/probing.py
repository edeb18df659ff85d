"""The probe that runs while the embedded engine rests: of which shapes, and into which table."""

from __future__ import annotations

from collections.abc import Mapping

from mla_serve.engine.embedded.runner import Runner
from mla_serve.selection.idle import IdleProbe
from mla_serve.selection.isolated import Isolated
from mla_serve.selection.pins import by_phase, known_kernels
from mla_serve.selection.probe import grid
from mla_serve.selection.selector import Selector
from mla_serve.selection.table import DecisionTable

PROBES = ("off", "idle", "on-demand")


def idle_probe(
    runner: Runner, selector: Selector, measurer: Isolated, *, pins: Mapping[str, str], max_model_len: int, max_requests: int,
    max_tokens: int,
) -> IdleProbe | None:  # fmt: skip
    """Measures the grid of `runner`'s model with `measurer`, into the file of `selector`'s table.

    Phases that are pinned are left out. None if nothing is left to do.
    """
    pinned = by_phase(pins, known_kernels())
    shapes = grid(
        runner.config.dims,
        dtype=runner.dtype,
        page_size=runner.page_size,
        max_model_len=max_model_len,
        max_batch=max_requests,
        device=runner.device,
        max_tokens=max_tokens,
        context_chunk=runner.context_chunk,
    )
    shapes = [shape for shape in shapes if shape.phase not in pinned and not selector.measured(shape)]
    if not shapes:
        return None

    def make() -> Selector:
        return Selector(
            selector.device, table=DecisionTable(selector.table.path), layers=selector.layers, clean_pool=selector.clean_pool,
            measurer=measurer,
        )  # fmt: skip

    return IdleProbe(measurer, make, shapes)
