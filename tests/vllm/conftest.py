"""Cases of real vLLM, each in a process of its own: vLLM's global state does not survive a second one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 280  # busy cores included; alone a case takes 10


def environment(**more: str) -> dict[str, str]:
    """Of a process that finds this checkout first."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def run(name: str, *arguments: object) -> dict[str, Any]:
    """What the case reported, and all that it printed as "log"."""
    command = [sys.executable, "-m", f"tests.vllm.cases.{name}", *map(str, arguments)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=SECONDS,
        check=False,
    )  # fmt: skip
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert found, f"the case {name} ended with {done.returncode} and reported nothing:\n{done.stdout[-6000:]}"
    return {**json.loads(found[-1].removeprefix("RESULT ")), "log": done.stdout}


@pytest.fixture
def case(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs a case; `DIRECTORY` among its arguments stands for a directory of the test's own."""
    return lambda name, *arguments: run(name, *(tmp_path if argument is DIRECTORY else argument for argument in arguments))


DIRECTORY = object()
