"""The padded form of a backend: pad, run, trim. The only place that pads."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from mla_serve.shapes import AttentionShape


@dataclass(frozen=True, slots=True)
class Padding:
    """Padded sizes: Q/K width, value width and query heads, each at least the native one."""

    qk: int
    v: int
    heads: int

    @classmethod
    def of(cls, shape: AttentionShape, *, qk: int | None = None, v: int | None = None, heads: int | None = None) -> Padding:
        return cls(qk or shape.qk, v or shape.v, heads or shape.heads)

    def to_json(self) -> dict[str, int]:
        return asdict(self)
