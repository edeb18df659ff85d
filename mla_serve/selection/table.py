"""The decision table: one JSON file that many processes share. What of it cannot be used is warned about, never fatal."""

from __future__ import annotations

import glob
import logging
import math
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
from filelock import FileLock, Timeout
from platformdirs import user_cache_path

from mla_serve.errors import UserError
from mla_serve.selection.decision import CandidateResult, Decision, Policy
from mla_serve.selection.entry import BROKEN, Entry, join, split
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
    unreadable is ignored with a warning, and one that cannot be written leaves the table in memory. A decision is decoded when
    it is first asked for; one that turns out to be broken is dropped then, with a warning.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._entries: dict[_Key, list[Entry]] = {}
        self._warned: set[str] = set()
        self._seen: tuple[int, int] | None = None  # the version of the file that was read or written last
        if path is not None:
            self._seen = _version(path)
            self._merge(self._read(path))

    @classmethod
    def load(cls, path: Path, *, strict: bool = False) -> DecisionTable:
        """The table in `path`, which need not exist yet. `strict` raises UserError for a file that is missing or no table."""
        table = cls() if strict else cls(path)
        if strict:
            table.path = path
            try:
                table._merge(table._entries_of(path))
            except (OSError, ValueError) as error:
                raise UserError(f"{path} {_reason(error)}; `mla-serve probe` writes decision files") from error
        return table

    def __iter__(self) -> Iterator[Decision]:
        for entry in self._all():
            decision = self._decode(entry)
            if decision is not None:
                yield decision

    def __len__(self) -> int:
        """Counts entries that have not been decoded yet, too."""
        return sum(len(entries) for entries in self._entries.values())

    def get(self, bucket: Bucket, policy: Policy, here: Fingerprint) -> Decision | None:
        """The decision for `bucket` that holds on `here`, or None."""
        decisions = map(self._decode, tuple(self._entries.get((bucket, policy), ())))
        return next((decision for decision in decisions if decision is not None and self._holds(decision, here)), None)

    def near(self, bucket: Bucket, policy: Policy, here: Fingerprint) -> list[Decision]:
        """Decisions for buckets that differ in sizes (batch, lengths, ragged) or in being captured, and hold on `here`.

        Nearest first. Distance counts doublings of batch, query tokens and key tokens; uniform against ragged lengths counts
        as four, a captured graph against an eager call as half of one: the same kernel, if it can be captured at all.
        """
        found = [
            (doublings, str(key[0]), decision)
            for key, entries in tuple(self._entries.items())
            if key[1] == policy and (doublings := distance(key[0].shape, bucket.shape)) is not None
            for decision in map(self._decode, tuple(entries))
            if decision is not None and self._holds(decision, here)
        ]
        return [decision for *_, decision in sorted(found, key=lambda item: item[:2])]

    def put(self, decision: Decision, *, save: bool = True) -> None:
        """Adds or replaces this host's decision for its bucket and policy, and writes the file unless `save` is False."""
        self._merge([Entry.of(decision)])
        if save and self.path is not None:
            self.save()

    def add(self, other: DecisionTable) -> None:
        """Takes in all decisions of `other`, in memory; per bucket, policy and host the later one stays."""
        self._merge(other._all())

    def refresh(self) -> None:
        """Takes in what other processes have written to the file since."""
        if self.path is not None and (version := _version(self.path)) != self._seen:
            self._merge(self._read(self.path))
            self._seen = version

    def save(self, path: Path | None = None, *, strict: bool = False) -> None:
        """Writes the table to `path` (default: its own), merged with what the file holds.

        A failure is a warning, or with `strict` a UserError.
        """
        target = path or self.path
        if target is None:
            return
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{target}.lock", timeout=_LOCK_SECONDS):
                on_disk = DecisionTable()
                on_disk._merge(self._read(target))
                on_disk._merge(self._all())
                self._entries = on_disk._entries
                self._set_aside(target)
                _write_atomically(target, join(self._all(), SCHEMA))
                self._seen = _version(target) if target == self.path else self._seen
        except (Timeout, OSError) as error:
            held = isinstance(error, Timeout)
            reason = "another process holds its lock" if held else getattr(error, "strerror", None) or error
            if strict:
                raise UserError(f"cannot write {target} ({reason})") from error
            self._warn(f"cannot write {target} ({reason}); decisions stay in memory")

    def _set_aside(self, path: Path) -> None:
        """A file that is no table is somebody's: it gets the name FILE.bad instead of being overwritten."""
        try:
            self._entries_of(path)
        except ValueError:
            if path.stat().st_size:
                os.replace(path, f"{path}.bad")
                self._warn(f"{path} was no decision table; what it held is in {path}.bad")
        except FileNotFoundError:
            return

    def _read(self, path: Path) -> list[Entry]:
        try:
            return self._entries_of(path)
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            self._warn(f"ignoring {path}: it {_reason(error)}; make one with `mla-serve probe`")
            return []

    def _entries_of(self, path: Path) -> list[Entry]:
        """Raises OSError or, for a file that is no table, ValueError; warns about entries that are none."""
        try:
            raw = split(path.read_bytes(), SCHEMA)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot be read ({error})") from error
        if raw is None:
            raise ValueError(f"is no decision table of schema {SCHEMA}")
        entries = []
        for data in raw:
            try:
                entries.append(Entry.read(data))
            except BROKEN as error:
                self._warn(f"ignoring broken entries of {path}: {type(error).__name__}: {error}")
        return entries

    def _all(self) -> list[Entry]:
        return [entry for entries in self._entries.values() for entry in entries]

    def _decode(self, entry: Entry) -> Decision | None:
        """The entry's decision; one that is broken is dropped from the table."""
        try:
            return entry.decision()
        except BROKEN as error:
            self._warn(f"ignoring broken entries of {self.path or 'the decision table'}: {type(error).__name__}: {error}")
            rows = self._entries.get((entry.bucket, entry.policy), [])
            if entry in rows:
                rows.remove(entry)
            return None

    def _merge(self, entries: Iterable[Entry]) -> None:
        """The later decision of the same bucket, policy and host stays; software versions may differ."""
        for new in entries:
            rows = self._entries.setdefault((new.bucket, new.policy), [])
            old = next((row for row in rows if row.host == new.host), None)
            if old is None:
                rows.append(new)
            elif self._replaces(new, old):
                rows[rows.index(old)] = new

    def _replaces(self, new: Entry, old: Entry) -> bool:
        """Whether `new` is at least as late, or `old` is broken: a broken entry may claim any date."""
        if new.measured_at < old.measured_at:
            return _broken(old)
        return new.decided or (not old.decided and new.raw == old.raw) or not _broken(new)

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


