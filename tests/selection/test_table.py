from __future__ import annotations

import json
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_serve.errors import UserError
from mla_serve.selection.decision import Decision
from mla_serve.selection.fingerprint import Fingerprint
from mla_serve.selection.table import SCHEMA, DecisionTable, default_table_path
from mla_serve.shapes import AttentionShape, Bucket
from tests.selection.fakes import a_decision, context, decode, prefill

HERE = Fingerprint("a CPU", "2.13.0", threads=2, source="abc", libraries={"lib": "1.0"})


def bucket(shape: AttentionShape) -> Bucket:
    return Bucket.of(shape)


def test_round_trip_through_a_file(tmp_path: Path) -> None:
    path = tmp_path / "below" / "decisions.json"
    first, second = a_decision(prefill(), HERE), a_decision(decode(), HERE)
    table = DecisionTable.load(path)
    table.put(first)
    table.put(second)
    data = json.loads(path.read_text())
    assert data["schema"] == SCHEMA
    assert len(data["decisions"]) == 2
    again = DecisionTable.load(path)
    assert list(again) == [first, second]
    assert again.get(bucket(prefill()), "measured", HERE) == first
    assert again.get(bucket(prefill()), "availability", HERE) is None
    assert [p.name for p in path.parent.iterdir() if p.suffix != ".lock"] == ["decisions.json"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b"null",
        b"[]",
        b'{"schema": 99, "decisions": []}',
        b'{"schema": 1, "decisions": {}}',
        b'{"model": "llama", "weights": [1, 2, 3]}',
        b"[" * 100_000,
    ],
)
def test_a_broken_or_foreign_file_is_ignored_and_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    path = tmp_path / "decisions.json"
    path.write_bytes(content)
    table = DecisionTable.load(path)
    assert len(table) == 0
    assert "ignoring" in caplog.text
    table.put(a_decision(prefill(), HERE))
    assert len(DecisionTable.load(path)) == 1


def test_a_truncated_file_is_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "decisions.json"
    DecisionTable.load(path).put(a_decision(prefill(), HERE))
    path.write_bytes(path.read_bytes()[:-20])
    assert len(DecisionTable.load(path)) == 0
    assert "cannot be read" in caplog.text


def test_one_broken_entry_does_not_cost_the_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "decisions.json"
    good = a_decision(prefill(), HERE)
    entries = [{"bucket": 3}, good.to_json(), None, {**good.to_json(), "policy": "guess"}]
    for change in ({"batch": "one"}, {"kv_len": 0}, {"heads": [4]}, {"phase": "dream"}, {"batch": True}):
        entries.append({**good.to_json(), "bucket": {**good.to_json()["bucket"], **change}})
    path.write_text(json.dumps({"schema": SCHEMA, "decisions": entries}))
    assert list(DecisionTable.load(path)) == [good]
    assert "broken entries" in caplog.text


def write(path: Path, *entries: object) -> Path:
    path.write_text(json.dumps({"schema": SCHEMA, "decisions": entries}))
    return path


def test_candidates_are_decoded_when_first_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decisions = [a_decision(prefill(q_len=size), HERE) for size in (16, 32, 64)]
    path = write(tmp_path / "decisions.json", *(decision.to_json() for decision in decisions))
    decoded = []
    whole = Decision.from_json

    def counted(data: dict[str, Any]) -> Decision:
        decoded.append(data["bucket"]["q_len"])
        return whole(data)

    monkeypatch.setattr(Decision, "from_json", counted)
    table = DecisionTable.load(path)
    assert len(table) == 3
    for _ in range(3):
        assert table.get(bucket(prefill(q_len=32)), "measured", HERE) == decisions[1]
    assert decoded == [32]
    table.save()
    assert decoded == [32], "writing needs no decoding"
    assert list(table) == decisions


