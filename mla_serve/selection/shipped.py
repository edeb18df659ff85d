"""Decision files that come with the package, for hosts that were measured: what serves there before a probe of one's own."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable

import msgspec

from mla_serve.selection.entry import BROKEN, Entry, host_of, split
from mla_serve.selection.fingerprint import Fingerprint
from mla_serve.selection.table import SCHEMA, DecisionTable

logger = logging.getLogger(__name__)


def shipped_decisions(here: Fingerprint, sources: Sequence[Traversable] | None = None) -> DecisionTable:
    """The decisions of `mla_serve/tables/*.json` for the device of `here`, in memory and in no file.

    On any other device it is empty, without a word. As in any table, what was measured with another version of a winner's
    library, or with other kernels of ours, does not hold. `sources` replaces the package's own files.
    """
    table = DecisionTable()
    if sources is None:
        sources = [file for file in files("mla_serve.tables").iterdir() if file.name.endswith(".json")]
    for source in sorted(sources, key=lambda file: file.name):
        try:
            entries = split(source.read_bytes(), SCHEMA) or []
        except (OSError, msgspec.DecodeError, RecursionError) as error:
            logger.warning("ignoring %s, which came with the package: %s", source.name, error)
            continue
        for raw in entries:
            try:
                entry = Entry.read(raw)
                if entry.host == host_of(here):
                    table.put(entry.decision(), save=False)
            except BROKEN as error:
                logger.warning("ignoring a broken entry of %s, which came with the package: %s", source.name, error)
    return table
