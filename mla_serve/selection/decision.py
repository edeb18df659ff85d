"""A Decision: which kernel serves one bucket, and everything a person needs to see why."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from mla_serve.backends.padded import Padding
from mla_serve.selection.fingerprint import Fingerprint
from mla_serve.shapes import Bucket

Verdict = Literal[
    "chosen", "slower", "tie", "disqualified", "unsupported", "unavailable", "crashed", "timed-out", "not-measured"
]
Policy = Literal["measured", "availability", "batch-invariant", "pinned"]


def label(backend: str, padding: Padding | None) -> str:
    """How logs and tables name a kernel: `torch-flash`, or `torch-flash+pad` for its padded form."""
    return backend if padding is None else f"{backend}+pad"


@dataclass(frozen=True, slots=True)
class CandidateResult:
    """What became of one candidate.

    `ms` is one call with its pad and trim copies, `plan_ms` one plan, both medians in milliseconds; `spread` the interquartile
    range of `ms` over its median; `error` the relative L2 and `lse_error` the largest absolute difference to the fp32
    reference.
    """

    backend: str
    padding: Padding | None
    verdict: Verdict
    reason: str | None = None
    ms: float | None = None
    plan_ms: float | None = None
    spread: float | None = None
    error: float | None = None
    lse_error: float | None = None
    leaks_nan: bool = False

    @property
    def label(self) -> str:
        return label(self.backend, self.padding)

    def cost(self, layers: int) -> float | None:
        """Milliseconds per layer of a model with `layers` layers: the run, and its share of the step's one plan."""
        return None if self.ms is None else self.ms + (self.plan_ms or 0.0) / layers

    def to_json(self) -> dict[str, Any]:
        return {
            "backend": self.backend,
            "padding": self.padding.to_json() if self.padding else None,
            "ms": _finite(self.ms),
            "plan_ms": _finite(self.plan_ms),
            "spread": _finite(self.spread),
            "error": _finite(self.error),
            "lse_error": _finite(self.lse_error),
            "leaks_nan": self.leaks_nan,
            "verdict": self.verdict,
            "reason": self.reason,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CandidateResult:
        """Inverse of `to_json`; figures may be missing. Raises KeyError, TypeError or ValueError on anything else."""
        if data["verdict"] not in get_args(Verdict):
            raise ValueError(f"unknown verdict {data['verdict']!r}")
        return cls(
            backend=str(data["backend"]),
            padding=_padding(data["padding"]),
            verdict=data["verdict"],
            reason=_text(data.get("reason")),
            leaks_nan=bool(data.get("leaks_nan", False)),
            **{name: _number(data.get(name)) for name in ("ms", "plan_ms", "spread", "error", "lse_error")},
        )


@dataclass(frozen=True, slots=True)
class Decision:
    """The kernel that serves `bucket`, and why: the one source for log, metrics, HTTP, command line and report.

    `policy` says how it was made: "measured" (timed here), "availability" (by kernel class, nothing timed) or "pinned".
    `note` is set where the figures are not this bucket's own: taken from the nearest measured bucket, or a fallback.
    `library` is the distribution whose version the winner depends on. `floor_ms` is the least time this device's own rates of
    arithmetic and memory allow, None where nothing was measured. `probe_seconds` is how long the
    measuring of all candidates took.
    """

    bucket: Bucket
    policy: Policy
    winner: str
    padding: Padding | None
    candidates: tuple[CandidateResult, ...]
    fingerprint: Fingerprint
    library: str = "torch"
    layers: int = 1
    floor_ms: float | None = None
    measured_at: str | None = None
    note: str | None = None
    probe_seconds: float | None = None

    @property
    def label(self) -> str:
        return label(self.winner, self.padding)

    @property
    def chosen(self) -> CandidateResult | None:
        """The winner's own row, if the candidates hold one."""
        rows = (row for row in self.candidates if row.backend == self.winner and row.padding == self.padding)
        return next(rows, None)

    def to_json(self) -> dict[str, Any]:
        return {
            "bucket": self.bucket.to_json(),
            "policy": self.policy,
            "winner": self.winner,
            "padding": self.padding.to_json() if self.padding else None,
            "candidates": [row.to_json() for row in self.candidates],
            "floor_ms": _finite(self.floor_ms),
            "layers": self.layers,
            "measured_at": self.measured_at,
            "fingerprint": self.fingerprint.to_json(),
            "library": self.library,
            "note": self.note,
            "probe_seconds": _finite(self.probe_seconds),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Decision:
        """Inverse of `to_json`; raises KeyError, TypeError, AttributeError or ValueError on anything else."""
        bucket = Bucket.from_json(data["bucket"])
        hash(bucket)  # a list where a number belongs is found here, not at the first look-up
        if data["policy"] not in get_args(Policy) or Bucket.of(bucket.shape) != bucket or int(data["layers"]) < 1:
            raise ValueError(f"unknown policy {data['policy']!r}, or sizes that are no bucket's")
        return cls(
            bucket=bucket,
            policy=data["policy"],
            winner=str(data["winner"]),
            padding=_padding(data["padding"]),
            candidates=tuple(CandidateResult.from_json(row) for row in data["candidates"]),
            fingerprint=Fingerprint.from_json(data["fingerprint"]),
            library=str(data.get("library", "torch")),
            layers=int(data["layers"]),
            floor_ms=_number(data.get("floor_ms")),
            measured_at=_text(data.get("measured_at")),
            note=_text(data.get("note")),
            probe_seconds=_number(data.get("probe_seconds")),
        )


def _padding(data: Mapping[str, Any] | None) -> Padding | None:
    return None if data is None else Padding(int(data["qk"]), int(data["v"]), int(data["heads"]))


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _finite(value: float | None) -> float | None:
    """JSON has no NaN; a figure that is not finite is told in the reason instead."""
    return value if value is not None and math.isfinite(value) else None
