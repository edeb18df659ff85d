"""What MODEL may be, and what it is called."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mla_serve.models import attention_grid, public_name
from mla_serve.shapes import Phase


def test_a_hub_model_is_called_as_it_was_typed_and_a_directory_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert public_name(None) == "mla-serve-demo"
    assert public_name("deepseek-ai/DeepSeek-V2-Lite") == "deepseek-ai/DeepSeek-V2-Lite"
    (tmp_path / "tiny" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "tiny")
    assert public_name(str(tmp_path / "tiny")) == public_name(f"{tmp_path}/tiny/") == "tiny"
    assert public_name(str(tmp_path / "link")) == "link"
    monkeypatch.chdir(tmp_path / "tiny")
    assert public_name(".") == "tiny"
    assert public_name("..") == tmp_path.name


@pytest.mark.parametrize(("config", "tp", "layers"), [("deepseek-v2-lite", 1, 27), ("deepseek-v3", 8, 61)])
@pytest.mark.parametrize("graph", [False, True])
def test_a_config_alone_gives_the_grid_of_one_rank(config: str, tp: int, layers: int, graph: bool) -> None:
    directory = Path(__file__).parents[1] / "benchmarks" / "configs" / config
    shapes, found = attention_grid(
        str(directory), torch.device("cpu"), tp=tp, dtype="auto", page_size=64, max_model_len=4096, max_batch=32, graph=graph
    )
    assert found == layers
    assert {shape.heads for shape in shapes} == {16}
    assert {(shape.qk, shape.v) for shape in shapes if shape.absorbed} == {(576, 512)}
    assert {shape.graph for shape in shapes if shape.phase is Phase.DECODE} == {graph}
    assert not any(shape.graph for shape in shapes if shape.phase is not Phase.DECODE)
