from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mla_serve.backends.registry import load_backends
from mla_serve.selection.candidates import check
from mla_serve.selection.decision import Decision
from mla_serve.selection.probe import grid, probe
from mla_serve.selection.selector import Selector
from mla_serve.selection.table import DecisionTable
from mla_serve.shapes import AttentionShape, Bucket, Phase
from tests.selection.fakes import DEEPSEEK, SMALL, Fake, decode, prefill, times


def the_grid(device: str, **limits: int) -> list[AttentionShape]:
    sizes = {"max_model_len": 8192, "max_batch": 128, "max_tokens": 8192, **limits}
    return grid(DEEPSEEK, dtype="float32", page_size=16, device=torch.device(device), **sizes)


@pytest.mark.parametrize(("device", "least", "most"), [("cpu", 25, 40), ("cuda", 50, 70)])
def test_the_grid_is_finite_and_made_of_buckets(device: str, least: int, most: int) -> None:
    shapes = the_grid(device)
    assert least <= len(shapes) <= most
    assert len(set(shapes)) == len(shapes)
    assert all(Bucket.of(shape).shape == shape for shape in shapes)
    assert {shape.phase for shape in shapes} == set(Phase)
    assert {shape.lse for shape in shapes if shape.phase is Phase.PREFILL} == {False, True}
    assert any(shape.ragged for shape in shapes)
    assert {shape.phase for shape in shapes[: len(shapes) // 2]} == set(Phase), "half a grid has something of each"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_grid_keeps_to_the_limits(device: str) -> None:
    shapes = the_grid(device, max_model_len=512, max_batch=4, max_tokens=1024, context_chunk=1024)
    assert max(shape.batch for shape in shapes) == 4
    assert max(shape.kv_len for shape in shapes) == 512
    assert all(shape.batch * shape.q_len <= 1024 for shape in shapes)
    assert all(shape.batch * shape.kv_len <= 1024 for shape in shapes if shape.phase is Phase.CONTEXT)
    tiny = the_grid(device, max_model_len=5, max_batch=1, max_tokens=8)
    assert {shape.phase for shape in tiny} >= {Phase.PREFILL, Phase.DECODE}


def test_a_cpu_grid_ends_where_runs_take_seconds() -> None:
    shapes = the_grid("cpu", max_model_len=131_072)
    assert max(shape.q_len for shape in shapes) <= 2048
    assert max(shape.kv_len for shape in shapes) <= 2048


def test_every_bucket_of_a_cpu_grid_has_a_kernel(cpu: torch.device) -> None:
    backends = load_backends(cpu)
    for shape in the_grid("cpu"):
        assert any(check(backend, shape).verdict is None for backend in backends), shape


def test_each_decision_is_in_the_file_before_the_next_bucket(cpu: torch.device, tmp_path: Path) -> None:
    path = tmp_path / "decisions.json"
    shapes = [prefill(SMALL), decode(), decode(batch=1), decode(batch=2)]  # the last is the second one's bucket
    seen: list[tuple[int, int, str | None, int]] = []

    def progress(done: int, total: int, decision: Decision | None) -> None:
        seen.append((done, total, decision.winner if decision else None, len(DecisionTable.load(path))))

    selector = Selector(cpu, backends=[Fake()], measure=times({"fake": 1.0, "fake+pad": 9.0}), table=DecisionTable.load(path))
    decisions = probe(selector, shapes, progress=progress)
    assert seen == [(1, 3, "fake", 1), (2, 3, "fake", 2), (3, 3, "fake", 3)]
    assert [decision.bucket for decision in decisions] == [Bucket.of(shape) for shape in shapes[:3]]


def test_an_interrupted_probe_goes_on_where_it_stopped(cpu: torch.device) -> None:
    fake = Fake()
    selector = Selector(cpu, backends=[fake], measure=times({"fake": 1.0}))
    first = probe(selector, [decode()])
    runs = fake.calls["run"]
    assert probe(selector, [decode()], again=False) == first
    assert fake.calls["run"] == runs
    probe(selector, [decode()])
    assert fake.calls["run"] > runs


def test_a_spent_budget_leaves_the_rest_unmeasured(cpu: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    selector = Selector(cpu, backends=[Fake()], measure=times({"fake": 1.0}))
    left = probe(selector, [decode(), decode(batch=1)], budget_s=0.0)
    assert [decision.policy for decision in left] == ["availability"] * 2
    assert {decision.note for decision in left} == {"not measured: the budget of 0 s was spent"}
    assert len(selector.table) == 0
    assert "2 of 2 buckets are not measured" in caplog.text
    assert len(probe(selector, [decode(), decode(batch=1)], budget_s=1e6)) == 2


def test_a_bucket_that_nobody_can_serve_does_not_end_the_probe(cpu: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    selector = Selector(cpu, backends=[Fake(refuse=lambda s: "no fp8" if s.dtype == "float8_e4m3fn" else None)])
    bad = AttentionShape.prefill(SMALL, batch=1, q_len=4, dtype="float8_e4m3fn", lse=False)
    progress: list[Decision | None] = []
    decisions = probe(selector, [bad, decode()], progress=lambda _, __, decision: progress.append(decision))
    assert [decision.bucket.shape for decision in decisions] == [decode()]
    assert progress[0] is None
    assert "torch-math cannot run" in caplog.text
