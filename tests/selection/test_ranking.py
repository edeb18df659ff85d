from __future__ import annotations

from mla_serve.backends.padded import Padding
from mla_serve.selection.decision import CandidateResult
from mla_serve.selection.ranking import Form, rank

PAD = Padding(192, 192, 4)


def row(name: str, ms: float, *, plan_ms: float = 0.0, spread: float = 0.05, padding: Padding | None = None) -> CandidateResult:
    return CandidateResult(name, padding, "slower", None, ms, plan_ms, spread)


def verdicts(*rows: CandidateResult, layers: int = 1, neighbour: Form | None = None) -> list[str]:
    return [ranked.verdict for ranked in rank(rows, layers, neighbour)]


def test_the_fastest_wins_and_the_others_are_slower() -> None:
    assert verdicts(row("a", 2.0), row("b", 1.0), row("c", 3.0)) == ["slower", "chosen", "slower"]


def test_a_tie_goes_to_native() -> None:
    assert verdicts(row("a", 1.0, padding=PAD), row("a", 1.019)) == ["tie", "chosen"]
    assert verdicts(row("a", 1.0, padding=PAD), row("a", 1.021)) == ["chosen", "slower"]
    assert "native" in (rank([row("a", 1.0, padding=PAD), row("a", 1.01)], 1)[0].reason or "")


def test_a_tie_between_equals_goes_to_the_neighbouring_buckets_kernel() -> None:
    a, b = row("a", 1.0), row("b", 1.01)
    assert verdicts(a, b) == ["chosen", "tie"]
    assert verdicts(a, b, neighbour=("b", None)) == ["tie", "chosen"]
    assert verdicts(a, b, neighbour=("b", PAD)) == ["chosen", "tie"], "another form of b"
    assert verdicts(a, row("b", 1.03), neighbour=("b", None)) == ["chosen", "slower"], "no tie, so no neighbour"
    assert verdicts(row("a", 1.01), row("b", 1.0, padding=PAD), neighbour=("b", PAD)) == ["chosen", "tie"], "native first"


def test_a_quiet_run_has_closer_ties() -> None:
    assert verdicts(row("a", 1.0, padding=PAD, spread=0.001), row("a", 1.01, spread=0.002)) == ["chosen", "slower"]


def test_between_equals_the_first_in_the_list() -> None:
    assert verdicts(row("a", 1.0, spread=0.0), row("b", 1.0, spread=0.0)) == ["chosen", "tie"]


def test_plans_are_shared_by_the_layers() -> None:
    planner, plain = row("planner", 1.0, plan_ms=0.2), row("plain", 1.1)
    assert verdicts(planner, plain, layers=1) == ["slower", "chosen"]
    assert verdicts(planner, plain, layers=27) == ["chosen", "slower"]


def test_rows_without_a_time_keep_what_they_have() -> None:
    out = CandidateResult("b", None, "disqualified", "LSE off by 44%")
    ranked = rank([row("a", 1.0), out], 1)
    assert ranked[1] is out
    assert rank([out], 1) == [out]
