"""What vLLM's workers are asked from the process that serves."""

from __future__ import annotations

import json
from typing import Any

from mla_serve.vllm_plugin.config import RPC

__all__ = ["ask_workers"]


async def ask_workers(engine: Any) -> list[dict[str, Any]] | None:
    """Each worker's decisions and counts, first rank first; None where none of them has a layer of ours.

    `engine` is vLLM's client of its engine.
    """
    try:
        answers = await engine.collective_rpc(RPC)
    except Exception as error:
        if "not implemented" in str(error):  # whatever class the engine's process could send
            return None
        raise
    return [json.loads(answer) for answer in answers]
