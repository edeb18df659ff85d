"""Typed reading of a checkpoint's JSON files: whatever is wrong becomes one sentence that names the file and the field."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from mla_serve.errors import UserError

__all__ = ["CheckpointError", "Fields", "read_json"]

T = TypeVar("T", str, bool)


class CheckpointError(UserError):
    """A model directory cannot be served as it is; the message names the file, field or tensor and says what to do."""


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; CheckpointError if the file is missing, unreadable or holds something else."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}; download the whole checkpoint directory") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}); download it again") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds no JSON object; download it again")
    return data


@dataclass(frozen=True, slots=True)
class Fields:
    """Typed access to a JSON object; every complaint names the file and the field."""

    raw: Mapping[str, Any]
    path: Path

    def error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path} {what}")

    def count(self, name: str, default: int | Literal["required"] | None = "required", least: int = 1) -> Any:
        """A whole number >= `least`. A null field is an absent one."""
        value = self.raw.get(name)
        if value is None:
            if default == "required":
                raise self.error(f"has no {name}; download the model's own config.json")
            return default
        if type(value) is not int or value < least:
            raise self.error(f"has {name} {value!r}, which should be a whole number of at least {least}; correct it")
        return value

    def number(self, name: str, default: float) -> float:
        """A finite number that is not negative; JSON as Python writes it may hold NaN and Infinity."""
        value = self.raw.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(f"has {name} {value!r}, which should be a number; correct it")
        if not math.isfinite(value) or value < 0:
            raise self.error(f"has {name} {value!r}, which should be finite and not negative; correct it")
        return float(value)

    def of(self, name: str, default: T) -> T:
        value = self.raw.get(name)
        if value is None:
            return default
        if type(value) is not type(default):
            raise self.error(f"has {name} {value!r}, which should be a {type(default).__name__}; correct it")
        return value
