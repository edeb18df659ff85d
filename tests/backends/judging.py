"""How an answer is judged: within the contract's tolerances, or a LawBroken that names the law and the backend."""

from __future__ import annotations

from torch import Tensor

from mla_serve.backends import Backend
from mla_serve.shapes import AttentionShape
from tests.backends.cases import Case, Result

__all__ = ["LawBroken", "agree", "require"]


class LawBroken(AssertionError):
    pass


def require(truth: bool, law: str, backend: Backend, detail: str) -> None:
    if not truth:
        raise LawBroken(f"{backend.name} breaks the law of {law}: {detail}")


def tolerance(shape: AttentionShape) -> float:
    """Relative L2 against float32."""
    return 1e-5 if shape.dtype == "float32" and shape.cache_dtype in (None, "float32") else 1e-2


def relative_l2(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm().clamp_min(1e-30))


def agree(
    law: str, backend: Backend, case: Case, got: Result, want: tuple[Tensor, Tensor], what: str = "", *, slack: float = 1.0
) -> None:
    """Output and, where there is one, LSE within tolerance; the same rows empty."""
    (out, lse), (want_out, want_lse) = got, want
    require(out.shape == want_out.shape, law, backend, f"output {list(out.shape)} for {list(want_out.shape)} {what}")
    require(bool(out.isfinite().all()), law, backend, f"output is not finite {what}")
    error = relative_l2(out.detach(), want_out.detach())
    require(error <= slack * tolerance(case.shape), law, backend, f"output off by {error:.3g} relative L2 {what}")
    if lse is None:
        return
    empty = want_lse == float("-inf")
    require(bool((lse[empty] == float("-inf")).all()), law, backend, f"LSE of a row without keys is not -inf {what}")
    off = (lse - want_lse)[~empty].abs() - 1e-5 * want_lse[~empty].abs()
    worst = float(off.max()) if off.numel() else 0.0
    require(bool(off.isfinite().all()) and worst <= 2e-3, law, backend, f"LSE off by {worst:.3g} {what}")
