"""Measured results as files: what was found, with the date, the command and the host it was found on."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

__all__ = ["save_result", "stamped"]


def stamped(data: dict[str, Any], *, command: str) -> dict[str, Any]:
    """`data` after its date (UTC), the command that finds it again, and the host: system, Python, devices, library versions."""
    from mla_serve.doctor import examine

    host = examine()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "host": {"system": host.system, "python": host.python, "devices": host.devices, "versions": host.versions},
        **data,
    }


def save_result(path: Path, result: dict[str, Any]) -> None:
    """Writes `result` as JSON, each of its `rows` on a line of its own, so that a long table stays readable and comparable."""
    rows = result.get("rows")
    text = json.dumps({key: value for key, value in result.items() if key != "rows" or not rows}, indent=1)
    if rows:
        lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
        text = f'{text[:-2]},\n "rows": [\n{lines}\n ]\n}}'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")
