"""What a Workshop and its worker say to each other: msgspec structs, one per packet of a socket that keeps their borders."""

from __future__ import annotations

import mmap
import socket
import struct

import msgspec

from mla_serve.backends.padded import Padding
from mla_serve.selection.decision import CandidateResult
from mla_serve.selection.timing import Effort
from mla_serve.shapes import AttentionShape

_PACKET = 1 << 20


class Setup(msgspec.Struct, frozen=True, tag=True):
    """The first message. `parent` is the process id that the worker must not outlive."""

    parent: int
    device: str
    effort: Effort
    clean_pool: bool


class Fork(msgspec.Struct, frozen=True, tag=True):
    """Start a fresh child; answered by Born. What was sent to an earlier one is void."""


class Open(msgspec.Struct, frozen=True, tag=True):
    """Make the inputs of a bucket; answered by Opened or Problem. `memory` more bytes the child may allocate on the host."""

    shape: AttentionShape
    threads: int
    memory: int


class Qualify(msgspec.Struct, frozen=True, tag=True):
    """Put one candidate through the gate; answered by Qualified. See `measure.Bench.qualify`.

    `path` "module:Class" says where the backend is, None that the registry knows it by `backend`.
    """

    number: int
    backend: str
    path: str | None
    padding: Padding | None
    gate: bool


class Time(msgspec.Struct, frozen=True, tag=True):
    """Time the candidates of these numbers in turn; answered by Timed."""

    rows: dict[int, CandidateResult]


class AskRates(msgspec.Struct, frozen=True, tag=True):
    """Measure the device; answered by Rates or Problem."""

    shape: AttentionShape


class Born(msgspec.Struct, frozen=True, tag=True):
    pid: int


class Opened(msgspec.Struct, frozen=True, tag=True):
    pass


class Qualified(msgspec.Struct, frozen=True, tag=True):
    """`ready`: the candidate may be timed."""

    row: CandidateResult
    ready: bool


class Timed(msgspec.Struct, frozen=True, tag=True):
    rows: dict[int, CandidateResult]


class Rates(msgspec.Struct, frozen=True, tag=True):
    """Of the asked dtype: FLOP per ms, and bytes per ms. See `floor.Rates`."""

    arithmetic: float
    memory: float


class Problem(msgspec.Struct, frozen=True, tag=True):
    """The request itself cannot be served, whichever the candidate. `too_large`: it does not fit into memory."""

    reason: str
    too_large: bool = False


class Died(msgspec.Struct, frozen=True, tag=True):
    """The child has ended; a negative status is a signal's."""

    status: int


ToWorker = Setup | Fork | Open | Qualify | Time | AskRates
FromWorker = Born | Opened | Qualified | Timed | Rates | Problem | Died

_encode = msgspec.msgpack.Encoder().encode
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)


def send(link: socket.socket, message: ToWorker | FromWorker) -> None:
    """Raises OSError if nobody is there to read it."""
    link.send(_encode(message))


def receive_request(link: socket.socket) -> ToWorker | None:
    """The next request; None once the parent is gone."""
    data = link.recv(_PACKET)
    return _to_worker.decode(data) if data else None


def receive_reply(link: socket.socket) -> FromWorker | None:
    """The next reply; None once the worker is gone. Raises msgspec.DecodeError for what makes no sense."""
    data = link.recv(_PACKET)
    return _from_worker.decode(data) if data else None


class Board:
    """A page of shared memory that says which candidate is being timed, so that saying it costs no system call."""

    SIZE = 16

    def __init__(self, file: int) -> None:
        """`file` is a descriptor of at least SIZE bytes."""
        self._page = mmap.mmap(file, self.SIZE)

    def write(self, number: int, count: int) -> None:
        struct.pack_into("qq", self._page, 0, number, count)

    def read(self) -> tuple[int, int]:
        """The candidate's number, and how many runs were begun."""
        number, count = struct.unpack_from("qq", self._page, 0)
        return number, count

    def close(self) -> None:
        self._page.close()
