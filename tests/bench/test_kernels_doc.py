"""docs/kernels.md from results files: every figure comes out of them, and without them there is none."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

from mla_serve.backends.registry import load_backends
from mla_serve.bench.attention_backends import described
from tests.bench import synthetic
from tests.bench.test_verdicts import script

doc = script("kernels_doc")


def write(directory: Path, **files: dict[str, Any]) -> str:
    for name, result in files.items():
        (directory / getattr(doc, name)).write_text(json.dumps(result))
    out = directory / "docs" / "kernels.md"
    doc.write(directory, out)
    return out.read_text()


def test_a_page_from_results(tmp_path: Path) -> None:
    backends = described(load_backends(torch.device("cpu")))
    main = synthetic.result(grid="full", rates={"memory_gb_s": 4270.0}, backends=backends)
    main["rows"][1] |= {"us": None, "verdict": "disqualified", "reason": "output off by 3.00%"}
    page = write(tmp_path, MAIN=main, EMULATED=synthetic.result(grid="small", emulated="sm80", note="an emulation"))
    assert "Made-up GPU, 2026-01-01" in page
    assert "This is no result of an Ampere GPU" in page
    assert "disqualified: output off by 3.00%" in page
    assert "needs equal QK and V widths" in page
    assert "| decode 16 x 16h, 8,192 keys |" in page
    assert "not measured  torch alone" in page
    for picture in re.findall(r"\]\((images/[^)]+)\)", page):
        assert (tmp_path / "docs" / picture).read_bytes().startswith(b"\x89PNG")
    assert len(re.findall(r"\]\(images/", page)) == 2


def test_without_results_there_are_no_figures(tmp_path: Path) -> None:
    page = write(tmp_path)
    assert page.count(doc.NO_FIGURES) == 4
    assert not re.search(r"\d (us|x)\b|\| \d", page)


def test_every_backend_has_its_section(tmp_path: Path) -> None:
    backends = described(load_backends(torch.device("cpu")))
    backends.append({**backends[0], "name": "new-kernel", "about": "A kernel that nobody has heard of."})
    page = write(tmp_path, MAIN=synthetic.result(grid="small", rates={}, backends=backends))
    for backend in backends:
        assert page.count(f"\n### {backend['name']}\n") == 1
    assert "A kernel that nobody has heard of." in page


def test_the_committed_page_is_what_the_script_writes_from_the_committed_results(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    out = tmp_path / "kernels.md"
    doc.write(root / "benchmarks" / "results", out)
    assert out.read_text() == (root / "docs" / "kernels.md").read_text()