def _broken(entry: Entry) -> bool:
    try:
        entry.decision()
    except BROKEN:
        return True
    return False


def _reason(error: OSError | ValueError) -> str:
    return f"cannot be read ({error.strerror or error})" if isinstance(error, OSError) else str(error)


def distance(measured: AttentionShape, asked: AttentionShape) -> float | None:
    """Doublings between two shapes that are alike in all but sizes; None if they are not."""
    # A decode's query tokens per request are built into kernels, so they are no size that may differ.
    q_len = measured.q_len if measured.absorbed else asked.q_len
    alike = replace(measured, batch=asked.batch, q_len=q_len, kv_len=asked.kv_len, ragged=asked.ragged, graph=asked.graph)
    if alike != asked:
        return None
    pairs = ((measured.batch, asked.batch), (measured.q_len, asked.q_len), (measured.kv_len, asked.kv_len))
    other = (4.0 if measured.ragged != asked.ragged else 0.0) + (0.5 if measured.graph != asked.graph else 0.0)
    return sum(abs(math.log2(a / b)) for a, b in pairs) + other


def _version(path: Path) -> tuple[int, int] | None:
    """Differs between two states of a file that is only ever replaced; None where there is none."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns


def _write_atomically(path: Path, data: bytes) -> None:
    """Through a file of its own in the same directory, so that a reader or a kill sees the old table or the new one.

    The lock is held, so any other such file is what a kill has left.
    """
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        left.unlink(missing_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
