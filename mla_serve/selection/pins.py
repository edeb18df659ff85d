"""Pins: a person names the kernel of a phase, and gets it or an error that says why not."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Literal

from mla_serve.backends.registry import BUILT_IN, GROUP
from mla_serve.errors import UserError
from mla_serve.shapes import Phase

Form = Literal["pad", "native"]


class PinError(UserError):
    """A pin that cannot be read, names nobody, or names a kernel that cannot run the shape."""


@dataclass(frozen=True, slots=True)
class Pin:
    """A kernel's name, and its form where the pin says so; None leaves native or padded to the policy."""

    kernel: str
    form: Form | None = None

    def __str__(self) -> str:
        return self.kernel if self.form is None else f"{self.kernel}+{self.form}"


def parse_pins(text: str) -> dict[str, str]:
    """`prefill=torch-flash+pad,decode=torch-mla` to {"prefill": "torch-flash+pad", "decode": "torch-mla"}; "" to {}.

    Raises PinError with the names there are for an unknown phase, kernel or form, or a phase that is named twice.
    """
    pins: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        phase, equals, kernel = (part.strip() for part in item.partition("="))
        if not equals or not kernel:
            raise PinError(f"cannot read the pin {item!r}; write PHASE=KERNEL, as in prefill=torch-flash+pad")
        if phase in pins:
            raise PinError(f"{phase} is pinned twice; keep one of {phase}={pins[phase]} and {item}")
        pins[phase] = kernel
    by_phase(pins, known_kernels())
    return pins


def known_kernels() -> list[str]:
    """Every name a pin may use: the built-in backends, then those of installed packages."""
    return list(dict.fromkeys([*BUILT_IN, *(point.name for point in entry_points(group=GROUP))]))


def by_phase(pins: Mapping[str, str], kernels: Collection[str]) -> dict[Phase, Pin]:
    """The pin of each phase. `prefill` stands for context too unless that has its own. Raises PinError as `parse_pins` does."""
    found: dict[Phase, Pin] = {}
    for phase, text in pins.items():
        kernel, plus, form = text.partition("+")
        if phase not in (known := [p.value for p in Phase]):
            raise PinError(f"there is no phase {phase!r} to pin; use {', '.join(known)}")
        if kernel not in kernels:
            raise PinError(f"no kernel is called {kernel!r} (pin of {phase}); there are {', '.join(kernels)}")
        if plus and form not in ("pad", "native"):
            raise PinError(f"{phase}={text} ends in +{form}; a kernel's form is +pad or +native")
        found[Phase(phase)] = Pin(kernel, form if form in ("pad", "native") else None)  # type: ignore[arg-type]
    if Phase.PREFILL in found:
        found.setdefault(Phase.CONTEXT, found[Phase.PREFILL])
    return found
