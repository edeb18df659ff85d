"""Checkpoints, what transformers makes of them, and engine cores: each made once, when first asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from mla_serve.engine.embedded.config import ModelConfig
from mla_serve.engine.embedded.messages import EngineConfig
from mla_serve.selection.selector import Selector
from mla_serve.selection.table import DecisionTable
from mla_serve.selection.timing import Effort
from mla_serve.shapes import AttentionShape
from tests.parity.cases import PRODUCT, QUICK
from tests.parity.checkpoints import BY_NAME, build
from tests.parity.harness import Ours
from tests.parity.reference import Expected, Margins, expect

MAX_LEN = 1024


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Models this small gain nothing from a second thread, and on a busy machine threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def directory(tmp_path_factory) -> Callable[[str], Path]:
    """The directory of a checkpoint by name."""
    root = tmp_path_factory.mktemp("parity")
    return cache(lambda name: build(BY_NAME[name], root / name))


@dataclass(frozen=True)
class Theirs:
    expected: dict[int, Expected]
    margins: Margins


@pytest.fixture(scope="session")
def theirs(directory) -> Callable[[str], Theirs]:
    """What transformers computes with the checkpoint, read back from its directory, with plain attention."""

    def run(name: str) -> Theirs:
        model = AutoModelForCausalLM.from_pretrained(directory(name), attn_implementation="eager", dtype=torch.float32).eval()
        return Theirs(*expect(model))

    return cache(run)


@pytest.fixture(scope="session")
def ours(directory, measured_table, tmp_path_factory) -> Callable[..., Ours]:
    """An engine core on a checkpoint. `chunk` None takes every prompt whole; else it is the tokens of a step and of a context
    chunk. Only the last core is kept: tests that share one come one after the other."""
    no_table = tmp_path_factory.mktemp("tables") / "none.json"

    def make(name: str, chunk: int | None, policy: str, pins: tuple[tuple[str, str], ...]) -> Ours:
        return Ours(
            EngineConfig(
                model=str(directory(name)),
                policy=policy,
                pins=dict(pins),
                decisions=str(measured_table(name) if policy == "measured" else no_table),
                max_model_len=MAX_LEN,
                max_tokens=chunk or 4096,
                context_chunk=chunk or 4096,
                page_size=16,
                num_pages=128,
                prefix_cache=False,
            )
        )

    kept: dict[tuple[object, ...], Ours] = {}

    def get(name: str, chunk: int | None, policy: str = "availability", **pins: str) -> Ours:
        key = (name, chunk, policy, tuple(sorted(pins.items())))
        if key not in kept:
            kept.clear()
            kept[key] = make(name, chunk, policy, key[-1])
        return kept[key]

    return get


@pytest.fixture(scope="session")
def measured_table(directory, tmp_path_factory) -> Callable[[str], Path]:
    """A decision table with some buckets of a checkpoint measured in a hurry; the engine borrows the nearest for the rest."""
    root = tmp_path_factory.mktemp("measured")

    def measure(name: str) -> Path:
        dims = ModelConfig.from_dir(directory(name)).dims
        table = DecisionTable(root / f"{name}.json")
        effort = Effort(least_rounds=2, most_rounds=2, milliseconds=10.0, plans=1)
        selector = Selector(torch.device("cpu"), table=table, effort=effort, layers=3)
        for length in (1, 16, 64, 512):
            for lse in (False, True):
                selector.measure(AttentionShape.prefill(dims, batch=1, q_len=length, dtype="float32", lse=lse))
        for length in (16, 64):
            selector.measure(AttentionShape.context(dims, batch=1, q_len=length, kv_len=length, dtype="float32"))
        for batch in (1, 4):
            for ragged in (False, True):
                shape = AttentionShape.decode(dims, batch=batch, kv_len=256, dtype="float32", page_size=16, ragged=ragged)
                selector.measure(shape)
        table.save()
        return root / f"{name}.json"

    return cache(measure)


def pytest_terminal_summary(terminalreporter):
    """Says how much of the table ran."""
    ran = [report.nodeid for report in terminalreporter.stats.get("passed", []) if "parity/test_parity.py" in report.nodeid]
    for name, table in (("test_quick", QUICK), ("test_product", PRODUCT)):
        passed = sum(f"::{name}[" in nodeid for nodeid in ran)
        if passed:
            terminalreporter.write_line(f"parity with transformers: {passed} of {len(table)} cases of {name} passed")
