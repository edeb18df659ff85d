"""A bar chart of candidates as numbers: positions in percent of the width, so that text keeps its size on any screen."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mla_serve.backends.padded import Padding
from mla_serve.selection.decision import CandidateResult, Decision

_LOG_FROM = 12.0  # longest over shortest bar, from which a linear scale would hide the short ones
_ROW, _AXIS = 34, 24  # pixels


@dataclass(frozen=True, slots=True)
class Bar:
    """`at` is the length in percent, `y` the row's top in pixels, `kind` the verdict of a winner or tie, else "other".

    `form` is "" for native, or what the kernel saw: "192/192", "64 heads".
    """

    label: str
    form: str
    ms: float
    at: float
    y: int
    kind: str


@dataclass(frozen=True, slots=True)
class Tick:
    label: str
    at: float
    anchor: str


@dataclass(frozen=True, slots=True)
class Chart:
    """`floor_at` is None where the floor is unknown."""

    bars: tuple[Bar, ...]
    ticks: tuple[Tick, ...]
    floor_at: float | None
    log: bool
    bottom: int
    height: int


def ms(value: float | None) -> str:
    """Milliseconds with four figures, plain."""
    return "" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:#.4g}".rstrip(".")


def chart(decision: Decision) -> Chart | None:
    """The timed candidates, fastest first: one layer's run and its share of the plan. None where nothing was timed."""
    costs = [(cost, row) for row in decision.candidates if (cost := row.cost(decision.layers)) is not None and cost > 0]
    if not costs:
        return None
    costs.sort(key=lambda pair: pair[0])
    floor = decision.floor_ms if decision.floor_ms and decision.floor_ms > 0 else None
    least, most = min(costs[0][0], floor or math.inf), max(costs[-1][0], floor or 0.0)
    log = costs[-1][0] / costs[0][0] > _LOG_FROM
    if log:
        low, high = 0.7 * least, 1.02 * most
        places = _decades(low, high)
    else:
        low, high = 0.0, 1.02 * most
        places = _steps(high)

    def at(value: float) -> float:
        share = math.log(value / low) / math.log(high / low) if log else value / high
        return round(100 * share, 2)

    bars = tuple(
        Bar(row.label, _form(decision, row.padding), cost, max(at(cost), 0.4), i * _ROW, _kind(row))
        for i, (cost, row) in enumerate(costs)
    )
    ticks = tuple(Tick(f"{value:g}", at(value), "start" if at(value) < 3 else "middle") for value in places if at(value) <= 87)
    bottom = len(bars) * _ROW
    return Chart(bars, ticks, at(floor) if floor else None, log, bottom, bottom + _AXIS)


def _kind(row: CandidateResult) -> str:
    return row.verdict if row.verdict in ("chosen", "tie") else "other"


def _form(decision: Decision, padding: Padding | None) -> str:
    if padding is None:
        return ""
    return f"{padding.heads} heads" if decision.bucket.shape.absorbed else f"{padding.qk}/{padding.v}"


def _decades(low: float, high: float) -> list[float]:
    """1, 10, 100, ..., with 2 and 5 between where there are few."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if high / low < 200 else (1,)
    return [float(f"{f}e{e}") for e in exponents for f in factors if low <= f * 10.0**e <= high]


def _steps(high: float) -> list[float]:
    """Zero and up to five round values."""
    raw = high / 4
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(f * size for f in (1, 2, 2.5, 5, 10) if f * size >= raw)
    return [round(i * step, 12) for i in range(int(high / step) + 1)]
