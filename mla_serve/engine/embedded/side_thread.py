"""A thread beside the engine's loop for work that may take too long: such work is left behind, and the loop goes on."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

__all__ = ["Job", "SideThread", "TooBusy"]

T = TypeVar("T")


class TooBusy(Exception):
    """Too much work was left behind and still runs; nothing new is begun."""


class Job(Generic[T]):
    """One piece of work, given up once it has run for `limit` seconds (None: never). `seconds` of CPU are known when done."""

    def __init__(self, work: Callable[[], T], limit: float | None) -> None:
        self._work = work
        self._limit = limit
        self._begun: float | None = None
        self._value: T | None = None
        self._error: Exception | None = None
        self._finished = threading.Event()
        self.seconds = 0.0
        self.lost = False  # given up
        self.cancelled = False  # to be passed over if it has not begun

    @property
    def done(self) -> bool:
        return self._finished.is_set()

    @property
    def late(self) -> bool:
        begun = self._begun
        if begun is None or self._limit is None or self.done:
            return False
        return time.monotonic() - begun > self._limit

    def wait(self, seconds: float) -> bool:
        """Waits so long at most; whether it is done."""
        return self._finished.wait(seconds)

    def result(self) -> T:
        """What the work returned, of a job that is done. Raises what it raised."""
        assert self.done, "the work is not done"
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

    def run(self) -> None:
        self._begun, before = time.monotonic(), time.thread_time()
        try:
            self._value = self._work()
        except Exception as error:  # noqa: BLE001 - for whoever asks for the result
            self._error = error
        self.seconds = time.thread_time() - before
        self._finished.set()

    def fail(self, error: Exception) -> None:
        """Ends a job that was never begun."""
        self._error = error
        self._finished.set()


class SideThread:
    """Does jobs one after the other. It ends with the process; nobody waits for it.

    A job that is given up keeps its thread, since a thread cannot be stopped, and another takes over the line. Once more than
    `spare` threads are lost so, what is in line and whatever comes raises TooBusy, until one of them returns.
    """

    def __init__(self, name: str, *, spare: int) -> None:
        self._name = name
        self._left = spare
        self._line: queue.SimpleQueue[Job[Any]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._current: Job[Any] | None = None

    def submit(self, work: Callable[[], T], limit: float | None = None) -> Job[T]:
        job = Job(work, limit)
        self.give_up_late()
        with self._lock:
            if self._left < 0:
                job.fail(TooBusy())
                return job
            if self._thread is None:
                self._start()
            self._line.put(job)
        return job

    def finish(self, job: Job[T]) -> bool:
        """Waits until a job is done; False if it was given up."""
        while not job.wait(0.05) and not job.lost:
            self.give_up_late()
        return not job.lost

    def give_up_late(self) -> None:
        """To be called now and then while something is waited for: gives up what runs, if it is late."""
        with self._lock:
            if self._current is None or not self._current.late:
                return
            self._current.lost = True
            self._current, self._thread = None, None
            self._left -= 1
            if self._left >= 0:
                self._start()
            while self._left < 0 and not self._line.empty():
                self._line.get().fail(TooBusy())

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            job = self._line.get()
            if job.cancelled:
                continue
            with self._lock:
                self._current = job
            job.run()
            with self._lock:
                if job.lost:
                    self._left += 1
                    return
                self._current = None
