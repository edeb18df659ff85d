"""Result files: stamped with what makes them repeatable, and readable by people."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mla_serve.bench.results import save_result, stamped

RESULTS = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("soak-*.json"))


@pytest.mark.parametrize("more", [{}, {"rows": []}, {"rows": [{"a": [1, 2]}, {"a": "b"}]}])
def test_what_is_saved_is_read_back(more: dict[str, object], tmp_path: Path) -> None:
    result = {"figure": 1.5, "nested": {"x": 1}, **more}
    save_result(tmp_path / "new" / "result.json", result)
    assert json.loads((tmp_path / "new" / "result.json").read_text()) == result


def test_a_result_says_when_how_and_where() -> None:
    result = stamped({"figure": 1}, command="mla-serve bench")
    assert list(result) == ["date", "command", "host", "figure"]
    assert set(result["host"]) == {"system", "python", "devices", "versions"}
    assert result["host"]["versions"]["torch"]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_what_is_committed_says_so_too(path: Path) -> None:
    result = json.loads(path.read_text(encoding="utf-8"))
    assert {"date", "command", "host"} <= set(result)
    assert result.get("rows") or result.get("figures")
    assert result["passed"] + len(result["failed"]) == result["tests"] > 0
