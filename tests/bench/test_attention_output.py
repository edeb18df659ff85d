"""What is made from rows: the table, the plot, the emulation's filter, what backends say about themselves."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_serve.backends.registry import load_backends
from mla_serve.bench import attention_emulate as emulate
from mla_serve.bench.attention_backends import asked_shapes, described
from mla_serve.bench.attention_plot import plot
from mla_serve.bench.attention_table import groups, label, lines, ratios
from mla_serve.bench.grids import cases
from mla_serve.errors import UserError
from tests.bench import synthetic


def test_the_table_has_a_line_per_shape_and_says_what_went_wrong() -> None:
    rows = synthetic.rows()
    rows[1] |= {"us": None, "verdict": "crashed", "reason": "no kernel image"}
    found = list(lines(rows, "the heading"))
    assert found[0] == "the heading"
    assert len(found) == 2 + len(cases("full")) + 1
    assert found[-1].startswith("crashed: ")
    assert found[-1].endswith("no kernel image")


def test_ratios_are_over_the_choice() -> None:
    group = next(groups(synthetic.rows(lambda case: {"chosen": 10.0, "fa3": 12.0, "flashmla+pad": 5.0}, "small")))
    assert ratios(group) == {"fa3": 1.2, "flashmla+pad": 0.5}


def test_two_padded_forms_of_a_kernel_have_two_labels() -> None:
    row = synthetic.rows(lambda case: {"torch-flash+pad": 5.0}, "prefill")[0]
    assert label(row) == "torch-flash+pad"
    assert label({**row, "padding": {"qk": 256, "v": 256, "heads": 16}}) == "torch-flash+pad256"
    assert label({**row, "phase": "decode", "padding": {"qk": 576, "v": 512, "heads": 64}}) == "torch-flash+pad"


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "below" / "plot.png"
    plot(synthetic.rows(grid="small"), path, "made up")
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    assert width > 1200
    assert height > 800


def test_nothing_to_plot(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing to plot"):
        plot(synthetic.rows(lambda case: {"fa3": 1.0}, "small"), tmp_path / "plot.png", "made up")


def test_without_matplotlib_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"mla-serve\[bench\]"):
        plot(synthetic.rows(grid="small"), tmp_path / "plot.png", "made up")


def test_the_emulation_keeps_what_ampere_runs() -> None:
    kept = {"flashinfer-fa2", "fa2", "torch-flash", "torch-efficient", "triton-mla", "vllm-triton-mla"}
    out = {"flashinfer-fa3", "fa3", "flashmla", "torch-cudnn", "torch-math", "torch-mla", "transformer-engine"}
    assert all(emulate.why_not(name) is None for name in kept)
    assert all(emulate.why_not(name) for name in out)


def test_compiled_kernels_beyond_ampere_are_refused() -> None:
    small = {"name": "attend", "shared": 100 << 10}
    assert emulate.refusal(small, "mma.sync.aligned; cp.async.ca.shared.global;") is None
    assert emulate.refusal({"shared": (163 << 10) + 1}, "") == "takes 163 KiB of shared memory, of 163 on Ampere"
    assert emulate.refusal({"shared": 227 << 10}, "") == "takes 227 KiB of shared memory, of 163 on Ampere"
    for ptx in ("wgmma.mma_async.sync", "cp.async.bulk.tensor.2d", "barrier.cluster.arrive"):
        assert "which Ampere lacks" in str(emulate.refusal(small, ptx))


def test_triton_is_told_before_it_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    knobs: Any = types.ModuleType("triton.knobs")
    knobs.compilation = types.SimpleNamespace(listener=None)
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "triton.knobs", knobs)
    monkeypatch.setenv("DISABLE_MMA_V3", "0")
    emulate.begin("sm80")
    import os

    assert os.environ["DISABLE_MMA_V3"] == "1"
    ptx = tmp_path / "kernel.ptx"
    ptx.write_text("wgmma.mma_async")
    with pytest.raises(emulate.NotOnAmpere, match="attend uses wgmma"):
        knobs.compilation.listener(
            src=None, metadata={"name": "attend", "shared": 1}, metadata_group={"k.ptx": str(ptx)}, times=None, cache_hit=True
        )
    with pytest.raises(UserError, match="use sm80"):
        emulate.begin("sm75")


def test_backends_say_what_they_take_and_why_not() -> None:
    found = {backend["name"]: backend for backend in described(load_backends(torch.device("cpu")))}
    flash = found["torch-flash"]
    assert "prefill" in flash["padded"]
    assert any("equal" in reason for reason in flash["refuses"])
    assert "decode, float32" in found["torch-mla"]["takes"] or found["torch-mla"]["refuses"]
    assert found["torch-cudnn"]["unavailable"]
    for backend in found.values():
        said = [*backend["takes"], *(what for shapes in backend["refuses"].values() for what in shapes)]
        assert sorted(said) == ([] if backend["unavailable"] else sorted(asked_shapes()))
