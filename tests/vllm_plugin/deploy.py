"""A Deployment whose kernels are fakes, without vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from mla_serve.backends.base import Backend, Limits
from mla_serve.selection import DecisionTable, Selector
from mla_serve.vllm_plugin.config import Settings
from mla_serve.vllm_plugin.deployment import Deployment, Size

CPU = torch.device("cpu")
SIZE = Size(dtype="float32", layers=3, max_model_len=256, max_requests=8, max_tokens=128, host_lens=True)
LIMITS = Limits(max_requests=8, max_tokens=128, max_kv_tokens=256)


def deploy(kernels: Sequence[Backend], size: Size = SIZE, *, measure: Any = None, **settings: Any) -> Deployment:
    """With `kernels` alone; pins are of their names."""
    pins = settings.get("pins", ())
    deployment = Deployment(Settings(**{**settings, "pins": ()}), CPU, size)
    deployment.settings = Settings(**settings)
    deployment.selector = Selector(
        CPU, policy=deployment.settings.policy, pins=dict(pins), table=DecisionTable(), backends=kernels, layers=size.layers,
        host_lens=size.host_lens, clean_pool=True, measure=measure,
    )  # fmt: skip
    return deployment


def config(block_size: int = 16, *, asked: bool = False) -> Any:
    """As much of a VllmConfig as the start-up checks read."""
    return SimpleNamespace(cache_config=SimpleNamespace(block_size=block_size, user_specified_block_size=asked))
