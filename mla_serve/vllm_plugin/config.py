"""Settings that vLLM gives no channel for: MLA_SERVE_* variables, and a TOML file named by MLA_SERVE_CONFIG."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from mla_serve.errors import UserError

PREFIX = "MLA_SERVE_"
PROBES = ("off", "missing", "all")
POLICIES = ("measured", "availability", "batch-invariant")


@dataclass(frozen=True, slots=True)
class PluginSettings:
    """`default`: take the place of vLLM's own MLA backends. `decisions` is a table file (None: the user's).

    `probe` says what is measured at start: nothing, what the table lacks, or everything; for `budget` seconds at most.
    `expected_context` are the key tokens per request for which a captured graph's kernel is chosen (None: half of the longest).
    `absorbed_tokens`: new tokens on cached context that still run absorbed, per request. `kernel_timeout` as for `mla-serve`.
    """

    default: bool = False
    decisions: Path | None = None
    policy: Literal["measured", "availability", "batch-invariant"] = "measured"
    pins: Mapping[str, str] = field(default_factory=dict)
    probe: Literal["off", "missing", "all"] = "off"
    budget: float | None = None
    expected_context: int | None = None
    absorbed_tokens: int = 1
    kernel_timeout: float | None = None

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> PluginSettings:
        """From the file, and over it the variables. Raises UserError for a name or a value that means nothing here."""
        found: dict[str, tuple[str, Any]] = {}
        if file := environ.get(PREFIX + "CONFIG"):
            found = {name: (f"{name} in {file}", value) for name, value in _toml(Path(file)).items()}
        for name in cls.__dataclass_fields__:
            if text := environ.get(PREFIX + name.upper()):
                found[name] = (PREFIX + name.upper(), text)
        return cls(**{name: _value(name, where, value) for name, (where, value) in found.items()})


def _toml(file: Path) -> dict[str, Any]:
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(
            f"{PREFIX}CONFIG names {file}, which cannot be read as TOML ({error}); correct the file or unset it"
        ) from error
    unknown = sorted(data.keys() - PluginSettings.__dataclass_fields__.keys())
    if unknown:
        known = ", ".join(PluginSettings.__dataclass_fields__)
        raise UserError(f"{file} has {', '.join(unknown)}, which is no setting; there are {known}")
    return data


def _value(name: str, where: str, value: Any) -> Any:
    match name:
        case "default":
            return _one_of(where, str(value).lower(), ("0", "1", "false", "true")) in ("1", "true")
        case "decisions":
            path = Path(str(value)).expanduser()
            if not path.is_file():
                raise UserError(f"{where} names {path}, and there is no such file; make it with mla-serve probe --out {path}")
            return path
        case "policy":
            return _one_of(where, value, POLICIES)
        case "probe":
            return _one_of(where, {"idle": "missing", "on-demand": "missing"}.get(value, value), PROBES)
        case "pins":
            return _pins(where, value)
        case "expected_context" | "absorbed_tokens":
            number = _number(where, value)
            if number != int(number):
                raise UserError(f"{where} must be a whole number, at least 1")
            return int(number)
    return _number(where, value)


def _one_of(where: str, value: Any, known: tuple[str, ...]) -> str:
    if value not in known:
        raise UserError(f"{where} is {value!r}, which means nothing here; use {', '.join(known)}")
    return cast(str, value)


def _number(where: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = 0.0
    if not 0 < number < float("inf"):
        raise UserError(f"{where} must be a number over 0")
    return number


def _pins(where: str, value: Any) -> dict[str, str]:
    """A mapping phase -> kernel, or its text as on the command line; the names are checked here, before anything is loaded."""
    from mla_serve.selection import parse_pins
    from mla_serve.selection.pins import by_phase, known_kernels

    pins = parse_pins(value) if isinstance(value, str) else value
    if not isinstance(pins, dict) or not all(isinstance(kernel, str) for kernel in pins.values()):
        raise UserError(f'{where} must say which kernel serves which phase, for example "prefill=torch-flash,decode=torch-mla"')
    by_phase(pins, known_kernels())
    return pins
