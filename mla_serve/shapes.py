"""What a request to an attention kernel looks like: model widths, a batch's shape, its bucket, the softmax scale.

Plain data. Nothing here touches a tensor, so every other room may import it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from typing import Any, Literal

DType = Literal["float32", "bfloat16", "float16", "float8_e4m3fn"]


class Phase(StrEnum):
    """The three attention calls of an MLA model."""

    PREFILL = "prefill"  # un-absorbed: new tokens on themselves, causal
    CONTEXT = "context"  # un-absorbed: new tokens on a chunk of cached context, never causal
    DECODE = "decode"  # absorbed: new tokens on the paged latent cache


@dataclass(frozen=True, slots=True)
class MLADims:
    """Widths of one MLA layer on one rank, in elements (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    `heads` counts the query heads of this rank, after tensor parallelism.
    """

    heads: int
    nope: int
    rope: int
    v: int
    latent: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value < (0 if field.name == "rope" else 1):
                raise ValueError(f"MLADims.{field.name} must be positive, got {value}")

    @property
    def qk(self) -> int:
        """Query and key width of the un-absorbed form: nope + rope (DeepSeek: 192)."""
        return self.nope + self.rope

    @property
    def latent_row(self) -> int:
        """Width of one cached token, and of an absorbed query: latent rank + rope (DeepSeek: 576)."""
        return self.latent + self.rope


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One attention call, as far as the choice of a kernel depends on it.

    `q_len` and `kv_len` are tokens per live request (total / requests, rounded up). Prefill and context: `qk` = nope + rope,
    `v` = value width, as many key heads as query heads. Decode: `qk` = latent + rope, `v` = latent, one key head,
    and the cache is [pages, page_size, qk]. `rope` is the rope part of `qk`. `cache_dtype` None means the cache has `dtype`.
    """

    phase: Phase
    batch: int
    q_len: int
    kv_len: int
    heads: int
    qk: int
    v: int
    rope: int = 64
    dtype: DType = "bfloat16"
    causal: bool = True
    lse: bool = False
    page_size: int | None = None
    cache_dtype: DType | None = None
    ragged: bool = False
    graph: bool = False
    batch_invariant: bool = False

    @classmethod
    def prefill(cls, dims: MLADims, *, batch: int, q_len: int, dtype: DType, lse: bool) -> AttentionShape:
        """New tokens attending to themselves."""
        return cls(Phase.PREFILL, batch, q_len, q_len, dims.heads, dims.qk, dims.v, dims.rope, dtype, causal=True, lse=lse)

    @classmethod
    def context(cls, dims: MLADims, *, batch: int, q_len: int, kv_len: int, dtype: DType) -> AttentionShape:
        """New tokens attending to cached context, always with the LSE that the merge needs."""
        return cls(Phase.CONTEXT, batch, q_len, kv_len, dims.heads, dims.qk, dims.v, dims.rope, dtype, causal=False, lse=True)

    @classmethod
    def decode(
        cls, dims: MLADims, *, batch: int, kv_len: int, dtype: DType, page_size: int, q_len: int = 1, ragged: bool = False,
        lse: bool = False, cache_dtype: DType | None = None, graph: bool = False,
    ) -> AttentionShape:  # fmt: skip
        """New tokens attending to the paged latent cache, themselves included."""
        return cls(
            Phase.DECODE, batch, q_len, kv_len, dims.heads, dims.latent_row, dims.latent, dims.rope, dtype,
            causal=True, lse=lse, page_size=page_size, cache_dtype=cache_dtype, ragged=ragged, graph=graph,
        )  # fmt: skip

    @property
    def absorbed(self) -> bool:
        return self.phase is Phase.DECODE

    def widened(self, *, qk: int | None = None, v: int | None = None, heads: int | None = None) -> AttentionShape:
        """The shape that a kernel sees once widths or query heads are padded."""
        return replace(self, qk=qk or self.qk, v=v or self.v, heads=heads or self.heads)


def _up(n: int) -> int:
    """The next power of two, at least 1."""
    return 1 << max(0, n - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Bucket:
    """A class of shapes that share one decision: sizes rounded up to powers of two, all else exact."""

    shape: AttentionShape

    @classmethod
    def of(cls, shape: AttentionShape) -> Bucket:
        """Rounds batch and lengths up; a decode's query tokens per request stay exact, since kernels are built for them."""
        q_len = shape.q_len if shape.absorbed else _up(shape.q_len)
        return cls(replace(shape, batch=_up(shape.batch), q_len=q_len, kv_len=_up(shape.kv_len)))

    def to_json(self) -> dict[str, Any]:
        """Flat and readable; fields at their default None are left out."""
        return {k: v.value if isinstance(v, Phase) else v for k, v in asdict(self.shape).items() if v is not None}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Bucket:
        """Inverse of `to_json`; raises KeyError, TypeError or ValueError on anything else."""
        return cls(AttentionShape(**{**data, "phase": Phase(data["phase"])}))

    def __str__(self) -> str:
        s = self.shape
        page = f" page {s.page_size}" if s.page_size else ""
        flags = [name for name in ("lse", "ragged", "graph", "batch_invariant") if getattr(s, name)]
        return (
            f"{s.phase.value} {s.batch} x {s.q_len} on {s.kv_len}, {s.heads} heads, {s.qk}/{s.v} {s.dtype}{page}"
            + (f" ({', '.join(flags)})" if flags else "")
        )  # fmt: skip


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's attention temperature, 0.1 * mscale * ln(factor) + 1 (arXiv 2309.00071, eq. 22); 1 where nothing is stretched."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rope settings of a Hugging Face config.json, whichever spelling it uses.

    Older files have `rope_scaling` (with `type` or `rope_type`) beside `rope_theta`; transformers 5 writes `rope_parameters`.
    Returns a dict that always has `rope_type` and `rope_theta`. Raises ValueError if both spellings are there and disagree.
    """
    spellings = [dict(config[name]) for name in ("rope_scaling", "rope_parameters") if config.get(name)]
    for spelling in spellings:
        kind = spelling.pop("type", None)
        spelling.setdefault("rope_type", kind or "default")
        spelling.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    if len(spellings) == 2:
        clash = sorted(k for k in spellings[0].keys() & spellings[1].keys() if spellings[0][k] != spellings[1][k])
        if clash:
            raise ValueError(
                f"config.json gives rope_scaling and rope_parameters with different {', '.join(clash)}; keep one of them"
            )
        return {**spellings[0], **spellings[1]}
    return spellings[0] if spellings else {"rope_type": "default", "rope_theta": config.get("rope_theta", 10000.0)}


def softmax_scale(config: Mapping[str, Any]) -> float:
    """The scale of an MLA model's logits: (nope + rope) ** -0.5 * mscale ** 2, from the config and never from a tensor's width.

    `mscale` is YaRN's, with the config's `mscale_all_dim` (DeepSeek-V3's modeling file); 1 without YaRN or without that field.
    """
    scale = float((config["qk_nope_head_dim"] + config["qk_rope_head_dim"]) ** -0.5)
    rope = rope_parameters(config)
    if rope["rope_type"] in ("yarn", "deepseek_yarn") and rope.get("mscale_all_dim"):
        scale *= yarn_mscale(rope["factor"], rope["mscale_all_dim"]) ** 2
    return scale