def test_an_entry_broken_inside_is_found_when_asked_for_and_never_wins(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = a_decision(prefill(), HERE)
    broken = {**good.to_json(), "candidates": [{"backend": 3}], "measured_at": "9999-01-01T00:00:00Z"}
    path = write(tmp_path / "decisions.json", broken)
    table = DecisionTable.load(path)
    assert table.get(bucket(prefill()), "measured", HERE) is None
    assert table.near(bucket(prefill(q_len=32)), "measured", HERE) == []
    assert len(table) == 0
    assert "broken entries" in caplog.text
    DecisionTable.load(path).put(good)
    assert list(DecisionTable.load(path)) == [good]
    DecisionTable.load(write(tmp_path / "later.json", broken)).save(path)
    assert list(DecisionTable.load(path)) == [good], "nor does it replace one that is whole"


def test_a_strict_load_raises_where_another_warns(tmp_path: Path) -> None:
    path = tmp_path / "decisions.json"
    with pytest.raises(UserError, match="No such file"):
        DecisionTable.load(path, strict=True)
    for content in ("{", "[]", '{"schema": 99, "decisions": []}'):
        path.write_text(content)
        with pytest.raises(UserError, match=r"decisions\.json (cannot be read|is no decision table of schema 1)"):
            DecisionTable.load(path, strict=True)
    assert len(DecisionTable.load(write(path, a_decision(prefill(), HERE).to_json()), strict=True)) == 1


def test_a_reason_may_hold_any_text(tmp_path: Path) -> None:
    path = tmp_path / "decisions.json"
    odd = a_decision(prefill(), HERE, note="lone \udc80, caf\u00e9, \u0000, </script>")
    DecisionTable.load(path).put(odd)
    assert list(DecisionTable.load(path)) == [replace(odd, note="lone ?, café, \x00, </script>")]


def test_what_cannot_be_read_or_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("not a directory")
    table = DecisionTable.load(blocker / "decisions.json")
    table.put(a_decision(prefill(), HERE))
    assert "stay in memory" in caplog.text
    assert table.get(bucket(prefill()), "measured", HERE) is not None
    directory = DecisionTable.load(tmp_path)
    directory.put(a_decision(prefill(), HERE))
    assert len(directory) == 1


@pytest.mark.parametrize(
    ("then", "names"),
    [
        (replace(HERE, device="another CPU"), "device"),
        (replace(HERE, threads=8), "threads"),
        (replace(HERE, source="def"), "source"),
        (replace(HERE, torch="2.12.0"), "torch"),
        (replace(HERE, threads=None, sm_count=132), "sm_count"),
        (replace(HERE, threads=None, capability="9.0"), "capability"),
    ],
)
def test_decisions_of_another_host_or_version_are_kept_but_not_used(
    caplog: pytest.LogCaptureFixture, then: Fingerprint, names: str
) -> None:
    table = DecisionTable()
    for shape in (prefill(), prefill(q_len=64)):
        table.put(a_decision(shape, then))
        assert table.get(bucket(shape), "measured", HERE) is None
        assert table.near(bucket(shape), "measured", HERE) == []
    assert len(table) == 2
    assert len(caplog.records) == 1, "one thing to say, said once"
    assert names in caplog.text


def test_only_the_winners_library_must_match(caplog: pytest.LogCaptureFixture) -> None:
    table = DecisionTable()
    table.put(a_decision(prefill(), replace(HERE, libraries={"lib": "0.9"}), library="lib"))
    assert table.get(bucket(prefill()), "measured", HERE) is None
    table.put(a_decision(decode(), replace(HERE, torch="2.12.0", driver="580.1", libraries={"lib": "1.0"}), library="lib"))
    caplog.clear()
    assert table.get(bucket(decode()), "measured", HERE) is not None
    assert "torch 2.12.0" in caplog.text
    assert "driver 580.1" in caplog.text


def test_hosts_do_not_overwrite_each_other_and_the_later_measurement_stays() -> None:
    there = replace(HERE, device="another CPU")
    table = DecisionTable()
    old, new = (
        a_decision(prefill(), HERE, winner="old"),
        a_decision(prefill(), HERE, winner="new", measured_at="2026-12-02T10:00:00Z"),
    )
    for decision in (new, old, a_decision(prefill(), there, winner="elsewhere")):
        table.put(decision)
    assert len(table) == 2
    here, foreign = table.get(bucket(prefill()), "measured", HERE), table.get(bucket(prefill()), "measured", there)
    assert here is not None
    assert foreign is not None
    assert (here.winner, foreign.winner) == ("new", "elsewhere")


def test_near_prefers_the_fewest_doublings_and_never_crosses_what_must_be_equal() -> None:
    table = DecisionTable()
    for q_len in (16, 128, 2048):
        table.put(a_decision(prefill(q_len=q_len), HERE, winner=f"q{q_len}"))
    table.put(a_decision(prefill(q_len=512, lse=True), HERE, winner="lse"))
    table.put(a_decision(context(), HERE, winner="context"))
    found = table.near(bucket(prefill(q_len=256)), "measured", HERE)
    assert [decision.winner for decision in found] == ["q128", "q2048", "q16"]
    table.put(a_decision(decode(batch=4), HERE, winner="uniform"))
    table.put(a_decision(decode(batch=8, page_size=64), HERE, winner="page 64"))
    table.put(a_decision(decode(batch=8, q_len=2), HERE, winner="two queries"))
    table.put(a_decision(decode(batch=16, kv_len=128, ragged=True), HERE, winner="ragged"))
    found = table.near(bucket(decode(batch=8, ragged=True)), "measured", HERE)
    assert [decision.winner for decision in found] == ["ragged", "uniform"]


_WRITER = """
import sys
from pathlib import Path
from mla_serve.selection.fingerprint import Fingerprint
from mla_serve.selection.table import DecisionTable
from tests.selection.fakes import a_decision, decode
table = DecisionTable.load(Path(sys.argv[1]))
for kv in range(10):
    table.put(a_decision(decode(batch=int(sys.argv[2]), kv_len=2 ** kv), Fingerprint("a CPU", "2.13.0"), winner=sys.argv[2]))
"""


def test_a_captured_bucket_is_near_an_eager_one() -> None:
    """The same kernel, half a doubling away: nearer than any other size, farther than its own measurement."""
    table = DecisionTable()
    eager, longer, captured = decode(kv_len=32), decode(kv_len=64, graph=True), decode(kv_len=32, graph=True)
    table.put(a_decision(longer, HERE))
    table.put(a_decision(eager, HERE))
    assert [found.bucket.shape for found in table.near(Bucket.of(captured), "measured", HERE)] == [eager, longer]
    table.put(a_decision(captured, HERE))
    assert [found.bucket.shape for found in table.near(Bucket.of(captured), "measured", HERE)] == [captured, eager, longer]


def test_two_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "decisions.json"
    command = [sys.executable, "-c", _WRITER, str(path)]
    writers = [subprocess.Popen([*command, batch], cwd=Path(__file__).parents[2]) for batch in ("1", "2")]
    assert [writer.wait(timeout=120) for writer in writers] == [0, 0]
    table = DecisionTable.load(path)
    assert len(table) == 20
    assert {decision.winner for decision in table} == {"1", "2"}


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "decisions.json"
    table = DecisionTable.load(path)
    table.put(a_decision(prefill(), HERE))
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    table.put(a_decision(decode(), HERE))
    assert path.read_bytes() == before
    assert "No space left" in caplog.text
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix != ".lock") == ["decisions.json"]


