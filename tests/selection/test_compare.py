from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mla_serve.backends.padded import Padding
from mla_serve.errors import UserError
from mla_serve.selection.compare import diff, merge
from mla_serve.selection.decision import CandidateResult, Decision
from mla_serve.selection.fingerprint import Fingerprint
from mla_serve.selection.table import DecisionTable
from tests.selection.fakes import a_decision, decode, prefill

HERE = Fingerprint("a CPU", "2.13.0", threads=2)
THERE = Fingerprint("a GPU", "2.13.0", sm_count=132, capability="9.0")
LATER = "2026-12-02T10:00:00Z"
PAD = Padding(192, 192, 4)


def took(ms: float, winner: str = "fake", padding: Padding | None = None) -> dict[str, object]:
    return {"winner": winner, "rows": (CandidateResult(winner, padding, "chosen", ms=ms),)}


def table(*decisions: Decision) -> DecisionTable:
    made = DecisionTable()
    for decision in decisions:
        made.put(decision)
    return made


def file(path: Path, *decisions: Decision) -> Path:
    table(*decisions).save(path)
    return path


def test_a_merge_keeps_every_host_and_the_later_of_two_measurements(tmp_path: Path) -> None:
    old, new = a_decision(prefill(), HERE, winner="old"), a_decision(prefill(), HERE, winner="new", measured_at=LATER)
    there, only = a_decision(prefill(), THERE, winner="there"), a_decision(decode(), HERE, winner="only")
    a, b = file(tmp_path / "a.json", new, only), file(tmp_path / "b.json", old, there)
    for files in ([a, b], [b, a]):
        out = tmp_path / f"{files[0].stem}.out.json"
        assert merge(files, out) == {
            "out": str(out),
            "decisions": 3,
            "hosts": 2,
            "from": {str(a): 2, str(b): 2} if files[0] == a else {str(b): 2, str(a): 2},
        }
        assert {decision.winner for decision in DecisionTable.load(out)} == {"new", "there", "only"}


def test_what_the_output_already_holds_is_merged_too(tmp_path: Path) -> None:
    out = file(tmp_path / "out.json", a_decision(decode(), THERE))
    counts = merge([file(tmp_path / "a.json", a_decision(prefill(), HERE)), out], out)
    assert counts["decisions"] == len(DecisionTable.load(out)) == 2
    assert counts["from"]["already there"] == 1


def test_a_merge_leaves_nothing_out_silently(tmp_path: Path) -> None:
    good = file(tmp_path / "a.json", a_decision(prefill(), HERE))
    with pytest.raises(UserError, match="cannot be read"):
        merge([good, tmp_path / "missing.json"], tmp_path / "out.json")
    assert not (tmp_path / "out.json").exists()
    foreign = tmp_path / "foreign.json"
    foreign.write_text('{"model": "llama"}')
    with pytest.raises(UserError, match="is no decision table"):
        merge([good], foreign)
    assert foreign.read_text() == '{"model": "llama"}'
    with pytest.raises(UserError, match="cannot write"):
        merge([good], good / "below.json")


def test_a_diff_says_what_changed() -> None:
    slower, same = a_decision(prefill(), HERE, **took(1.0)), a_decision(prefill(q_len=64), HERE, **took(2.0))  # type: ignore[arg-type]
    gone, new = a_decision(prefill(q_len=128), HERE), a_decision(decode(), HERE)
    padded = replace(a_decision(prefill(), HERE, **took(1.5, padding=PAD)), padding=PAD)  # type: ignore[arg-type]
    changes = diff(table(slower, same, gone), table(padded, same, new))
    assert [(c.winner_changed, c.ratio) for c in changes] == [(True, 1.5), (False, 1.0), (False, None), (False, None)]
    assert [(c.before is None, c.after is None) for c in changes[2:]] == [(False, True), (True, False)]
    first = changes[0].to_json()
    assert (first["before"], first["after"], first["before_ms"], first["after_ms"]) == ("fake", "fake+pad", 1.0, 1.5)
    assert changes[3].to_json()["before"] is None


def test_hosts_are_kept_apart_unless_each_table_has_one() -> None:
    here, there = a_decision(prefill(), HERE, **took(4.0)), a_decision(prefill(), THERE, **took(1.0))  # type: ignore[arg-type]
    assert [c.ratio for c in diff(table(here), table(there))] == [0.25]
    assert [c.ratio for c in diff(table(here, there), table(there))] == [None, 1.0]
    assert diff(DecisionTable(), DecisionTable()) == []


def test_what_was_not_timed_has_no_ratio() -> None:
    untimed = replace(a_decision(prefill(), HERE), candidates=(CandidateResult("fake", None, "chosen", "flash"),))
    assert [c.ratio for c in diff(table(untimed), table(a_decision(prefill(), HERE)))] == [None]
