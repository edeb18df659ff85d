"""A decision file that was named must hold something for this host: a person who names one wants it used."""

from __future__ import annotations

from pathlib import Path

from mla_serve.errors import UserError
from mla_serve.selection import DecisionTable, Fingerprint
from mla_serve.selection.entry import host_of

__all__ = ["own_decisions"]


def own_decisions(path: Path, here: Fingerprint) -> None:
    """Raises UserError if the file is missing, no table, or holds decisions of other hosts alone."""
    hosts = [decision.fingerprint for decision in DecisionTable.load(path, strict=True)]
    if not any(host_of(host) == host_of(here) for host in hosts):
        names = ", ".join(sorted({_name(host) for host in hosts})) or "nothing"
        raise UserError(
            f"{path} holds decisions for {names}, and this is {_name(here)}; measure here with `mla-serve probe`, or unset "
            "MLA_SERVE_DECISIONS"
        )


def _name(host: Fingerprint) -> str:
    return host.device if host.threads is None else f"{host.device} with {host.threads} threads"
