"""One entry of a decision table, decoded only as far as it is asked for: a file of 500 decisions loads in milliseconds."""

from __future__ import annotations

import json
from collections.abc import Iterable

import msgspec

from mla_serve.selection.decision import Decision, Policy
from mla_serve.selection.fingerprint import Fingerprint
from mla_serve.shapes import AttentionShape, Bucket

BROKEN = (KeyError, TypeError, ValueError, AttributeError, RecursionError, msgspec.MsgspecError)
"""What an entry that is no decision raises."""

Host = tuple[str, int | None, str | None, int | None]
"""What makes two hosts one as far as their figures go; software versions may differ."""


class _Host(msgspec.Struct):
    device: str
    sm_count: int | None = None
    capability: str | None = None
    threads: int | None = None


class _Head(msgspec.Struct):
    """What a table needs of an entry to file it."""

    bucket: AttentionShape
    policy: Policy
    fingerprint: _Host
    measured_at: str | None = None


_HEAD = msgspec.json.Decoder(_Head)


class Entry:
    """A Decision, or the JSON of one together with what files it: bucket, policy, host and time (UTC, ISO 8601)."""

    __slots__ = ("_decision", "_raw", "bucket", "host", "measured_at", "policy")

    def __init__(
        self, bucket: Bucket, policy: Policy, host: Host, measured_at: str | None, raw: bytes | None, decision: Decision | None
    ) -> None:
        self.bucket, self.policy, self.host, self.measured_at = bucket, policy, host, measured_at or ""
        self._raw, self._decision = raw, decision

    @classmethod
    def of(cls, decision: Decision) -> Entry:
        host = host_of(decision.fingerprint)
        return cls(decision.bucket, decision.policy, host, decision.measured_at, None, decision)

    @classmethod
    def read(cls, raw: bytes) -> Entry:
        """From a decision's JSON, of which the candidates stay unread. Raises one of `BROKEN` for what cannot be filed."""
        head = _HEAD.decode(raw)
        if min(head.bucket.batch, head.bucket.q_len, head.bucket.kv_len) < 1:
            raise ValueError("sizes that are no bucket's")
        return cls(Bucket(head.bucket), head.policy, host_of(head.fingerprint), head.measured_at, raw, None)

    @property
    def decided(self) -> bool:
        """Whether the decision has been decoded, and so is known to be whole."""
        return self._decision is not None

    @property
    def raw(self) -> bytes:
        """The decision's JSON."""
        if self._raw is None:
            assert self._decision is not None
            text = json.dumps(self._decision.to_json(), ensure_ascii=False)
            self._raw = text.encode(errors="replace")  # a file's name in a reason may hold half a surrogate pair
        return self._raw

    def decision(self) -> Decision:
        """Raises one of `BROKEN` if the JSON is no decision after all."""
        if self._decision is None:
            self._decision = Decision.from_json(json.loads(self.raw))
        return self._decision


def host_of(of: Fingerprint | _Host) -> Host:
    """The device and, on a CPU, its threads."""
    return of.device, of.sm_count, of.capability, of.threads


class _File(msgspec.Struct):
    schema: int
    decisions: list[msgspec.Raw]


_FILE = msgspec.json.Decoder(_File)


def split(data: bytes, schema: int) -> list[bytes] | None:
    """The entries of a table file, undecoded; None for valid JSON that is no table of this schema.

    Raises msgspec.DecodeError or RecursionError for what is no JSON.
    """
    try:
        file = _FILE.decode(data)
    except msgspec.ValidationError:
        return None
    return [bytes(entry) for entry in file.decisions] if file.schema == schema else None


def join(entries: Iterable[Entry], schema: int) -> bytes:
    """A table file that holds `entries`, a line each, so that versions of it can be compared."""
    return b'{"schema": %d, "decisions": [\n' % schema + b",\n".join(entry.raw for entry in entries) + b"\n]}\n"
