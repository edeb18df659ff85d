"""From figures to a winner: pure arithmetic on rows, so that a table can be ranked again for another model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mla_serve.backends.padded import Padding
from mla_serve.selection.decision import CandidateResult

Form = tuple[str, Padding | None]
"""A backend's name and its padding, None where it runs natively."""

TIE = 0.02
"""Two candidates closer than the noise of the run, but at most this fraction, are a tie."""


def rank(rows: Sequence[CandidateResult], layers: int, neighbour: Form | None = None) -> list[CandidateResult]:
    """`rows` with "chosen", "tie" or "slower" for each that was timed; the others stay as they are.

    The least `ms + plan_ms / layers` wins. Candidates within the noise of the best (the larger spread of the two, at most
    `TIE`) tie with it, and a tie goes to a native form, then to the `neighbour`: the form chosen in the neighbouring bucket, so
    that two probes of one host agree; then to the cheapest. Rows without `ms` lost before the clock.
    """
    costs = {i: cost for i, row in enumerate(rows) if (cost := row.cost(layers)) is not None}
    if not costs:
        return list(rows)
    best = min(costs, key=costs.__getitem__)

    def ties(i: int) -> bool:
        noise = min(TIE, max(rows[best].spread or 0.0, rows[i].spread or 0.0))
        return costs[i] <= costs[best] * (1.0 + noise)

    tied = [i for i in costs if ties(i)]
    chosen = min(tied, key=lambda i: (rows[i].padding is not None, (rows[i].backend, rows[i].padding) != neighbour, costs[i]))
    ranked = list(rows)
    for i in costs:
        verdict, reason = ("tie", _gap(costs[i], costs[chosen])) if i in tied else ("slower", rows[i].reason)
        ranked[i] = replace(rows[i], verdict="chosen" if i == chosen else verdict, reason=None if i == chosen else reason)  # type: ignore[arg-type]
    return ranked


def _gap(cost: float, winner: float) -> str:
    faster = "faster" if cost < winner else "slower"
    return f"{abs(cost / winner - 1.0):.1%} {faster}, within the noise; ties go to native, then to the neighbouring bucket's"
