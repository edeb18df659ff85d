"""On what a decision was made: device, versions, our own kernels' source. Decides whether an old decision still holds."""

from __future__ import annotations

import hashlib
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import mla_serve.backends

Device = torch.device  # below, `torch` is a field

# triton-mla is ours, but no table has been measured with it yet: those that were measured before it came still hold.
_ADAPTERS = ("flashinfer", "flash_attention", "flashmla", "transformer_engine", "triton_mla", "registry", "reference")
"""How names of files begin that hand calls to other people's kernels, or compute nothing that is served."""
_SOURCE_SUFFIXES = {".py", ".cu", ".cuh", ".cpp", ".h"}


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Device and software of one measurement.

    `device` is the GPU's name (a MIG slice has its own) or the CPU model. `threads` is torch's thread count on a CPU, None on a
    GPU, where `sm_count` and `capability` ("9.0") stand instead. `libraries` are the versions of the kernel libraries beside
    torch; `source` is a hash of our own kernels' source.
    """

    device: str
    torch: str
    threads: int | None = None
    sm_count: int | None = None
    capability: str | None = None
    driver: str | None = None
    cuda: str | None = None
    source: str | None = None
    libraries: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def here(cls, device: Device, libraries: Iterable[str] = ()) -> Fingerprint:
        """Of this process on `device`; `libraries` are distribution names, those not installed are left out."""
        versions = {name: version for name in sorted(set(libraries)) if (version := _version(name)) is not None}
        versions.pop("torch", None)
        common: dict[str, Any] = {"torch": str(torch.__version__), "source": _source_hash(), "libraries": versions}
        if device.type != "cuda":
            return cls(device=cpu_model(), threads=torch.get_num_threads(), **common)
        properties = torch.cuda.get_device_properties(device)
        return cls(
            device=properties.name,
            sm_count=properties.multi_processor_count,
            capability=f"{properties.major}.{properties.minor}",
            driver=_driver(),
            cuda=torch.version.cuda,
            **common,
        )

    def version(self, library: str) -> str | None:
        return self.torch if library == "torch" else self.libraries.get(library)

    def mismatch(self, here: Fingerprint, library: str) -> str | None:
        """Why a decision made on `self` does not hold on `here` for a winner of `library`, or None if it does."""
        for name in ("device", "sm_count", "capability", "threads", "source"):
            then, now = getattr(self, name), getattr(here, name)
            if then != now:
                return f"measured with {name} {then}, here it is {now}"
        if self.version(library) != here.version(library):
            return f"measured with {library} {self.version(library)}, here it is {here.version(library)}"
        return None

    def drift(self, here: Fingerprint) -> list[str]:
        """What differs without making a decision invalid: driver, CUDA, and torch for a winner of another library."""
        return [
            f"{name} {getattr(self, name)}, now {getattr(here, name)}"
            for name in ("driver", "cuda", "torch")
            if getattr(self, name) != getattr(here, name)
        ]

    def to_json(self) -> dict[str, Any]:
        """Flat and readable; what is None or empty is left out."""
        return {name: value for name, value in asdict(self).items() if value not in (None, {})}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Fingerprint:
        """Inverse of `to_json`; raises KeyError, TypeError or ValueError on anything else."""
        return cls(**{**data, "libraries": {str(k): str(v) for k, v in data.get("libraries", {}).items()}})


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def cpu_model() -> str:
    """The model name a person knows; platform.processor() is empty or "x86_64" on Linux."""
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.is_file() else None
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def _driver() -> str | None:
    """The NVIDIA kernel module's version; the file stands on every Linux host with the driver, containers included."""
    version = Path("/proc/driver/nvidia/version")
    found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", version.read_text()) if version.is_file() else None
    return found.group(1) if found else None


@cache
def _source_hash() -> str:
    """Of every source file below `mla_serve/backends` that computes: a change to a losing kernel may make it the winner.

    An adapter of another library's kernels does not count, since that library's version does.
    """
    root = Path(mla_serve.backends.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(p for p in root.rglob("*") if p.suffix in _SOURCE_SUFFIXES and not p.name.startswith(_ADAPTERS)):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
