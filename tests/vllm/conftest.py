from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.checkpoints import make

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 240
QUIET = {
    "TORCHDYNAMO_DISABLE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1", "MLA_SERVE_DEFAULT": "1", "MLA_SERVE_POLICY": "availability",
}  # fmt: skip

LAYERS = [f"model.layers.{n}.self_attn.attn" for n in range(3)]
Case = Callable[..., dict[str, Any]]


def calls(found: dict[str, Any], phase: str) -> Counter[str]:
    """Calls by layer (by "" for prefill, which one object serves) of one phase, whatever the kernel."""
    total: Counter[str] = Counter()
    for key, number in found["counts"].items():
        of, _, layer = key.split(" ")
        if of == phase:
            total[layer] += number
    return total


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a checkpoint by name, made when first asked for."""
    root = tmp_path_factory.mktemp("vllm")
    return lambda name: make(name, root)


@pytest.fixture
def case(checkpoint: Callable[[str], Path]) -> Case:
    """Runs one of `tests.vllm.case` in a process of its own: vLLM's global state, and its plugins, load once per process.

    `env` adds variables, or with None takes them away. `log` in the findings is what the process said.
    """

    def run(name: str, model: str, *, env: dict[str, str | None] | None = None, **fields: Any) -> dict[str, Any]:
        variables: dict[str, str | None] = {**os.environ, **QUIET, **(env or {})}
        asked = {"case": name, "model": str(checkpoint(model)), **fields}
        done = subprocess.run(
            [sys.executable, "-m", "tests.vllm.case", json.dumps(asked)],
            cwd=ROOT, env={key: value for key, value in variables.items() if value is not None},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS, check=False,
        )  # fmt: skip
        last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""
        assert done.returncode == 0, done.stdout[-6000:]
        found: dict[str, Any] = json.loads(last)
        return found | {"log": done.stdout}

    return run
