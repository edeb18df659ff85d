"""What a request gets where it says nothing: OpenAI's defaults, unless the model's generation_config.json says otherwise."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_serve.errors import UserError


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """temperature 1, every token, and as many tokens as fit; `source` says where other values came from."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None
    source: str = "OpenAI's defaults"

    @classmethod
    def from_dir(cls, directory: Path) -> GenerationDefaults:
        """Reads generation_config.json. There `do_sample: false` means temperature 0. Raises UserError for a broken file."""
        path = directory / "generation_config.json"
        if not path.exists():
            return cls()
        try:
            data: Any = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read as JSON; repair or remove it") from error
        if not isinstance(data, dict):
            raise UserError(f"{path} must hold a JSON object; repair or remove it")
        base = cls()
        values = {
            "temperature": data.get("temperature"),
            "top_p": data.get("top_p"),
            "top_k": data.get("top_k"),
            "min_p": data.get("min_p"),
            "repetition_penalty": data.get("repetition_penalty"),
            "max_tokens": data.get("max_new_tokens"),
        }
        if data.get("do_sample") is False:
            values |= {"temperature": 0.0, "top_p": None, "top_k": None, "min_p": None}
        given = {name: value for name, value in values.items() if value is not None}
        for name, value in given.items():
            whole = name in ("top_k", "max_tokens")
            number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            low = value == 0 and name in ("top_p", "repetition_penalty")
            if not number or value < 0 or low or (name in ("top_p", "min_p") and value > 1):
                raise UserError(f"{path} has a {name} that is no number of the right kind and size; repair or remove it")
        changed = [name for name, value in given.items() if value != getattr(base, name)]
        return cls(**given, source=f"generation_config.json ({', '.join(changed)})") if changed else base

    def __str__(self) -> str:
        return f"temperature {self.temperature:g}, top_p {self.top_p:g}, top_k {self.top_k or 'off'}, from {self.source}"
