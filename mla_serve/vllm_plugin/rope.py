"""A fault of vLLM on a CPU that turns MLA models wrong without a word: told at start, never patched.

Its CPU kernel of plain RoPE takes queries [tokens, heads, width] for [tokens, width] and turns the wrong rows.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from mla_serve.shapes import rope_parameters
from mla_serve.vllm_plugin.config import logger

__all__ = ["REMEDY", "kernel_is_faulty", "warn_if_faulty"]

REMEDY = """--compilation-config '{"custom_ops": ["-rotary_embedding"]}'"""


def warn_if_faulty(config: Any) -> bool:
    """Warns, once per process, if the model of this VllmConfig would be served wrong. Whether it would."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or "-rotary_embedding" in config.compilation_config.custom_ops:
        return False
    if rope_parameters(config.model_config.hf_text_config.to_dict())["rope_type"] != "default" or not kernel_is_faulty():
        return False
    _warn()
    return True


@cache
def kernel_is_faulty() -> bool:
    """Runs vLLM's CPU kernel on four tokens, as MLA calls it and flattened: both must turn alike."""
    from vllm import _custom_ops as ops

    width, heads = 16, 2
    table = torch.cat([torch.cos(angles := torch.arange(4).unsqueeze(1) * torch.ones(width // 2)), torch.sin(angles)], dim=-1)
    q = torch.arange(4 * heads * width, dtype=torch.float32).view(4, heads, width) / 100.0
    turned, flat = q.clone(), q.clone().flatten(1)
    for query in (turned, flat):
        key = q[:, :1].clone() if query.dim() == 3 else q[:, 0].clone()
        ops.rotary_embedding(torch.arange(4), query, key, width, table, False)
    return not torch.allclose(turned.flatten(1), flat)


@cache
def _warn() -> None:
    logger.warning(
        "this vLLM's CPU kernel of rotary embeddings is wrong for MLA models, whose answers are then wrong from the second "
        "token on; restart with %s", REMEDY,
    )  # fmt: skip
