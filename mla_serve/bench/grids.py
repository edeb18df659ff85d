"""The shapes that `bench attention` and `probe --grid` share, by name."""

from __future__ import annotations

from mla_serve.errors import UserError
from mla_serve.shapes import AttentionShape, DType, MLADims

DEEPSEEK = MLADims(heads=16, nope=128, rope=64, v=128, latent=512)
"""One rank's share of DeepSeek-V2-Lite, whole, or of DeepSeek-V3 at tensor parallelism 8."""

CPU_LENGTHS = (128, 512, 1024, 2048)
CPU_DTYPES: tuple[DType, ...] = ("float32", "bfloat16")


def named_grid(name: str) -> list[AttentionShape]:
    """The shapes of a grid. Raises UserError for a name that no grid has."""
    if name != "cpu":
        raise UserError(f"there is no grid {name!r}; use cpu")
    return [
        AttentionShape.prefill(DEEPSEEK, batch=1, q_len=length, dtype=dtype, lse=False)
        for dtype in CPU_DTYPES
        for length in CPU_LENGTHS
    ]
