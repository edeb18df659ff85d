from __future__ import annotations

import json
import sys

import pytest

from mla_serve.bench.table import BUCKETS, CANDIDATES, made_up_table
from mla_serve.cli import main


def test_the_made_up_table_is_as_large_as_it_says() -> None:
    decisions = list(made_up_table())
    assert len({decision.bucket for decision in decisions}) == BUCKETS == 500
    assert {len(decision.candidates) for decision in decisions} == {CANDIDATES} == {9}


def test_figures_of_look_up_and_load(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["mla-serve", "bench", "selector", "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    figures = json.loads(capsys.readouterr().out)
    assert all(figures[name] > 0 for name in ("median_us", "p99_us", "load_ms"))
    assert figures["buckets"] == BUCKETS
