"""`--emulate sm80`: what an Ampere GPU could run, on a Hopper GPU. An emulation, never a measurement of Ampere.

Kernels that need Hopper take no part, Triton is kept off Hopper's instructions and within Ampere's shared memory. The memory,
the number of SMs and their clocks stay this GPU's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from mla_serve.errors import UserError

__all__ = ["NOTE", "SHARED_MEMORY", "NotOnAmpere", "begin", "refusal", "why_not"]

SHARED_MEMORY = 163 << 10
"""Bytes of shared memory that one block may have on an A100 (CUDA C++ Programming Guide, compute capability 8.0)."""

NOTE = (
    "an emulation of sm_80 on this GPU, not a result of an Ampere GPU: kernels for Hopper are left out, Triton runs without "
    "Hopper's instructions and within 163 KiB of shared memory; memory bandwidth, SM count and clocks are this GPU's, and "
    "flashinfer-fa2 takes the tiles that this GPU's shared memory allows"
)

_RUNS = {"flashinfer-fa2", "fa2", "torch-flash", "torch-efficient", "triton-mla", "vllm-triton-mla", "chosen"}
_PICKS_HOPPER = {
    "torch-cudnn": "cuDNN", "transformer-engine": "cuDNN", "torch-math": "cuBLAS", "torch-mla": "cuBLAS",
}  # fmt: skip
_HOPPER = ("wgmma", "cp.async.bulk", "barrier.cluster", "setmaxnreg", "griddepcontrol")
"""PTX that sm_80 does not have: warp-group products, bulk copies (TMA), clusters, register hand-over, dependent launch."""


class NotOnAmpere(RuntimeError):
    """A Triton kernel that was compiled with instructions that an Ampere GPU lacks."""


def why_not(name: str) -> str | None:
    """None for a kernel that runs on Ampere with the instructions that it uses here, else why it takes no part."""
    if name in _RUNS:
        return None
    library = _PICKS_HOPPER.get(name)
    return f"{library} would use Hopper's instructions here" if library else "needs Hopper"


def begin(what: str) -> None:
    """Prepares this process, before anything has compiled a Triton kernel. Raises UserError for anything but "sm80".

    Triton's compiler reads DISABLE_MMA_V3 at each compilation, and it is part of the key of Triton's cache. Triton 3.6 tells a
    listener of each kernel that it has compiled or found in its cache; this one refuses what Ampere could not run.
    """
    if what != "sm80":
        raise UserError(f"cannot emulate {what!r}; use sm80")
    os.environ["DISABLE_MMA_V3"] = "1"
    try:
        knobs = import_module("triton.knobs")
    except ImportError:
        return  # without Triton there is nothing to restrain
    if not hasattr(knobs.compilation, "listener"):
        raise UserError("--emulate needs Triton 3.4 or newer, whose compiler can be listened to")
    knobs.compilation.listener = _listen


def refusal(metadata: Mapping[str, Any], ptx: str) -> str | None:
    """Why an Ampere GPU cannot run a compiled Triton kernel, by its metadata and its PTX; None if it can."""
    if metadata["shared"] > SHARED_MEMORY:
        return f"takes {metadata['shared'] / 1024:.0f} KiB of shared memory, of {SHARED_MEMORY >> 10} on Ampere"
    found = [name for name in _HOPPER if name in ptx]
    return f"uses {', '.join(found)}, which Ampere lacks" if found else None


def _listen(*, metadata: Mapping[str, Any], metadata_group: Mapping[str, str], **_: Any) -> None:
    paths = [path for name, path in metadata_group.items() if name.endswith(".ptx")]
    reason = refusal(metadata, "".join(Path(path).read_text() for path in paths))
    if reason is not None:
        raise NotOnAmpere(f"{metadata.get('name', 'the kernel')} {reason}")
