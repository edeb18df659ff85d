"""The shapes that `bench attention` and `probe --grid` share, by name."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from mla_serve.errors import UserError
from mla_serve.shapes import AttentionShape, DType, MLADims

DEEPSEEK = MLADims(heads=16, nope=128, rope=64, v=128, latent=512)
"""One rank's share of DeepSeek-V2-Lite, whole, or of DeepSeek-V3 at tensor parallelism 8."""
NARROW = MLADims(heads=16, nope=128, rope=64, v=100, latent=512)
"""A value width that is no multiple of 8, which fused kernels refuse as it is."""

GRIDS = ("cpu", "decode", "prefill", "small", "full")
PAGE = 64

CPU_LENGTHS = (128, 512, 1024, 2048)
CPU_DTYPES: tuple[DType, ...] = ("float32", "bfloat16")

# requests, query heads, keys each; from one short request to what fills the memory
DECODE = (
    (1, 16, 8192), (1, 128, 32768), (4, 128, 1024), (8, 16, 131072), (16, 16, 8192), (16, 32, 8192), (16, 64, 8192),
    (64, 128, 4096), (128, 16, 4096), (128, 128, 8192), (256, 16, 1024),
)  # fmt: skip
PREFILL = (
    (1, 16, 1024),
    (1, 16, 4096),
    (1, 16, 16384),
    (1, 128, 4096),
    (16, 16, 512),
    (32, 16, 128),
)  # requests, heads, tokens
SPECULATIVE = ((4, 16, 8192), (16, 16, 8192), (16, 128, 4096), (64, 16, 1024))  # 8 query tokens each
ODD_HEADS = ((1, 20, 8192), (16, 20, 8192), (16, 40, 8192), (64, 40, 4096))  # no power of two: MiniCPM3 and others
RAGGED_DECODE = ((16, 16, 1), (64, 16, 1), (16, 128, 1), (16, 16, 8))  # requests, heads, query tokens each
RAGGED_PREFILL = ((4, 16),)  # requests, heads
CONTEXT = ((1, 16, 512, 4096), (1, 16, 2048, 4096), (4, 16, 128, 1024), (1, 128, 1024, 4096))  # requests, heads, q, keys
QUERY_TOKENS = 8
SHORTEST, LONGEST = 100, 32768


@dataclass(frozen=True, slots=True)
class Case:
    """One row group of a bench: the shape that is looked up, and the lengths of each request, in tokens."""

    shape: AttentionShape
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]

    @classmethod
    def uniform(cls, shape: AttentionShape) -> Case:
        return cls(shape, (shape.q_len,) * shape.batch, (shape.kv_len,) * shape.batch)

    @property
    def ragged(self) -> bool:
        """Whether requests differ in length."""
        return len(set(zip(self.q_lens, self.kv_lens, strict=True))) > 1


def log_uniform(count: int, *, seed: int, shortest: int = SHORTEST, longest: int = LONGEST) -> tuple[int, ...]:
    """Lengths whose logarithms are uniform between two bounds; the same ones for the same seed, the longest among them."""
    draw = random.Random(seed)
    drawn = [round(math.exp(draw.uniform(math.log(shortest), math.log(longest)))) for _ in range(count - 1)]
    return (*drawn, longest)


def cases(name: str) -> list[Case]:
    """The cases of a grid. Raises UserError for a name that no grid has.

    `cpu`: prefill in float32 and bfloat16. `small`: bfloat16 `decode` (page 64, as a CUDA graph) and `prefill` on one GPU;
    `full`: beside them 8 query tokens, odd head counts, context chunks with LSE, and ragged batches.
    """
    if name not in GRIDS:
        raise UserError(f"there is no grid {name!r}; use {', '.join(GRIDS[:-1])} or {GRIDS[-1]}")
    if name == "cpu":
        shapes = [
            AttentionShape.prefill(DEEPSEEK, batch=1, q_len=length, dtype=dtype, lse=False)
            for dtype in CPU_DTYPES
            for length in CPU_LENGTHS
        ]
        return [Case.uniform(shape) for shape in shapes]
    found = [Case.uniform(_decode(batch, heads, kv)) for batch, heads, kv in DECODE]
    found += [Case.uniform(_prefill(_dims(heads), batch, length)) for batch, heads, length in PREFILL]
    found.append(Case.uniform(_prefill(NARROW, 1, 4096)))
    if name != "full":
        return [case for case in found if name in ("small", case.shape.phase.value)]
    found += [Case.uniform(_decode(batch, heads, kv, q_len=QUERY_TOKENS)) for batch, heads, kv in SPECULATIVE]
    found += [Case.uniform(_decode(batch, heads, kv)) for batch, heads, kv in ODD_HEADS]
    found += [_ragged_decode(batch, heads, q_len) for batch, heads, q_len in RAGGED_DECODE]
    for batch, heads, q_len, kv_len in CONTEXT:
        dims = _dims(heads)
        found.append(
            Case.uniform(AttentionShape.context(dims, batch=batch, q_len=q_len, kv_len=kv_len, dtype="bfloat16"))
        )  # fmt: skip
    return found + [_ragged_prefill(batch, heads) for batch, heads in RAGGED_PREFILL]


def named_grid(name: str) -> list[AttentionShape]:
    """The shapes of a grid, for `probe`. Raises UserError for a name that no grid has."""
    return [case.shape for case in cases(name)]


def _dims(heads: int) -> MLADims:
    return MLADims(heads=heads, nope=128, rope=64, v=128, latent=512)


def _decode(batch: int, heads: int, kv_len: int, *, q_len: int = 1, ragged: bool = False) -> AttentionShape:
    return AttentionShape.decode(
        _dims(heads), batch=batch, kv_len=kv_len, dtype="bfloat16", page_size=PAGE, q_len=q_len, ragged=ragged, graph=True
    )  # fmt: skip


def _prefill(dims: MLADims, batch: int, q_len: int) -> AttentionShape:
    return AttentionShape.prefill(dims, batch=batch, q_len=q_len, dtype="bfloat16", lse=False)


def _mean(lens: Sequence[int]) -> int:
    """Rounded up, as a shape counts tokens per request."""
    return -(-sum(lens) // len(lens))


def _ragged_decode(batch: int, heads: int, q_len: int) -> Case:
    lens = log_uniform(batch, seed=batch + heads + q_len)
    shape = _decode(batch, heads, _mean(lens), q_len=q_len, ragged=max(lens) * batch > 2 * sum(lens))
    return Case(shape, (q_len,) * batch, lens)


def _ragged_prefill(batch: int, heads: int) -> Case:
    lens = log_uniform(batch, seed=batch + heads)
    return Case(_prefill(_dims(heads), batch, _mean(lens)), lens, lens)
