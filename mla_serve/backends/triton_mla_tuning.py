"""How `triton-mla` is cut for a GPU: tile sizes, warps, stages, programs. A small table per GPU class and a rule for the rest.

Shared memory is what a choice must fit in: the pipeline holds `stages` tiles of latents, and one tile of queries beside them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mla_serve.shapes import AttentionShape

__all__ = ["AMPERE_SHARED", "INTERPRETER", "Gpu", "Tuning", "choose", "shared_bytes", "up"]

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True, slots=True)
class Gpu:
    """What the choice depends on: compute capability (9.0 is 90), multiprocessors, shared memory of one program in bytes."""

    capability: int
    multiprocessors: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class Tuning:
    """Rows of a tile, keys of a block, warps and pipeline stages of a program, programs of a launch for each multiprocessor,
    the fewest keys of a piece, and how many pieces one program reduces at a time.

    `swap` computes products transposed (see the kernel), `part` is how many columns of the output are reduced at a time.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    programs: int
    least_keys: int
    fan: int
    swap: bool = False
    part: int = 128


AMPERE_SHARED = 163 << 10
"""Bytes of shared memory that one program may have on an A100."""

INTERPRETER = Gpu(capability=0, multiprocessors=7, shared_bytes=0)
"""Stands for the CPU under Triton's interpreter: few programs, each of which costs a fixed time, yet enough to cut requests."""

# By capability (the nearest lower one counts) and rows of a tile, for a latent width of 512 in 16 bits.
_TABLE: dict[int, dict[int, Tuning]] = {
    80: {
        16: Tuning(16, 32, 4, 4, 1, 128, 8),
        32: Tuning(32, 32, 8, 3, 1, 128, 8),
        64: Tuning(64, 32, 8, 3, 1, 128, 8),
    },
    86: {
        16: Tuning(16, 32, 4, 3, 1, 128, 8),
        32: Tuning(32, 16, 8, 3, 1, 128, 8),
        64: Tuning(64, 16, 8, 2, 1, 128, 8),
    },
    90: {
        16: Tuning(16, 64, 8, 2, 1, 128, 8, swap=True),
        32: Tuning(32, 64, 8, 2, 1, 128, 8, swap=True),
        64: Tuning(64, 64, 8, 2, 1, 128, 8),
    },
}


def choose(shape: AttentionShape, gpu: Gpu) -> Tuning:
    """The tuning for decode calls of `shape` on `gpu`: the table's, made smaller until its shared memory fits."""
    rows = shape.heads * max(1, shape.q_len)
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    if gpu.capability == 0:
        return Tuning(block_m, 16 if block_m == 16 else 32, 1, 1, 1, 16, 3, swap=block_m == 16)
    classes = [capability for capability in _TABLE if capability <= gpu.capability]
    tuning = _TABLE[max(classes, default=min(_TABLE))][block_m]
    while shared_bytes(shape, tuning, gpu) > gpu.shared_bytes:
        if tuning.stages > 2:
            tuning = replace(tuning, stages=tuning.stages - 1)
        elif tuning.block_n > 16:
            tuning = replace(tuning, block_n=tuning.block_n // 2)
        elif tuning.block_m > 16:
            tuning = replace(tuning, block_m=tuning.block_m // 2)
        else:
            break
    # The tall operand is worth it for `wgmma` alone, which takes 16 bits and 64 rows.
    tall = tuning.block_n >= 64 and shape.dtype != "float32"
    return replace(tuning, swap=tuning.swap and tall)


def shared_bytes(shape: AttentionShape, tuning: Tuning, gpu: Gpu) -> int:
    """About what a program needs, never less: a latent tile for each stage, queries, weights, and what conversions take.

    Triton keeps one tile fewer where products are not asynchronous; a float8 tile is kept once more in the queries' dtype.
    """
    width = up(max(16, shape.v)) + (up(max(16, shape.rope)) if shape.rope else 0)
    query, stored = _BYTES[shape.dtype], _BYTES[shape.cache_dtype or shape.dtype]
    asynchronous = gpu.capability >= 90 and (tuning.block_n if tuning.swap else tuning.block_m) >= 64
    tiles = tuning.stages if asynchronous else max(1, tuning.stages - 1)
    latents = tuning.block_n * width * (tiles * stored + (query if stored != query else 0))
    return latents + tuning.block_m * width * query + tuning.block_m * tuning.block_n * query + 1024


def up(n: int) -> int:
    """The next power of two, at least 1."""
    return 1 << max(0, n - 1).bit_length()
