"""Decision files beside each other: what a merge keeps, and what changed from one probe to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_serve.selection.decision import Decision, Policy
from mla_serve.selection.entry import Host, host_of
from mla_serve.selection.table import DecisionTable
from mla_serve.shapes import Bucket

_Key = tuple[Bucket, Policy, Host | None]


@dataclass(frozen=True, slots=True)
class Change:
    """One bucket of one host in two tables; `before` or `after` is None where a table does not have it."""

    before: Decision | None
    after: Decision | None

    @property
    def bucket(self) -> Bucket:
        decision = self.after or self.before
        assert decision is not None
        return decision.bucket

    @property
    def winner_changed(self) -> bool:
        """Another kernel, or the same in another form. False where only one table has the bucket."""
        a, b = self.before, self.after
        return a is not None and b is not None and (a.winner, a.padding) != (b.winner, b.padding)

    @property
    def times(self) -> tuple[float | None, float | None]:
        """Milliseconds of the winner in each table."""
        before, after = (decision.chosen if decision else None for decision in (self.before, self.after))
        return before.ms if before else None, after.ms if after else None

    @property
    def ratio(self) -> float | None:
        """The winner's time after over the winner's time before: below 1 is faster."""
        before, after = self.times
        return after / before if before and after else None

    def to_json(self) -> dict[str, Any]:
        before, after = self.times
        one = self.after or self.before
        assert one is not None
        return {
            "bucket": self.bucket.to_json(),
            "policy": one.policy,
            "device": one.fingerprint.device,
            "before": self.before.label if self.before else None,
            "after": self.after.label if self.after else None,
            "winner_changed": self.winner_changed,
            "before_ms": before,
            "after_ms": after,
            "ratio": self.ratio,
        }


def diff(before: DecisionTable, after: DecisionTable) -> list[Change]:
    """Every bucket of both tables, by host; two tables of one host each are compared even if it is not the same host."""
    old, new = list(before), list(after)
    hosts = [{host_of(decision.fingerprint) for decision in side} for side in (old, new)]
    any_host = all(len(side) == 1 for side in hosts)
    a, b = ({_key(decision, any_host): decision for decision in side} for side in (old, new))
    return [Change(a.get(key), b.get(key)) for key in dict.fromkeys([*a, *b])]


def _key(decision: Decision, any_host: bool) -> _Key:
    return decision.bucket, decision.policy, None if any_host else host_of(decision.fingerprint)


def merge(files: Sequence[Path], out: Path) -> dict[str, Any]:
    """Writes into `out` every decision of `files`, and of `out` itself if it exists; returns the counts.

    Of several decisions for one bucket, policy and host the one measured last stays. Raises UserError for a file that is
    missing or no table, `out` included, and if `out` cannot be written: nothing is left out silently.
    """
    merged = DecisionTable.load(out, strict=True) if out.exists() else DecisionTable()
    counts = {"already there": len(merged)} if out.exists() else {}
    for file in files:
        table = DecisionTable.load(file, strict=True)
        merged.add(table)
        counts[str(file)] = len(table)
    merged.save(out, strict=True)
    hosts = {host_of(decision.fingerprint) for decision in merged}
    return {"out": str(out), "decisions": len(merged), "hosts": len(hosts), "from": counts}
