"""What each of our backends takes and refuses on this host, in its own words, for a results file and the docs made from it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mla_serve.backends.base import Backend
from mla_serve.selection import candidates
from mla_serve.selection.candidates import native
from mla_serve.shapes import AttentionShape, DType, MLADims

__all__ = ["asked_shapes", "described"]

DEEPSEEK = MLADims(heads=16, nope=128, rope=64, v=128, latent=512)
OTHERS = {
    "DeepSeek at 128 heads": MLADims(heads=128, nope=128, rope=64, v=128, latent=512),
    "20 heads": MLADims(heads=20, nope=128, rope=64, v=128, latent=512),
    "GLM-4.7-Flash (256/256)": MLADims(heads=20, nope=192, rope=64, v=256, latent=512),
    "MiniCPM3 (96/64, latent 256)": MLADims(heads=40, nope=64, rope=32, v=64, latent=256),
    "V of 100": MLADims(heads=16, nope=128, rope=64, v=100, latent=512),
}


def asked_shapes() -> dict[str, AttentionShape]:
    """By what is special about each: the shapes that a backend is asked about."""

    def prefill(dims: MLADims = DEEPSEEK, dtype: DType = "bfloat16", *, lse: bool = False) -> AttentionShape:
        return AttentionShape.prefill(dims, batch=1, q_len=1024, dtype=dtype, lse=lse)

    def decode(dims: MLADims = DEEPSEEK, dtype: DType = "bfloat16", **more: Any) -> AttentionShape:
        return AttentionShape.decode(dims, batch=16, kv_len=4096, dtype=dtype, **{"page_size": 64, "graph": True, **more})

    found = {
        "prefill": prefill(),
        "prefill with LSE": prefill(lse=True),
        "context": AttentionShape.context(DEEPSEEK, batch=1, q_len=512, kv_len=4096, dtype="bfloat16"),
        "decode": decode(),
        "decode with LSE": decode(lse=True),
        "decode, pages of 16": decode(page_size=16),
        "decode, pages of 1": decode(page_size=1),
        "decode, 8 query tokens": decode(q_len=8),
        "decode, float8 cache": decode(cache_dtype="float8_e4m3fn"),
    }
    for dtype in ("float16", "float32"):
        found[f"prefill, {dtype}"] = prefill(dtype=dtype)
        found[f"decode, {dtype}"] = decode(dtype=dtype)
    for name, dims in OTHERS.items():
        found[f"prefill, {name}"] = prefill(dims)
        found[f"decode, {name}"] = decode(dims)
    for what in ("prefill", "decode"):
        found[f"{what}, batch-invariant"] = replace(found[what], batch_invariant=True)
    return found


def described(backends: Sequence[Backend]) -> list[dict[str, Any]]:
    """A dict per backend: `name`, `library`, `about`, `unavailable` (why, or None), its flags, and `takes` and `refuses`.

    `takes` lists the shapes that it takes natively, `padded` those that it takes padded alone, `refuses` maps each of its
    reasons to the shapes that it gives it for.
    """
    return [_described(native(backend)) for backend in backends]


def _described(backend: Backend) -> dict[str, Any]:
    unavailable = backend.available()
    data: dict[str, Any] = {
        "name": backend.name,
        "library": backend.library,
        "about": (inspect.getdoc(type(backend)) or "").split("\n\n", 1)[0].replace("\n", " "),
        "unavailable": unavailable,
        "gives_lse": backend.gives_lse,
        "capturable": backend.capturable,
        "needs_host_lens": backend.needs_host_lens,
        "batch_invariant": backend.batch_invariant,
        "page_sizes": backend.page_sizes,
        "head_counts": backend.head_counts,
        "takes": [],
        "padded": [],
        "refuses": {},
    }
    if unavailable is not None:
        return data
    for what, shape in asked_shapes().items():
        plain, *padded = candidates(shape, [backend])
        if plain.verdict is None:
            data["takes"].append(what)
            continue
        data["refuses"].setdefault(plain.reason, []).append(what)
        if any(form.verdict is None for form in padded):
            data["padded"].append(what)
    return data