def test_fingerprint_of_this_host() -> None:
    here = Fingerprint.here(torch.device("cpu"), {"torch", "filelock", "no-such-distribution"})
    assert here.torch == torch.__version__
    assert here.threads == torch.get_num_threads()
    assert set(here.libraries) == {"filelock"}
    assert here.device
    assert here.source
    assert Fingerprint.from_json(json.loads(json.dumps(here.to_json()))) == here
    assert here.mismatch(here, "filelock") is None
    assert here.drift(here) == []


def test_the_default_path_is_the_users_own() -> None:
    assert default_table_path().name == "decisions.json"
    assert default_table_path().is_absolute()


def test_warnings_go_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    table = DecisionTable()
    table.put(a_decision(prefill(), replace(HERE, device="x")))
    table.get(bucket(prefill()), "measured", HERE)
    assert caplog.records[0].levelno == logging.WARNING


def test_a_file_that_is_no_table_is_not_lost(tmp_path: Path) -> None:
    """Somebody names a file of theirs by mistake: it is kept beside the table."""
    path = tmp_path / "notes.log"
    path.write_text("what I must not forget")
    table = DecisionTable.load(path)
    table.put(a_decision(prefill(), HERE))
    table.save()
    assert (tmp_path / "notes.log.bad").read_text() == "what I must not forget"
    assert len(DecisionTable.load(path, strict=True)) == 1
