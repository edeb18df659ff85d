"""Which backends there are: the built-in ones and those that other distributions offer by entry point."""

from __future__ import annotations

import logging
from collections.abc import Collection
from importlib import import_module
from importlib.metadata import entry_points

import torch

from mla_serve.backends.base import Backend
from mla_serve.errors import UserError

__all__ = ["BUILT_IN", "GROUP", "load_backends"]

GROUP = "mla_serve.backends"  # an entry point's value is a Backend class, constructed as cls(device)

# In the order in which ties are broken. The oracle is not among them: it is never a candidate.
_CLASSES = {
    "flashinfer-fa3": "flashinfer:FlashInferFa3",
    "flashinfer-trtllm-gen": "flashinfer_blackwell:FlashInferTrtllmGen",
    "flashinfer-cute-dsl": "flashinfer_blackwell:FlashInferCuteDsl",
    "flashinfer-cutlass": "flashinfer_blackwell:FlashInferCutlass",
    "flashinfer-xqa": "flashinfer_blackwell:FlashInferXqa",
    "fa3": "flash_attention:FlashAttention3",
    "fa4": "flash_attention:FlashAttention4",
    "flashmla": "flashmla:FlashMLA",
    "flashinfer-fa2": "flashinfer:FlashInferFa2",
    "fa2": "flash_attention:FlashAttention2",
    "transformer-engine": "transformer_engine:TransformerEngine",
    "torch-flash": "torch_sdpa:TorchFlash",
    "torch-cudnn": "torch_sdpa:TorchCudnn",
    "torch-efficient": "torch_sdpa:TorchEfficient",
    "torch-math": "torch_sdpa:TorchMath",
    "torch-mla": "torch_mla:TorchMLA",
    "triton-mla": "triton_mla:TritonMLA",
}
BUILT_IN: tuple[str, ...] = tuple(_CLASSES)

_log = logging.getLogger(__name__)


def load_backends(device: torch.device, only: Collection[str] | None = None) -> list[Backend]:
    """The backends for `device`, available or not: built-in ones first, then those of the entry-point group.

    `only` keeps the named ones; raises UserError for a name that nobody has. A foreign backend that cannot be imported or
    constructed, is no Backend, or takes a name that is taken, is left out with a warning in the log.
    """
    backends: dict[str, Backend] = {}
    for name, path in _CLASSES.items():
        module, cls = path.split(":")
        if only is None or name in only:
            backends[name] = getattr(import_module(f"mla_serve.backends.{module}"), cls)(device)
    for point in entry_points(group=GROUP):
        if only is not None and point.name not in only:
            continue
        try:
            backend = point.load()(device)
        except Exception as error:  # noqa: BLE001  foreign code may raise anything; the reason is kept
            _log.warning("attention backend %s is left out: %s: %s", point.name, type(error).__name__, error, exc_info=True)
            continue
        if not isinstance(backend, Backend):
            _log.warning("attention backend %s is left out: %s is no Backend", point.name, type(backend).__name__)
        elif backend.name != point.name or backend.name in BUILT_IN:
            _log.warning("attention backend %s is left out: it calls itself %s", point.name, backend.name)
        else:
            backends[backend.name] = backend
    unknown = sorted(set(only or ()) - backends.keys())
    if unknown:
        raise UserError(f"no attention backend is called {', '.join(unknown)}; there are {', '.join(BUILT_IN)}")
    return list(backends.values())
