"""hypothesis strategies: any batch that the contract allows, with what each example is an example of."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from mla_serve.backends import BatchLayout
from mla_serve.shapes import AttentionShape, MLADims, Phase
from tests.backends.cases import Case, decode, random

__all__ = ["FEATURES", "Drawn", "cases"]

CPU = torch.device("cpu")
FEATURES = ("ragged", "empty rows", "non-contiguous", "page border", "heads no power of two")
"""What at least a fifth of the examples each must be, so each is asked for in its own fifth. Un-absorbed attention has no
pages, so there the border is that of the 16 tokens in which the engine's pages end on a CPU."""


@dataclass(frozen=True)
class Drawn:
    case: Case
    features: frozenset[str]


@st.composite
def cases(draw: st.DrawFn, phases: tuple[Phase, ...], feature: str, *, equal_widths: bool) -> Drawn:
    """A call of one of `phases` that has `feature`; `equal_widths` draws Q/K and value widths alike.

    hypothesis draws a boolean as often false as it likes, so what must be seen is asked for, the rest is left to it.
    """
    phase = draw(st.sampled_from(phases))
    uneven, empty, apart, border, odd = (name == feature or draw(st.booleans()) for name in FEATURES)
    heads = draw(st.sampled_from((3, 5, 6, 7, 12) if odd else (1, 2, 4, 8)))
    rope = draw(st.integers(0, 24))
    nope, v, latent = draw(st.integers(1, 48)), draw(st.integers(1, 64)), draw(st.integers(1, 80))
    dims = MLADims(heads, nope, rope, nope + rope if equal_widths else v, latent)
    page = draw(st.sampled_from((1, 4, 16, 48, 64))) if phase is Phase.DECODE else 16
    dtype = draw(st.sampled_from(("float32", "bfloat16")))
    q_lens, kv_lens = _lengths(draw, phase, page, uneven=uneven, empty=empty, border=border)
    torch.manual_seed(draw(st.integers(0, 2**31 - 1)))
    if phase is Phase.DECODE:
        shape = AttentionShape.decode(
            dims, batch=len(q_lens), kv_len=max(1, *kv_lens), dtype=dtype, page_size=page, q_len=q_lens[0], lse=True
        )
        case = decode(shape, q_lens, kv_lens, CPU)
        case = _queries_apart(case) if apart else case
    else:
        shape = AttentionShape.prefill(dims, batch=len(q_lens), q_len=max(1, *q_lens), dtype=dtype, lse=True)
        shape = replace(shape, phase=phase, causal=phase is Phase.PREFILL, kv_len=max(1, *kv_lens))
        case = _unabsorbed(shape, q_lens, kv_lens, apart=apart)
    return Drawn(case, frozenset(_features(case, q_lens, kv_lens, page)))


def _lengths(
    draw: st.DrawFn, phase: Phase, page: int, *, uneven: bool, empty: bool, border: bool
) -> tuple[list[int], list[int]]:
    """Query and key lengths of 1 to 5 requests; a decode's query counts are equal, as its kernel is built for them."""
    n = draw(st.integers(2, 5)) if uneven or empty else draw(st.integers(1, 5))
    keys, queries = st.integers(1, 90), st.integers(1, 3 if phase is Phase.DECODE else 24)
    kv_lens = draw(st.lists(keys, min_size=n, max_size=n)) if uneven else [draw(keys)] * n
    varied = uneven and phase is not Phase.DECODE
    q_lens = draw(st.lists(queries, min_size=n, max_size=n)) if varied else [draw(queries)] * n
    if phase is Phase.PREFILL and draw(st.booleans()):
        kv_lens = list(q_lens)  # squares, as an engine asks; else rectangles, which the contract allows
    if border:
        kv_lens[0] = page * draw(st.integers(1, max(1, 96 // page)))
    if empty:
        kv_lens[-1] = 0
        if phase is not Phase.DECODE and draw(st.booleans()):
            q_lens[-1] = 0
    return q_lens, kv_lens


def _unabsorbed(shape: AttentionShape, q_lens: list[int], kv_lens: list[int], *, apart: bool) -> Case:
    tokens, keys, (qk, v) = sum(q_lens), sum(kv_lens), (shape.qk, shape.v)
    batch = BatchLayout.make(q_lens, kv_lens, CPU)
    if not apart:
        sizes = ((tokens, qk), (keys, qk), (keys, v))
        q, k, values = (random(n, shape.heads, width, shape=shape, device=CPU) for n, width in sizes)
        return Case(shape, (q, k, values), batch)
    packed = _with_nan(shape, keys, qk + v + 2)  # K and V of one buffer, its first row and last columns nobody's
    return Case(shape, (_with_nan(shape, tokens, qk + 1)[1:, :, :qk], packed[1:, :, :qk], packed[1:, :, qk : qk + v]), batch)


def _with_nan(shape: AttentionShape, rows: int, width: int) -> Tensor:
    buffer = random(1 + rows, shape.heads, width, shape=shape, device=CPU)
    buffer[0] = buffer[..., -1] = float("nan")
    return buffer


def _queries_apart(case: Case) -> Case:
    """The queries as views of one buffer, the cache as a layer of a pool whose other layer is NaN."""
    shape, (q_nope, q_pe, cache) = case.shape, case.inputs
    queries = torch.cat([q_nope, q_pe, torch.full_like(q_nope[..., :1], float("nan"))], dim=-1)
    pool = torch.stack([torch.full_like(cache, float("nan")), cache])
    return replace(case, inputs=(queries[..., : shape.v], queries[..., shape.v : shape.qk], pool[1]))


def _features(case: Case, q_lens: list[int], kv_lens: list[int], page: int) -> list[str]:
    """Observed in what was drawn, not taken from what was meant."""
    seen = {
        "ragged": len(set(zip(q_lens, kv_lens, strict=True))) > 1,
        "empty rows": 0 in kv_lens or 0 in q_lens,
        "non-contiguous": not all(t.is_contiguous() for t in case.inputs),
        "page border": any(n and n % page == 0 for n in kv_lens),
        "heads no power of two": case.shape.heads & (case.shape.heads - 1) != 0,
    }
    return [name for name in FEATURES if seen[name]]
