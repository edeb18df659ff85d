"""Which padded sizes are worth trying for a kernel, and which one a pin forces."""

from __future__ import annotations

from mla_serve.backends.padded import Padding
from mla_serve.shapes import AttentionShape

USUAL_WIDTHS = (128, 192, 256)
"""Head widths that kernels are built for."""

_MOST = 4  # times more query heads: beyond that the padded rows cost more than any kernel gains
_WIDEST = 2  # times wider: the next usual width, not every one
_HEAD_COUNTS_TRIED = 2


def equal_widths(shape: AttentionShape) -> Padding | None:
    """Q/K and value width padded to the larger of both, the form nearly every kernel takes; None where they are equal."""
    if shape.absorbed or shape.qk == shape.v:
        return None
    return Padding.of(shape, qk=max(shape.qk, shape.v), v=max(shape.qk, shape.v))


def wider(shape: AttentionShape) -> list[Padding]:
    """The usual widths above both widths, up to twice the larger one."""
    width = max(shape.qk, shape.v)
    if shape.absorbed:
        return []
    return [Padding.of(shape, qk=usual, v=usual) for usual in USUAL_WIDTHS if width < usual <= _WIDEST * width]


def more_heads(shape: AttentionShape, head_counts: tuple[int, ...] | None) -> list[Padding]:
    """A decode's next legal head counts, up to four times as many heads. Empty where any count is legal."""
    if not shape.absorbed or head_counts is None:
        return []
    legal = [count for count in sorted(head_counts) if shape.heads < count <= _MOST * shape.heads]
    return [Padding.of(shape, heads=count) for count in legal[:_HEAD_COUNTS_TRIED]]


def forced(shape: AttentionShape, head_counts: tuple[int, ...] | None) -> Padding:
    """The padding of a pin with `+pad`, at whatever factor.

    Un-absorbed: both widths to the next multiple of 64, one further where that changes nothing. Decode: query heads to the next
    legal count, or to the next power of two above where any count is legal.
    """
    if not shape.absorbed:
        width = -(-max(shape.qk, shape.v) // 64) * 64
        return (
            Padding.of(shape, qk=width, v=width)
            if (width, width) != (shape.qk, shape.v)
            else Padding.of(shape, qk=width + 64, v=width + 64)
        )
    above = [count for count in sorted(head_counts or ()) if count > shape.heads]
    return Padding.of(shape, heads=above[0] if above else 1 << shape.heads.bit_length())


def describe(shape: AttentionShape, padding: Padding) -> str:
    """ "widths 192/128 to 192/192" or "16 heads to 64, 4x", for reasons and reports."""
    if shape.absorbed:
        return f"{shape.heads} heads to {padding.heads}, {padding.heads / shape.heads:.3g}x"
    factor = (padding.qk + padding.v) / (shape.qk + shape.v)
    return f"widths {shape.qk}/{shape.v} to {padding.qk}/{padding.v}, {factor:.3g}x"
