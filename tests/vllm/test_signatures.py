"""The checker of `signatures`, on the vLLM that is installed and on small sources that break each of its rules."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vllm import signatures

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def installed() -> Path:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parents[1]


def test_the_installed_vllm_calls_nothing_that_is_not_there() -> None:
    found = signatures.check(installed())
    assert found.problems == []
    assert found.checked["overrides"] > 15
    assert found.checked["calls"] > 30
    assert found.checked["names"] > 8


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """The files that the classes come from, alone."""
    for name in (signatures.MLA, signatures.BACKEND, signatures.PREFILL):
        path = tmp_path / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(installed() / "vllm" / name, path)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "old", "new", "words"),
    [
        (
            signatures.MLA, "run_prefill_context_chunk(\n                    chunk=chunk,",
            "run_prefill_context_chunk(\n                    piece=chunk,", "unexpected keyword argument 'piece'",
        ),
        (signatures.MLA, "self._build_decode(", "self._build_decode(block_table_tensor, ", "multiple values"),
        (signatures.PREFILL, "def get_name() -> str:", "def get_name(long: bool) -> str:", "PrefillBackend.get_name"),
        (
            signatures.BACKEND, "    @abstractmethod\n    def build(",
            "    @abstractmethod\n    def finish(self):\n        pass\n\n    @abstractmethod\n    def build(",
            "Builder does not implement finish",
        ),
    ],
)  # fmt: skip
def test_what_would_break_is_found(sources: Path, file: str, old: str, new: str, words: str) -> None:
    path = sources / "vllm" / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    signatures.tree.cache_clear()
    problems = [problem for problem in signatures.check(sources).problems if not problem.startswith("there is no module")]
    assert any(words in problem for problem in problems), problems


@pytest.mark.slow("vllm-signatures")
@pytest.mark.parametrize("version", ["0.26.0", "0.33.0"])
def test_the_oldest_and_the_newest_vllm_call_nothing_that_is_not_there(
    tmp_path: Path, version: str, record_property: Callable[[str, object], None]
) -> None:
    """From the wheel's sources: 300 MB each, so not in CI."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", str(tmp_path)]
    subprocess.run([*command, f"vllm=={version}"], check=True, timeout=600)
    (wheel,) = tmp_path.glob("vllm-*.whl")
    found = signatures.check(signatures.unpacked(wheel, tmp_path / "sources"))
    record_property("row", {"vllm": version, "checked": found.checked, "problems": found.problems})
    assert found.problems == []
