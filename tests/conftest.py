"""Fresh random inputs each run, repeatable by its seed; tests that need what this host lacks are left out, not skipped."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import random
import zlib
from pathlib import Path

import pytest
import torch

from tests.soak.recorder import Recorder

SEED = int(os.environ.get("MLA_SERVE_TEST_SEED", random.SystemRandom().randrange(2**31)))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, metavar="DIR", help="write what slow tests find to DIR/soak-*.json")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.results is not None:
        config.pluginmanager.register(Recorder(config.option.results, config.invocation_params.args, SEED))


def pytest_report_header() -> str:
    return f"MLA_SERVE_TEST_SEED={SEED}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    missing = {
        "gpu": not torch.cuda.is_available(),
        "triton": _triton() < (3, 9),  # 3.6's interpreter fails on NumPy 2.4
        "vllm": importlib.util.find_spec("vllm") is None,
        "slow": "slow" not in config.option.markexpr,
    }
    out = [item for item in items if any(missing[mark] for mark in missing if item.get_closest_marker(mark))]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in set(out)]


def _triton() -> tuple[int, ...]:
    """Triton's major and minor version, (0,) without Triton."""
    try:
        return tuple(int(part) for part in importlib.metadata.version("triton").split(".")[:2])
    except importlib.metadata.PackageNotFoundError:
        return (0,)


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest) -> None:
    """Each test has a seed of its own, so that one run alone draws what it drew among the others."""
    seed = SEED ^ zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    torch.manual_seed(seed)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    report = yield
    if report.failed:
        report.sections.append(("seed", f"MLA_SERVE_TEST_SEED={SEED} repeats the random inputs of this run"))
    return report
