"""A file per kind of slow test, also where some failed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.soak.recorder import KIND, Recorder


def report(name: str, outcome: str, when: str = "call", **properties: object) -> pytest.TestReport:
    kind = {KIND: "kills", **properties}
    return pytest.TestReport(
        name, (name, 0, name), {}, outcome, None, when, duration=0.25, user_properties=list(kind.items())  # type: ignore[arg-type]
    )  # fmt: skip


def test_figures_rows_and_failures_are_kept(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "new", ("-m", "slow and not gpu"), 7)
    recorder.pytest_runtest_logreport(report("a", "passed", row={"n": 1}, figures={"share": 0.5}))
    recorder.pytest_runtest_logreport(report("a", "passed", "teardown", row={"n": 1}))
    recorder.pytest_runtest_logreport(report("b", "failed", row={"n": 2}))
    recorder.pytest_runtest_logreport(report("c", "failed", "setup"))
    quick = pytest.TestReport("quick", ("quick", 0, "quick"), {}, "failed", None, "call")
    recorder.pytest_runtest_logreport(quick)
    recorder.pytest_sessionfinish()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["soak-kills.json"]
    text = (tmp_path / "new" / "soak-kills.json").read_text()
    found = json.loads(text)
    assert found["command"] == "python -m pytest -m 'slow and not gpu'"
    assert {"date", "host"} < set(found)
    assert (found["seed"], found["tests"], found["passed"], found["failed"], found["seconds"]) == (7, 3, 1, ["b", "c"], 0.8)
    assert found["figures"] == [{"share": 0.5}]
    assert found["rows"] == [{"n": 1}, {"n": 2}]
    assert '\n  {"n": 1},\n  {"n": 2}\n' in text, "a row a line"
