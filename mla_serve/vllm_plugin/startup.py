"""What is settled and checked while vLLM starts: page size, pins, the cache's dtype; and the table in its log."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mla_serve.errors import UserError
from mla_serve.selection import PinError
from mla_serve.selection.report import choices
from mla_serve.selection.selector import LAST_RESORT
from mla_serve.shapes import AttentionShape, DType, MLADims, Phase
from mla_serve.vllm_plugin.config import logger
from mla_serve.vllm_plugin.deployment import Deployment

__all__ = ["check", "expected_page_size", "log_choices", "reserve"]


def expected_page_size(deployment: Deployment, config: Any, dims: MLADims) -> int:
    """Tokens per page: what a person or the platform has settled, else what the fastest decode of the model takes.

    Raises PinError if the pinned kernel takes no page that could be chosen.
    """
    cache = config.cache_config
    if deployment.device.type == "cpu" or getattr(cache, "user_specified_block_size", False):
        return int(cache.block_size)
    return deployment.page_size(dims)


def check(deployment: Deployment, config: Any, dims: MLADims, cache_dtype: DType | None) -> int:
    """The page size. Raises UserError, with the remedy, for a pin that cannot run this model and a cache no kernel takes."""
    page_size = expected_page_size(deployment, config, dims)
    if cache_dtype is not None and deployment.device.type == "cpu":
        raise UserError(f"vLLM cannot gather a {cache_dtype} cache on a CPU; leave out --kv-cache-dtype")
    shape = AttentionShape.decode(
        dims, batch=1, kv_len=1024, dtype=deployment.size.dtype, page_size=page_size, cache_dtype=cache_dtype
    )
    try:
        decision = deployment.selector.decide(shape)
    except PinError as error:
        if cache_dtype is not None and "float8" in str(error):
            raise UserError(f"{error}, or leave out --kv-cache-dtype") from error
        if "takes pages of" in str(error):
            raise UserError(f"{error}, or leave out --block-size") from error
        raise
    if cache_dtype is not None and decision.winner == LAST_RESORT[True] and deployment.pinned(Phase.DECODE) is None:
        raise UserError(
            f"no kernel here but {decision.winner}, the last resort, reads a {cache_dtype} cache with its scale; leave out "
            "--kv-cache-dtype, or pin decode=torch-mla to serve slowly"
        )
    return page_size


def reserve(
    deployment: Deployment, dims: MLADims, page_size: int, cache_dtype: DType | None, *, context_rows: int, graphs: bool
) -> None:
    """Allocates buffers and workspaces now, while the model is loaded: vLLM gives what it then finds free to its cache."""

    def allocate() -> None:
        limits = deployment.limits(context_rows)
        shapes = deployment.grid(dims, page_size, context_rows, graphs=graphs)
        deployment.bind(dims, page_size, limits).reserve(shape for shape in shapes if not shape.absorbed)
        decodes = [replace(shape, cache_dtype=cache_dtype) for shape in shapes if shape.absorbed]
        deployment.bind(dims, page_size, limits, cache_dtype=cache_dtype).reserve(decodes)
        longer = [replace(shape, cache_dtype=cache_dtype) for shape in deployment.extensions(dims, page_size)]
        deployment.bind(dims, page_size, limits, cache_dtype=cache_dtype, even=False).reserve(longer)

    deployment.once("reserve", dims, page_size, allocate)


def log_choices(deployment: Deployment, dims: MLADims, page_size: int, *, context_rows: int, graphs: bool) -> None:
    """One table in vLLM's log, once: for each bucket of the deployment's grid its kernel and why."""

    def tell() -> None:
        decisions = []
        for shape in deployment.grid(dims, page_size, context_rows, graphs=graphs):
            try:
                decisions.append(deployment.selector.decide(shape))
            except UserError as error:
                logger.warning("%s", error)
        logger.info("attention kernels of mla_serve:\n%s", choices(decisions))

    deployment.once("table", dims, page_size, tell)
