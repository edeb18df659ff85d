"""Which measured bucket speaks for a shape that nobody measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mla_serve.selection.decision import Decision
from mla_serve.selection.invariant import fastest
from mla_serve.selection.table import distance
from mla_serve.shapes import Bucket

__all__ = ["borrowed"]


def borrowed(
    bucket: Bucket, near: Sequence[Decision], layers: int, allowed: Callable[[Decision], bool]
) -> tuple[Decision, str] | None:
    """The decision of the nearest of `near` (sorted by distance) whose kernel is `allowed`, and a note that names the bucket.

    A bucket often lies between two that are equally near and disagree: a length of 64 between 32 and 128. Then, of their
    winners, the one whose cost over all of them is the least (geometric mean over the best) is taken, not the first.
    """
    group: list[Decision] = []
    for decision in near:
        if group and distance(decision.bucket.shape, bucket.shape) != distance(group[0].bucket.shape, bucket.shape):
            break
        if allowed(decision):
            group.append(decision)
    if not group:
        return None
    winners = {(decision.winner, decision.padding) for decision in group}
    if len(winners) > 1:
        form = fastest([d.candidates for d in group], layers, lambda row: (row.backend, row.padding) in winners)
        for decision in group:
            if form == (decision.winner, decision.padding):
                names = " and ".join(str(other.bucket) for other in group)
                return decision, f"not measured; the best over the nearest measured buckets, {names}"
    return group[0], f"not measured; as in the nearest measured bucket, {group[0].bucket}"
