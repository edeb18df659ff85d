"""A row of `bench attention`: one kernel in one form on one shape, and the verdict over all rows of that shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from mla_serve.bench.grids import Case

__all__ = ["FIELDS", "SAME", "Row", "bucket_of", "judged"]

RowVerdict = Literal["best", "tie", "slower", "disqualified", "unsupported", "crashed"]

FIELDS = (
    "phase", "batch", "heads", "q_len", "kv_len", "ragged", "dtype", "qk", "v", "page", "name", "padding", "us", "floor_us",
    "error", "verdict",
)  # fmt: skip
"""What every row of a results file has, whatever else it has."""

SAME = 0.02
"""Two times closer than this fraction count as one: what a repeated run of one kernel differs by."""

_BUCKET = ("phase", "batch", "heads", "q_len", "kv_len", "ragged", "dtype", "qk", "v", "page", "lse")


@dataclass(frozen=True, slots=True)
class Row:
    """Microseconds of one kernel's call, the median of interleaved rounds; None where it did not run or was wrong.

    `name` is "chosen" for the row timed through the Selector, `kernel` then what it chose. `padding` holds the padded sizes,
    None for the native form. `floor_us` is the least that traffic and arithmetic allow at the rates of this run. `error` is the
    largest relative L2 of a query's output against float32, `lse_error` the largest difference of an LSE. `plan_us` is spent
    once a step, for all layers. `timed` says how: replayed from a CUDA graph, or called eagerly. `verdict`: best, tie (within
    2 %), slower, disqualified (a wrong answer), unsupported or crashed, with the `reason`.
    """

    phase: str
    batch: int
    heads: int
    q_len: int
    kv_len: int
    ragged: bool
    dtype: str
    qk: int
    v: int
    page: int | None
    name: str
    padding: Mapping[str, int] | None
    us: float | None
    floor_us: float | None
    error: float | None
    verdict: RowVerdict
    lse: bool = False
    plan_us: float | None = None
    lse_error: float | None = None
    spread: float | None = None
    rounds: int = 0
    timed: str | None = None
    kernel: str | None = None
    policy: str | None = None
    settings: str | None = None
    reason: str | None = None
    lens: tuple[int, ...] = field(default=())

    @classmethod
    def of(cls, case: Case, name: str, **more: Any) -> Row:
        """A row of `case`; what is not given was not measured, and then a `reason` says why."""
        shape = case.shape
        fixed: dict[str, Any] = {"padding": None, "us": None, "floor_us": None, "error": None, "verdict": "unsupported"}
        return cls(
            shape.phase.value, shape.batch, shape.heads, shape.q_len, shape.kv_len, case.ragged, shape.dtype, shape.qk, shape.v,
            shape.page_size, name, lse=shape.lse, lens=case.kv_lens if case.ragged else (), **{**fixed, **more},
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """All of `FIELDS`, then of the others those that say something."""
        data = asdict(self)
        return {name: value for name, value in data.items() if name in FIELDS or value not in (None, (), False, 0)}


def bucket_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What rows (as JSON) have in common that were timed against each other."""
    return tuple(row.get(name) for name in _BUCKET)


def judged(rows: Sequence[Row]) -> list[Row]:
    """The rows of one case with best, tie or slower for each that was timed."""
    best = min((row.us for row in rows if row.us is not None), default=0.0)

    def verdict(us: float) -> RowVerdict:
        return "best" if us == best else "tie" if us <= best * (1 + SAME) else "slower"

    return [row if row.us is None else replace(row, verdict=verdict(row.us)) for row in rows]
