"""The page of a running server: the decisions in force, then what its decision file holds for the same host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mla_serve.pages.render import render_page
from mla_serve.selection import Decision, DecisionTable
from mla_serve.selection.entry import host_of

__all__ = ["served_page"]


def served_page(found: list[dict[str, Any]], table: Path, model: str) -> str:
    """HTML. `found` are the decisions in force as `Decision.to_json` gives them. A long table takes a moment."""
    in_force = [Decision.from_json(decision) for decision in found]
    hosts = {host_of(decision.fingerprint) for decision in in_force}
    held = list(DecisionTable.load(table))
    here = [decision for decision in held if host_of(decision.fingerprint) in hosts]
    return render_page(in_force, here, subject=model, served=True, other_hosts=len(held) - len(here))
