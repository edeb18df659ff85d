"""What the processes of one vLLM tell each other: the decisions in force, as files in a directory that all of them inherit.

Kernels are chosen in the workers, and asked about in the API server; vLLM gives a plugin no channel between the two.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mla_serve.selection.decision import Decision

logger = logging.getLogger("vllm.mla_serve")

VARIABLE = "MLA_SERVE_SHARED"


def share() -> Path:
    """The directory, made (mode 0700) by the first process that registers and removed when that one ends."""
    given = os.environ.get(VARIABLE)
    if given:
        return Path(given)
    directory = Path(tempfile.mkdtemp(prefix="mla-serve-vllm-"))
    os.environ[VARIABLE] = str(directory)
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # a forked worker inherits this hook, not the directory
            shutil.rmtree(directory, ignore_errors=True)

    atexit.register(remove)
    return directory


def write(name: str, data: Mapping[str, Any]) -> None:
    """Replaces this process's file of that name. A directory that is gone, or full, is warned about: serving goes on."""
    path = share() / f"{name}-{os.getpid()}.json"
    try:
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(data), encoding="utf-8")
        fresh.replace(path)
    except OSError as error:
        logger.warning("mla_serve: /attention will not know this worker: %s (%s)", path, error)


def read(name: str) -> list[dict[str, Any]]:
    """What each process wrote under that name, by process id."""
    found = []
    for path in sorted(share().glob(f"{name}-*.json")):
        try:
            found.append(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:  # its process has just ended
            logger.warning("mla_serve: cannot read %s: %s", path, error)
    return found


def write_decisions(decisions: Iterable[Decision]) -> None:
    """The decisions in force in this process."""
    write("decisions", {"decisions": [decision.to_json() for decision in decisions]})


def read_decisions() -> list[dict[str, Any]]:
    """The decisions in force in any worker, as `Decision.to_json` gives them; one entry where several agree."""
    found: dict[str, dict[str, Any]] = {}
    for worker in read("decisions"):
        for decision in worker["decisions"]:
            key = json.dumps([decision["bucket"], decision["winner"], decision["padding"]], sort_keys=True)
            found.setdefault(key, decision)
    return list(found.values())
