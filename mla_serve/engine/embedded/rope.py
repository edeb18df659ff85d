"""Rotary position embedding as multiplication by complex numbers of one table, plain or YaRN."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mla_serve.engine.embedded.config import RopeConfig

__all__ = ["frequencies", "pair_order", "rotate_", "turns"]


def frequencies(rope: RopeConfig, width: int) -> Tensor:
    """Radians per position of each pair, [width / 2] float32.

    YaRN (arXiv 2309.00071, section 3.2) keeps the pairs that turn more than `beta_fast` times within the original context,
    divides by `factor` those that turn less than `beta_slow` times, and blends linearly between.
    """
    wavelength = rope.theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    if not rope.yarn:
        return 1.0 / wavelength

    def pair_turning(times: float) -> float:
        """The (fractional) pair that turns so many times within the original context."""
        return width * math.log(rope.original_max_position / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_turning(rope.beta_fast), pair_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp = (torch.arange(width // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return 1.0 / (rope.factor * wavelength) * (1 - kept) + 1.0 / wavelength * kept


def turns(rope: RopeConfig, width: int, positions: int, device: torch.device) -> Tensor:
    """The table: cos + i sin of every position and pair, times the temperature, [positions, 1, width / 2] complex64.

    The middle dimension broadcasts over heads. A step gathers its rows once, for all layers.
    """
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies(rope, width))
    return torch.polar(torch.full_like(angles, rope.temperature), angles).unsqueeze(1).to(device)


def rotate_(x: Tensor, turn: Tensor) -> None:
    """Turns the pairs (0, 1), (2, 3), ... of x [tokens, heads, width] in place by `turn` [tokens, 1, width / 2].

    Half precision is turned in float32. x may be a view into wider rows.
    """
    pairs = x.view(*x.shape[:-1], -1, 2)
    even = all(stride % 2 == 0 for stride in pairs.stride()[:-1]) and pairs.storage_offset() % 2 == 0
    if x.dtype is torch.float32 and even:
        torch.view_as_complex(pairs).mul_(turn)
    else:
        pairs.copy_(torch.view_as_real(torch.view_as_complex(pairs.float().contiguous()) * turn))


def pair_order(rope: RopeConfig, width: int) -> Tensor | None:
    """The order of weight rows that turns pairs (i, i + width / 2) into neighbours; None where they are neighbours already."""
    return None if rope.interleave else torch.arange(width).view(2, -1).t().reshape(-1)
