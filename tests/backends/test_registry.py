from __future__ import annotations

import logging
from importlib.metadata import EntryPoint, EntryPoints

import pytest
import torch

from mla_serve.backends import BUILT_IN, load_backends, registry
from mla_serve.errors import UserError

CPU = torch.device("cpu")


def offer(monkeypatch: pytest.MonkeyPatch, **points: str) -> None:
    """Entry points of other distributions, by name and object."""
    found = EntryPoints(EntryPoint(name.replace("_", "-"), value, registry.GROUP) for name, value in points.items())
    monkeypatch.setattr(registry, "entry_points", lambda group: found.select(group=group))


def names(backends: list) -> list[str]:
    return [backend.name for backend in backends]


def test_the_built_in_backends_are_there_and_the_oracle_is_not() -> None:
    torch_alone = {"torch-flash", "torch-efficient", "torch-cudnn", "torch-math", "torch-mla"}
    libraries = {"flashinfer-fa2", "flashinfer-fa3", "fa2", "fa3", "fa4", "flashmla", "transformer-engine"}
    blackwell = {f"flashinfer-{name}" for name in ("trtllm-gen", "cute-dsl", "cutlass", "xqa")}
    assert set(BUILT_IN) == torch_alone | libraries | blackwell | {"triton-mla"}
    assert names(load_backends(CPU))[: len(BUILT_IN)] == list(BUILT_IN)
    assert all(backend.device == CPU for backend in load_backends(CPU))


def test_only_the_named_ones() -> None:
    assert names(load_backends(CPU, ["torch-mla", "torch-math"])) == ["torch-math", "torch-mla"]
    with pytest.raises(UserError, match="no attention backend is called torch-flahs; there are flashinfer-fa3, "):
        load_backends(CPU, ["torch-flahs"])


def test_a_foreign_backend_comes_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, plan_bound="tests.backends.fakes:PlanBound", fixed_batch="tests.backends.fakes:FixedBatch")
    assert names(load_backends(CPU)) == [*BUILT_IN, "plan-bound", "fixed-batch"]
    assert names(load_backends(CPU, ["fixed-batch"])) == ["fixed-batch"]


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("broken", "tests.backends.nowhere:Backend", "No module named"),
        ("broken", "tests.backends.fakes:Nothing", "has no attribute"),
        ("broken", "builtins:print", "is no Backend"),
        ("misnamed", "tests.backends.fakes:PlanBound", "calls itself plan-bound"),
        ("torch-mla", "tests.backends.mutants:WrongScale", "calls itself wrong-scale"),
        ("torch-mla", "mla_serve.backends.torch_mla:TorchMLA", "calls itself torch-mla"),
    ],
)
def test_a_foreign_backend_that_will_not_do_is_left_out_with_a_warning(
    name: str, value: str, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    offer(monkeypatch, **{name: value}, plan_bound="tests.backends.fakes:PlanBound")
    with caplog.at_level(logging.WARNING):
        assert names(load_backends(CPU)) == [*BUILT_IN, "plan-bound"]
    (record,) = caplog.records
    assert record.getMessage().startswith(f"attention backend {name} is left out: ")
    assert reason in record.getMessage()
