"""Who measures which bucket: probers that share a table file split the work, and what one has begun the others wait for.

A claim is a lock on one byte of a file beside the table, the byte being the bucket's hash. The kernel drops it when its holder
ends, however that happens, so no claim outlives its prober. Where such locks cannot be had (a read-only directory, some network
file systems) everybody claims everything, which costs time and harms nobody.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mla_serve.shapes import Bucket

PATIENCE = 30.0  # seconds to wait for another process: one that probes beside a busy engine may be stopped in the middle
_POLL = 0.05  # seconds between two tries to get what another process holds
_TAKEN = (errno.EAGAIN, errno.EACCES)


class Claims:
    """Claims on the buckets of the table at `path`; None: a table in memory, which nobody shares.

    `waiting` is called again and again while another process's claim is awaited.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = None if path is None else Path(f"{path}.claims")
        self.waiting: Callable[[], None] = lambda: None

    @contextmanager
    def claim(self, bucket: Bucket, *, wait: bool, until: float | None = None) -> Iterator[bool]:
        """Holds the claim on `bucket` inside the block and yields True; False if another process holds it.

        `wait` waits for that one to give it up, but not longer than PATIENCE and not past `until` (of `time.monotonic`).
        """
        last = min(time.monotonic() + PATIENCE, float("inf") if until is None else until)
        file = self._open()
        try:
            ours = file is None
            while file is not None and not (ours := _lock(file, zlib.crc32(str(bucket).encode()))):
                if not wait or time.monotonic() >= last:
                    break
                self.waiting()
                time.sleep(_POLL)
            yield ours
        finally:
            if file is not None:
                os.close(file)  # and with it the lock

    def _open(self) -> int | None:
        if self._path is None:
            return None
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError:
            return None


def _lock(file: int, at: int) -> bool:
    """Locks one byte for this open file (not for this process, whose other threads are rivals too). False if it is taken."""
    wanted = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, at, 1, 0)  # struct flock of 64-bit Linux
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, wanted)
    except OSError as error:
        return error.errno not in _TAKEN
    return True
