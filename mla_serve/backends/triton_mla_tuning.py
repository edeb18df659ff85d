"""How `triton-mla` is cut for a GPU: tile sizes, warps, stages, programs. A small table per GPU class and a rule for the rest.

Shared memory is what a choice must fit in: the pipeline holds `stages` tiles of latents, and one tile of queries beside them.
"""

from __future__ import annotations

from dataclasses import dataclass

from mla_serve.shapes import AttentionShape

__all__ = ["Gpu", "Tuning", "choose", "up"]


@dataclass(frozen=True, slots=True)
class Gpu:
    """What the choice depends on: compute capability (9.0 is 90), multiprocessors, shared memory of one program in bytes."""

    capability: int
    multiprocessors: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class Tuning:
    """Rows of a tile, keys of a block, warps and pipeline stages of a program, programs of a launch for each multiprocessor,
    the fewest keys of a piece, and how many pieces one program reduces at a time."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    programs: int
    least_keys: int
    fan: int
    swap: bool = False
    part: int = 128


INTERPRETER = Gpu(capability=0, multiprocessors=6, shared_bytes=0)
"""Stands for the CPU under Triton's interpreter: few programs, each of which costs a fixed time, yet enough to cut requests."""

# By capability (the nearest lower one counts) and rows of a tile, for 16-bit queries and a latent width of 512.
_TABLE: dict[int, dict[int, Tuning]] = {
    80: {
        16: Tuning(16, 32, 4, 3, 1, 128, 8),
        32: Tuning(32, 32, 8, 2, 1, 128, 8),
        64: Tuning(64, 16, 8, 2, 1, 128, 8),
    },
    86: {
        16: Tuning(16, 32, 4, 2, 1, 128, 8),
        32: Tuning(32, 16, 8, 2, 1, 128, 8),
        64: Tuning(64, 16, 8, 1, 1, 128, 8),
    },
    90: {
        16: Tuning(16, 64, 4, 2, 1, 128, 8),
        32: Tuning(32, 64, 8, 2, 1, 128, 8),
        64: Tuning(64, 64, 8, 2, 1, 128, 8),
    },
}


def choose(shape: AttentionShape, gpu: Gpu) -> Tuning:
    """The tuning for decode calls of `shape` on `gpu`, always one whose shared memory fits."""
    rows = shape.heads * max(1, shape.q_len)
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    if gpu.capability == 0:
        return Tuning(block_m, 16 if block_m == 16 else 32, 1, 1, 1, 16, 3, swap=block_m == 16)
    classes = [capability for capability in _TABLE if capability <= gpu.capability]
    tuning = _TABLE[max(classes, default=min(_TABLE))][block_m]
    return tuning


def up(n: int) -> int:
    """The next power of two, at least 1."""
    return 1 << max(0, n - 1).bit_length()
