"""The decision table: one JSON file that many processes share. What of it cannot be used is warned about, never fatal."""

from __future__ import annotations

import json
import logging
import math
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from platformdirs import user_cache_path

from mla_serve.selection.decision import CandidateResult, Decision, Policy
from mla_serve.selection.fingerprint import Fingerprint
from mla_serve.shapes import AttentionShape, Bucket

__all__ = ["SCHEMA", "CandidateResult", "Decision", "DecisionTable", "Fingerprint", "default_table_path"]

logger = logging.getLogger(__name__)

SCHEMA = 1
_LOCK_SECONDS = 10.0
_Key = tuple[Bucket, Policy]


def default_table_path() -> Path:
    """Where `probe` writes and `serve` reads when no file is named: the user's cache directory."""
    return user_cache_path("mla-serve") / "decisions.json"


class DecisionTable:
    """Decisions by bucket and policy, of one host or of many, in memory and (with a `path`) in a file.

    The file is replaced atomically under a lock and merged with what other processes wrote meanwhile. Decisions of other
    hosts are kept but never returned. A file that is missing counts as empty; one that is broken, of another schema or
    unreadable is ignored with a warning, and one that cannot be written leaves the table in memory.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._decisions: dict[_Key, list[Decision]] = {}
        self._warned: set[str] = set()
        if path is not None:
            self._merge(self._read(path))

    @classmethod
    def load(cls, path: Path) -> DecisionTable:
        """The table in `path`, which need not exist yet."""
        return cls(path)

    def __iter__(self) -> Iterator[Decision]:
        for decisions in self._decisions.values():
            yield from decisions

    def __len__(self) -> int:
        return sum(len(decisions) for decisions in self._decisions.values())

    def get(self, bucket: Bucket, policy: Policy, here: Fingerprint) -> Decision | None:
        """The decision for `bucket` that holds on `here`, or None."""
        valid = (decision for decision in self._decisions.get((bucket, policy), ()) if self._holds(decision, here))
        return next(valid, None)

    def near(self, bucket: Bucket, policy: Policy, here: Fingerprint) -> list[Decision]:
        """Decisions for buckets that differ in sizes (batch, lengths, ragged) alone and hold on `here`, nearest first.

        Distance counts doublings of batch, query tokens and key tokens; uniform against ragged lengths counts as four.
        """
        found = [
            (distance, str(key[0]), decision)
            for key, decisions in self._decisions.items()
            if key[1] == policy and (distance := _distance(key[0].shape, bucket.shape)) is not None
            for decision in decisions
            if self._holds(decision, here)
        ]
        return [decision for *_, decision in sorted(found, key=lambda item: item[:2])]

    def put(self, decision: Decision, *, save: bool = True) -> None:
        """Adds or replaces this host's decision for its bucket and policy, and writes the file unless `save` is False."""
        self._merge([decision])
        if save and self.path is not None:
            self.save()

    def save(self, path: Path | None = None) -> None:
        """Writes the table to `path` (default: its own), merged with what the file holds. A failure is a warning."""
        target = path or self.path
        if target is None:
            return
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{target}.lock", timeout=_LOCK_SECONDS):
                on_disk = DecisionTable()
                on_disk._merge(self._read(target))
                on_disk._merge(self)
                self._decisions = on_disk._decisions
                _write_atomically(target, {"schema": SCHEMA, "decisions": [decision.to_json() for decision in self]})
        except Timeout:
            self._warn(f"another process holds the lock of {target}; decisions stay in memory")
        except OSError as error:
            self._warn(f"cannot write {target} ({error.strerror or error}); decisions stay in memory")

    def _read(self, path: Path) -> list[Decision]:
        try:
            data = json.loads(path.read_bytes())
        except FileNotFoundError:
            return []
        except (OSError, ValueError, RecursionError) as error:
            self._warn(f"ignoring {path}: it cannot be read ({error})")
            return []
        if not isinstance(data, dict) or data.get("schema") != SCHEMA or not isinstance(data.get("decisions"), list):
            self._warn(f"ignoring {path}: it is no decision table of schema {SCHEMA}; make one with `mla-serve probe`")
            return []
        decisions = []
        for entry in data["decisions"]:
            try:
                decisions.append(Decision.from_json(entry))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                self._warn(f"ignoring broken entries of {path}: {type(error).__name__}: {error}")
        return decisions

    def _merge(self, decisions: Iterable[Decision]) -> None:
        """The later decision of the same bucket, policy and host stays; software versions may differ."""
        for new in decisions:
            rows = self._decisions.setdefault((new.bucket, new.policy), [])
            old = next((row for row in rows if _host(row) == _host(new)), None)
            if old is None:
                rows.append(new)
            elif (old.measured_at or "") <= (new.measured_at or ""):
                rows[rows.index(old)] = new

    def _holds(self, decision: Decision, here: Fingerprint) -> bool:
        reason = decision.fingerprint.mismatch(here, decision.library)
        if reason is not None:
            self._warn(f"ignoring decisions {reason}; measure again with `mla-serve probe`")
            return False
        for change in decision.fingerprint.drift(here):
            self._warn(f"using decisions measured with {change}; `mla-serve probe` measures again")
        return True

    def _warn(self, message: str) -> None:
        """Once per message: a table of 60 stale entries has one thing to say."""
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message)


def _host(decision: Decision) -> tuple[Any, ...]:
    fingerprint = decision.fingerprint
    return fingerprint.device, fingerprint.sm_count, fingerprint.capability, fingerprint.threads


def _distance(measured: AttentionShape, asked: AttentionShape) -> float | None:
    """Doublings between two shapes that are alike in all but sizes; None if they are not."""
    # A decode's query tokens per request are built into kernels, so they are no size that may differ.
    q_len = measured.q_len if measured.absorbed else asked.q_len
    if replace(measured, batch=asked.batch, q_len=q_len, kv_len=asked.kv_len, ragged=asked.ragged) != asked:
        return None
    pairs = ((measured.batch, asked.batch), (measured.q_len, asked.q_len), (measured.kv_len, asked.kv_len))
    return sum(abs(math.log2(a / b)) for a, b in pairs) + (4.0 if measured.ragged != asked.ragged else 0.0)


def _write_atomically(path: Path, data: dict[str, Any]) -> None:
    """Through a file of its own in the same directory, so that a reader or a kill sees the old table or the new one."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(data, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
