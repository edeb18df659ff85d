"""What vLLM has no flag for: a TOML file named by MLA_SERVE_CONFIG, and MLA_SERVE_* variables, which win over the file."""

from __future__ import annotations

import logging
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, cast

from mla_serve.errors import UserError

__all__ = ["PREFIX", "RPC", "Settings", "logger", "takes_default"]

RPC = "mla_serve_attention"
"""What vLLM's workers answer to, by `collective_rpc`, once a layer of ours was made there."""

PREFIX = "MLA_SERVE_"
logger = logging.getLogger("vllm.mla_serve")  # below vLLM's own, whose handlers then print it
POLICIES = ("measured", "availability")
PROBES = ("off", "missing", "all")
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")
_OTHERS = {"MLA_SERVE_CONFIG", "MLA_SERVE_API_KEY", "MLA_SERVE_TEST_SEED"}


@dataclass(frozen=True, slots=True)
class Settings:
    """The plugin's settings; all have defaults, so nothing must be set.

    `decisions`: a decision file; None: the user's, and what came with the package. `pins`: phase and kernel, as
    `parse_pins` reads them. `probe`: measure at start nothing, what the table does not hold, or all; `budget` in seconds.
    `default`: take the place of vLLM's own choice. `expected_context`: the tokens of context that a captured CUDA graph is
    chosen for; None: vLLM's maximum model length. `absorb_up_to`: new tokens of a request that are served by the absorbed
    form, as a decode is; None: by the widths of the model on a GPU, 1 on a CPU.
    """

    decisions: str | None = None
    policy: Literal["measured", "availability"] = "measured"
    pins: tuple[tuple[str, str], ...] = ()
    probe: Literal["off", "missing", "all"] = "off"
    budget: float = 120.0
    default: bool = False
    expected_context: int | None = None
    absorb_up_to: int | None = None

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """From `environ` (default: this process's). Raises UserError, one sentence with the remedy, for what cannot be used."""
        environ = os.environ if environ is None else environ
        names = [field.name for field in fields(cls)]
        found: dict[str, Any] = {}
        if path := environ.get(f"{PREFIX}CONFIG"):
            for key, value in _toml(path).items():
                if key not in names:
                    raise UserError(f"{path} sets {key!r}, which mla_serve does not know; it knows {', '.join(names)}")
                found[key] = _READERS[key](value, f"{key} in {path}")
        variables = {f"{PREFIX}{name.upper()}": name for name in names}
        for variable in sorted(environ):
            if variable in variables:
                found[variables[variable]] = _READERS[variables[variable]](environ[variable], variable)
            elif variable.startswith(PREFIX) and variable not in _OTHERS:
                raise UserError(f"{variable} is set, which mla_serve does not know; it knows {', '.join(variables)}")
        return cls(**found)

    @property
    def pinned(self) -> dict[str, str]:
        """Pins as a Selector takes them."""
        return dict(self.pins)


def takes_default(environ: Mapping[str, str] | None = None) -> bool:
    """The setting `default` alone, asked for in every process of vLLM, also where no model of ours is served.

    So nothing is an error yet: what cannot be read counts as False, with a warning.
    """
    environ = os.environ if environ is None else environ
    value: Any = environ.get(f"{PREFIX}DEFAULT")
    try:
        if value is None and (path := environ.get(f"{PREFIX}CONFIG")):
            value = _toml(path).get("default")
        return value is not None and _switch(value, "MLA_SERVE_DEFAULT")
    except UserError as error:
        logger.warning("%s; vLLM's own choice of attention stays", error)
        return False


def _toml(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"MLA_SERVE_CONFIG names {path}, which cannot be read ({error.strerror}); unset it or name a file"
        ) from None
    except ValueError as error:
        raise UserError(
            f"{path}, named by MLA_SERVE_CONFIG, is no TOML file ({error}); mend it or unset the variable"
        ) from None


def _text(value: Any, where: str) -> str | None:
    if not isinstance(value, str):
        raise UserError(f"{where} must be a text, not {value!r}")
    return value or None


def _choice(*choices: str) -> Callable[[Any, str], str]:
    def read(value: Any, where: str) -> str:
        if value not in choices:
            raise UserError(f"{where} is {value!r}; use {', '.join(choices[:-1])} or {choices[-1]}")
        return cast(str, value)

    return read


def _pins(value: Any, where: str) -> tuple[tuple[str, str], ...]:
    if isinstance(value, dict):
        value = ",".join(f"{phase}={kernel}" for phase, kernel in value.items())
    if not isinstance(value, str):
        raise UserError(f"{where} must be pins like 'decode=torch-mla', not {value!r}")
    from mla_serve.selection.pins import parse_pins  # knows all kernels; not before it is needed

    try:
        return tuple(parse_pins(value).items())
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def _number(value: Any, where: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = 0.0
    if not 0 < number < float("inf") or isinstance(value, bool):
        raise UserError(f"{where} is {value!r}; give a number above 0")
    return number


def _count(value: Any, where: str) -> int:
    try:
        number = int(str(value))
    except ValueError:
        number = 0
    if number < 1:
        raise UserError(f"{where} is {value!r}; give a whole number of at least 1")
    return number


def _switch(value: Any, where: str) -> bool:
    text = str(value).lower()
    if text not in _TRUE + _FALSE:
        raise UserError(f"{where} is {value!r}; use 1 or 0")
    return text in _TRUE


_READERS: dict[str, Callable[[Any, str], Any]] = {
    "decisions": _text,
    "policy": _choice(*POLICIES),
    "pins": _pins,
    "probe": _choice(*PROBES),
    "budget": _number,
    "default": _switch,
    "expected_context": _count,
    "absorb_up_to": _count,
}
