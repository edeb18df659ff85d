"""The example package, installed by pip into a venv that sees this one: a candidate by its entry point alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "my_attention_backend"
TRIES = 3  # what is measured on a busy machine may come out otherwise once


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a venv in which the example is installed. Nothing is fetched."""
    home = tmp_path_factory.mktemp("example")
    source = shutil.copytree(EXAMPLE, home / "source")  # pip builds beside the source
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home / "venv"], check=True)
    python = home / "venv" / "bin" / "python"
    own = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], check=True, capture_output=True, text=True
    )
    here = sysconfig.get_path("purelib")
    Path(own.stdout.strip(), "project.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-index", "--no-deps", "--no-build-isolation", source], check=True)
    return python


def explain(python: Path, decisions: Path, *options: str) -> dict[str, object]:
    """What `mla-serve explain --json` says there, with a decision file of its own."""
    command = [python, "-m", "mla_serve.cli", "explain", "--json", "--decisions", decisions, "--threads", "1", "--heads", "2"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *options], check=True, capture_output=True, text=True, env=env)
    return json.loads(done.stdout)


def row(decision: dict[str, object]) -> dict[str, object]:
    (own,) = [r for r in decision["candidates"] if r["backend"] == "blocked-math" and r["padding"] is None]
    return own


def test_it_wins_a_bucket_by_being_the_fastest(python: Path, tmp_path: Path) -> None:
    """Q/K width 256 and value width 16: flash has to be padded to 16 times the value width, math multiplies what is masked."""
    for number in range(TRIES):
        options = ("--phase", "prefill", "--q-len", "1024", "--dtype", "float32", "--qk", "256", "--v", "16", "--lse")
        decision = explain(python, tmp_path / f"{number}.json", *options)
        if decision["winner"] == "blocked-math":
            break
    assert decision["winner"] == "blocked-math"
    assert decision["policy"] == "measured"
    assert row(decision)["verdict"] == "chosen"
    assert decision["library"] == "my-attention-backend"
    assert decision["fingerprint"]["libraries"]["my-attention-backend"] == "0.1.0"
    ran = [r["backend"] for r in decision["candidates"] if r["ms"] is not None]
    assert {"torch-flash", "torch-math"} <= set(ran), "it had rivals"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--phase", "decode", "--kv-len", "64", "--dtype", "float32"), "not the paged latent cache"),
        (("--phase", "prefill", "--q-len", "64", "--dtype", "bfloat16"), "takes float32, not bfloat16"),
    ],
)
def test_it_is_refused_elsewhere_with_its_reason(python: Path, tmp_path: Path, options: tuple[str, ...], reason: str) -> None:
    decision = explain(python, tmp_path / "decisions.json", *options)
    assert decision["winner"] != "blocked-math"
    assert row(decision)["verdict"] == "unsupported"
    assert reason in str(row(decision)["reason"])


def test_it_keeps_the_laws(monkeypatch: pytest.MonkeyPatch) -> None:
    """The contract suite's laws are plain functions: anyone's backend can be held to them."""
    from mla_serve.shapes import AttentionShape
    from tests.backends.contenders import DEEPSEEK
    from tests.backends.laws import broken_laws

    monkeypatch.syspath_prepend(EXAMPLE)
    from my_attention_backend import BlockedMath

    backend = BlockedMath(torch.device("cpu"))
    for shape in (
        AttentionShape.prefill(DEEPSEEK, batch=3, q_len=16, dtype="float32", lse=True),
        AttentionShape.context(DEEPSEEK, batch=3, q_len=16, kv_len=64, dtype="float32"),
    ):
        assert broken_laws(backend, shape) == {}
