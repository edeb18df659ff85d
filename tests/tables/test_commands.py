from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mla_serve.cli import main
from mla_serve.selection.fingerprint import Fingerprint
from mla_serve.selection.table import DecisionTable
from tests.selection.fakes import a_decision, decode, prefill
from tests.selection.test_compare import LATER, file, took

Cli = Callable[..., tuple[int, str, str]]
HERE = Fingerprint("a CPU", "2.13.0", threads=2)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Exit status, standard output and standard error of `mla-serve table WORDS`."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["mla-serve", "table", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        out = capsys.readouterr()
        return int(ended.value.code or 0), out.out, out.err

    return run


@pytest.fixture
def a(tmp_path: Path) -> Path:
    return file(tmp_path / "a.json", a_decision(prefill(), HERE, **took(2.0)), a_decision(decode(), HERE))  # type: ignore[arg-type]


@pytest.fixture
def b(tmp_path: Path) -> Path:
    return file(tmp_path / "b.json", a_decision(prefill(), HERE, **took(1.0, "quick"), measured_at=LATER))  # type: ignore[arg-type]


def test_merge(table: Cli, a: Path, b: Path, tmp_path: Path) -> None:
    out = tmp_path / "c.json"
    status, text, _ = table("merge", a, b, "--out", out)
    assert status == 0
    assert text.splitlines() == [f"     2  {a}", f"     1  {b}", f"     2  {out}, of 1 host"]
    assert {decision.winner for decision in DecisionTable.load(out)} == {"quick", "fake"}
    status, text, _ = table("merge", a, b, "--out", out, "--json")
    assert (status, json.loads(text)["decisions"]) == (0, 2)


def test_diff(table: Cli, a: Path, b: Path) -> None:
    status, text, summary = table("diff", a, b)
    header, changed, gone = (line.split("  ") for line in text.splitlines())
    assert status == 0
    assert header[0] == "bucket"
    assert [cell.strip() for cell in changed if cell][1:] == ["fake", "quick", "2.000", "1.000", "0.5000", "winner"]
    assert [cell.strip() for cell in gone if cell][1:] == ["fake", "-", "1.000", "-", "-", "gone"]
    assert summary == f"in both files: 1, of these with another winner: 1; only in {a}: 1; only in {b}: 0\n"
    status, text, summary = table("diff", a, b, "--json")
    assert [row["ratio"] for row in json.loads(text)] == [0.5, None]
    assert summary == ""


def test_show_and_what_is_no_table(table: Cli, a: Path, tmp_path: Path) -> None:
    assert len(json.loads(table("show", a, "--json")[1])) == 2
    assert "fake" in table("show", a)[1]
    other = tmp_path / "passwd"
    other.write_text("root:x:0:0:root:/root:/bin/bash\n")
    none = tmp_path / "x"
    for words in (
        ("show", none), ("diff", a, none), ("merge", none, "--out", a),
        ("show", other), ("diff", other, a), ("diff", a, other), ("merge", other, "--out", a),
    ):  # fmt: skip
        status, text, error = table(*words)
        assert (status, text) == (1, "")
        assert len(error.splitlines()) == 1
        assert str(words[-1] if words[0] == "diff" and words[1] == a else words[1]) in error
    assert table("merge", a)[0] == 2, "where to?"
