from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from mla_serve.cli import main
from mla_serve.pages import page_headers, render_page
from mla_serve.pages.chart import chart
from mla_serve.pages.view import Win, make_view
from mla_serve.selection.decision import Decision
from tests.pages.sample import EVIL, HERE, decisions
from tests.selection.fakes import a_decision, prefill
from tests.server.conftest import Server


class Tags(HTMLParser):
    """Counts tags, and keeps attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def test_every_bucket_candidate_and_reason_is_in_the_document() -> None:
    found = decisions()
    page = Tags(render_page(found[:2], found, subject="a model", other_hosts=3))
    assert page.tags.count("article") == len(found)
    for decision in found:
        assert str(decision.bucket) in page.text
        for row in decision.candidates:
            assert row.reason is None or row.reason in page.text
    for part in ("a CPU <of sorts>", "0.6.14", "in force", "3 of other hosts", "Floor 0.1000 ms"):
        assert part in page.text


def test_nothing_that_a_backend_says_becomes_markup() -> None:
    html = render_page((), decisions(), subject=EVIL)
    page = Tags(html)
    assert page.tags.count("script") == page.tags.count("style") == 1
    assert "img" not in page.tags
    assert not any(name.startswith("on") or name == "style" for name, _ in page.attributes)
    assert EVIL in page.text
    assert "<b>" not in re.sub(r"<b>[\d,.]+×?</b>", "", html)


def test_nothing_is_loaded_from_elsewhere() -> None:
    html = render_page((), decisions(), subject="a model")
    for name, value in Tags(html).attributes:
        if name in ("src", "href", "action", "srcset", "data"):
            assert value is not None
            assert value.startswith(("#", "data:image/svg+xml,"))
    policy = page_headers()["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    file_policy = policy.replace("; frame-ancestors 'none'", "")
    assert ("content", file_policy) in Tags(html).attributes
    assert ("content", file_policy) not in Tags(render_page((), decisions(), subject="a model", served=True)).attributes


def test_an_empty_page_says_what_to_do() -> None:
    page = Tags(render_page((), (), subject="a model"))
    assert "No decision yet" in page.text
    assert "form" not in page.tags


@pytest.mark.parametrize(
    ("ratio", "text", "step"),
    [
        (None, "–", "none"),
        (1.0, "tie", "0"),
        (1.05, "1.05×", "1"),
        (1.3, "1.3×", "2"),
        (3.4, "3.4×", "4"),
        (118.2, "118×", "6"),
    ],
)
def test_how_a_win_is_told(ratio: float | None, text: str, step: str) -> None:
    assert (Win(ratio, None).text, Win(ratio, None).step) == (text, step)


def test_wins_count_runs_and_plans_as_the_ranking_does() -> None:
    bucket = make_view(decisions()[4:5]).buckets[0]
    assert bucket.runner_up.rival == "torch-flash+pad"
    assert bucket.runner_up.ratio == pytest.approx(1.3, rel=1e-3)
    assert bucket.other_form.rival == "torch-math"
    assert bucket.other_form.ratio == pytest.approx(33, rel=1e-3)


def test_what_is_in_force_hides_the_tables_own_entry() -> None:
    live, old = (a_decision(prefill(), HERE, winner=name) for name in ("live", "old"))
    view = make_view([live], [old])
    assert [(b.decision.winner, b.in_force) for b in view.buckets] == [("live", True)]


def test_bars_keep_to_scale() -> None:
    def at(decision: Decision) -> list[float]:
        drawn = chart(decision)
        assert drawn is not None
        assert drawn.floor_at is not None
        assert 0 <= drawn.floor_at < drawn.bars[0].at
        assert all(0 <= tick.at <= 100 for tick in drawn.ticks)
        return [bar.at for bar in drawn.bars]

    near, far = decisions()[0], decisions()[4]
    linear = at(near)
    assert linear[1] / linear[0] == pytest.approx(1.25, rel=0.01)
    assert 1 < at(far)[-1] / at(far)[0] < 33, "a logarithm shows both"
    assert chart(decisions()[9]) is None


def test_probe_writes_the_page_as_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for report, status in ((tmp_path / "report.html", 0), (tmp_path / "missing" / "report.html", 1)):
        words = ["probe", "--budget", "0", "--threads", "1", "--out", str(tmp_path / "table.json"), "--report", str(report)]
        monkeypatch.setattr(sys, "argv", ["mla-serve", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == status
        assert str(report) in capsys.readouterr().err
    page = Tags((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert page.tags.count("article") > 30
    assert "Which kernel serves which shape of mla-serve-demo" in page.text


def test_the_server_has_the_page(server: Server) -> None:
    response = server.get("/attention")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    for name, value in page_headers().items():
        assert response.headers[name] == value
    page = Tags(response.text)
    found = server.get("/attention/decisions").json()["decisions"]
    assert page.tags.count("article") == len(found) > 0
    assert ("href", "attention/decisions") in page.attributes
