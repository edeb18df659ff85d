"""What slow tests found, as files: `pytest -m slow --results=DIR` writes DIR/soak-KIND.json for each `@pytest.mark.slow(KIND)`.

A test says what it found by pytest's own `record_property`, before it asserts: "figures", a dict that sums it up, and "row", a
dict per thing measured, as often as it likes. A file holds the figures, the rows, and how many tests passed, also where some
failed; the exit status is pytest's.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from mla_serve.bench.results import save_result, stamped

KIND = "soak"


class Recorder:
    """A pytest plugin, registered where results are asked for."""

    def __init__(self, directory: Path, words: tuple[str, ...], seed: int) -> None:
        self.directory, self.command, self.seed = directory, shlex.join(["python", "-m", "pytest", *words]), seed
        self.reports: dict[str, list[pytest.TestReport]] = defaultdict(list)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if mark := item.get_closest_marker("slow"):
                item.user_properties.append((KIND, mark.args[0]))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        kind = dict(report.user_properties).get(KIND)
        if kind is not None and (report.when == "call" or not report.passed):
            self.reports[str(kind)].append(report)

    def pytest_sessionfinish(self) -> None:
        for kind, reports in self.reports.items():
            result = stamped({"seed": self.seed, **summary(reports)}, command=self.command)
            save_result(self.directory / f"soak-{kind}.json", result)


def summary(reports: list[pytest.TestReport]) -> dict[str, Any]:
    """Counts, seconds, figures and rows of one kind of test, in the order in which they ran."""
    found = [(str(name), value) for report in reports for name, value in report.user_properties]
    return {
        "tests": len(reports),
        "passed": sum(report.passed for report in reports),
        "failed": [report.nodeid for report in reports if not report.passed],
        "seconds": round(sum(report.duration for report in reports), 1),
        "figures": [value for name, value in found if name == "figures"],
        "rows": [value for name, value in found if name == "row"],
    }
