"""Peers: other people's kernels, called through their own public API, from a directory that is no part of the package.

`--peers DIR` names it. DIR is a Python package: its `__init__.py` may share code, and every other module that does not begin
with an underscore has

    def calls(shape: AttentionShape, call: Call) -> Iterator[PeerCall]: ...

which yields one PeerCall for each kernel and form that the module knows, runnable or not. A library is imported inside that
function, so that a peer that is not installed costs a row with its reason and nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from mla_serve.backends.padded import Padding
from mla_serve.errors import UserError
from mla_serve.selection.inputs import Call
from mla_serve.shapes import AttentionShape

__all__ = ["PeerCall", "PeerModule", "load_peers"]

_PACKAGE = "mla_serve_bench_peers"


def _nothing() -> None:
    """The plan of a kernel that has none."""


@dataclass(slots=True)
class PeerCall:
    """One kernel of a peer in one form, set up for one call with the settings that its makers recommend.

    `run` is what is timed, exactly what an engine does once a layer: pad, kernel, trim. It reads `call.tensors` as they are
    and changes none of them. `plan` is what an engine does once a step, out of the timed region and reported beside it;
    it must refresh in place, so that a CUDA graph captured around `run` stays right. `read` turns what `run` returned into
    out [tokens, heads, v] and the natural-log LSE [tokens, heads] (None where the kernel gave none); it is not timed.
    `capturable` says whether `run` may be captured in a CUDA graph. `settings` is for the reader of the row, in a few words.
    With `why_not`, the reason why it cannot be run here, everything else is unused.
    """

    name: str
    run: Callable[[], Any] = _nothing
    read: Callable[[Any], tuple[Tensor, Tensor | None]] | None = None
    plan: Callable[[], object] = _nothing
    padding: Padding | None = None
    capturable: bool = True
    settings: str | None = None
    why_not: str | None = None

    @property
    def label(self) -> str:
        """The name, with "+pad" for a padded form."""
        return self.name if self.padding is None else f"{self.name}+pad"


class PeerModule(Protocol):
    """What a module of a directory of peers offers."""

    __name__: str

    def calls(self, shape: AttentionShape, call: Call) -> Iterator[PeerCall]:
        """Every kernel and form of the peer for this very call; it may yield none for a phase that is not its own."""
        ...


def load_peers(directory: Path) -> list[PeerModule]:
    """The modules of a directory of peers, by name. Raises UserError for a directory that is none."""
    init = directory / "__init__.py"
    if not init.is_file():
        raise UserError(f"{directory} is no directory of peers: it has no __init__.py; the repository has benchmarks/peers")
    # One name per directory, whatever else is called "peers" on the path; submodules import each other relatively.
    spec = spec_from_file_location(_PACKAGE, init, submodule_search_locations=[str(directory)])
    assert spec is not None
    assert spec.loader is not None
    package = module_from_spec(spec)
    for stale in [name for name in sys.modules if name == _PACKAGE or name.startswith(f"{_PACKAGE}.")]:
        del sys.modules[stale]
    sys.modules[_PACKAGE] = package
    spec.loader.exec_module(package)
    names = sorted(path.stem for path in directory.glob("*.py") if not path.stem.startswith("_"))
    modules: list[Any] = [import_module(f"{_PACKAGE}.{name}") for name in names]
    for module in modules:
        if not callable(getattr(module, "calls", None)):
            raise UserError(f"{directory / module.__name__.rpartition('.')[2]}.py has no function `calls`")
    return modules
