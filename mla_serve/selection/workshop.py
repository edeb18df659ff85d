"""Where kernels are measured that nobody vouches for: one question at a time, under limits, and who breaks one is replaced."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
import weakref
from collections.abc import Callable

import msgspec
import torch

from mla_serve.selection import wire
from mla_serve.selection.decision import Verdict
from mla_serve.selection.timing import Effort
from mla_serve.selection.worker_process import WorkerError, WorkerProcess, how_it_ended

TURN = 0.1  # seconds between looks at a worker that says nothing
START_SECONDS = 180.0  # importing torch from a cold disk takes its time
KILL_SECONDS = 10.0  # from SIGKILL until a process counts as held by a driver
PRINTED = 16 << 20  # bytes that a candidate may print
SLACK = 1 << 30  # bytes of host memory beyond the limit that a library may hold on to before the child is killed


class Closed(Exception):
    """The Workshop was stopped from another thread. What was being measured is nobody's fault."""


class Lost(Exception):
    """The child is gone and with it the candidates it held. `verdict` and `reason` are the row of the one that ran."""

    def __init__(self, verdict: Verdict, reason: str) -> None:
        super().__init__(reason)
        self.verdict, self.reason = verdict, reason


class Workshop:
    """A worker for `device`, started when first asked something. `pause`, `resume` and `stop` may be called by any thread.

    `waiting` is called a few times a second while an answer is awaited. `spoiled` is set by a pause, for whoever was timing.
    """

    def __init__(self, device: torch.device, *, effort: Effort, clean_pool: bool) -> None:
        self._device, self._effort, self._clean_pool = str(device), effort, clean_pool
        self.waiting: Callable[[], None] = lambda: None
        self.spoiled = False
        self._lock = threading.Lock()  # of which processes there are, and of whether they are stopped
        self._process: WorkerProcess | None = None
        self._paused = self._stopped = False
        self._tail, self._printed, self._began = b"", 0, -1

    @property
    def alive(self) -> bool:
        """Whether the child that was asked last is still there, with all it holds."""
        process = self._process
        if process is None or process.child is None:
            return False
        if select.select([process.link], [], [], 0.0)[0]:  # it ended unasked: the next candidate is not to blame
            self.close()
            return False
        return True

    def ask(self, request: wire.ToWorker, *, seconds: float, memory: int | None = None) -> wire.FromWorker:
        """The child's answer. Raises Lost if it ends, or breaks a limit and is killed; Closed; WorkerError.

        `seconds` count from the question, or from the last run that was begun while timing, and not while paused. `memory` are
        bytes of host memory that the child may grow by.
        """
        process = self._process if self.alive else None
        if process is None:
            process = self._bear()
        base, self._printed = process.resident, 0
        process.send(request)
        return self._wait(process, seconds, None if memory is None else base + memory + SLACK)

    @property
    def running(self) -> int:
        """The number of the candidate whose run was begun last while timing."""
        return self._began

    def replace(self) -> None:
        """Ends the child; the next question goes to a fresh one."""
        process = self._process
        if process is not None and process.child is not None:
            with contextlib.suppress(Lost):
                self._kill(process, "crashed", "")

    def pause(self) -> None:
        """Stops the worker's processes where they are; limits of time stand still with them."""
        with self._lock:
            self._paused = self.spoiled = True
            if self._process is not None:
                self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        with self._lock:
            self._paused = False
            if self._process is not None:
                self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Kills the worker for good; who waits in `ask` gets Closed."""
        with self._lock:
            self._stopped = True
            if self._process is not None:
                self._process.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Kills the worker and frees what it held on to. The next question starts another one."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.end()

    def _wait(self, process: WorkerProcess, seconds: float, memory: int | None) -> wire.FromWorker:
        left, now, runs = seconds, time.monotonic(), process.board.read()[1]
        while True:
            answer = self._look(process)
            self._began, begun = process.board.read()
            if isinstance(answer, wire.Died):
                process.child = None
                raise Lost("crashed", f"{how_it_ended(answer.status)}{self._last_line()}")
            if answer is not None:
                return answer
            before, now = now, time.monotonic()
            left -= 0.0 if self._paused else now - before
            if begun != runs:
                runs, left = begun, seconds
            if self._printed > PRINTED:
                self._kill(process, "crashed", f"printed more than {PRINTED >> 20} MiB{self._last_line()}")
            if memory is not None and process.resident > memory:
                self._kill(process, "crashed", f"took more than {memory >> 20} MiB of host memory")
            if left <= 0:
                self._kill(process, "timed-out", f"did not return within {seconds:.3g} s")
            self.waiting()

    def _look(self, process: WorkerProcess) -> wire.FromWorker | None:
        """What has been said, after waiting for a turn at most. What was printed is taken too, or its pipe would fill."""
        if self._stopped:
            raise Closed
        link = process.link.fileno()
        ready, _, _ = select.select([link, process.output], [], [], TURN)
        if process.output in ready:
            printed = os.read(process.output, 1 << 20)
            self._printed += len(printed)
            self._tail = (self._tail + printed)[-2000:]
        if link in ready:
            try:
                answer = wire.receive_reply(process.link)
            except (OSError, msgspec.DecodeError):
                answer = None
            if answer is not None:
                return answer
            self.close()
            if self._stopped:
                raise Closed
            raise Lost("crashed", f"the measuring process was ended with it{self._last_line()}")
        return None

    def _kill(self, process: WorkerProcess, verdict: Verdict, reason: str) -> None:
        """Ends the child, waits until it is gone, and raises Lost."""
        with self._lock:
            process.signal_child(signal.SIGKILL)
        until = time.monotonic() + KILL_SECONDS
        while not isinstance(self._look(process), wire.Died):  # an answer that comes too late is none
            if time.monotonic() > until and not self._paused:
                self.close()  # not even SIGKILL ends it: a driver holds it
                break
        process.child = None
        raise Lost(verdict, reason)

    def _bear(self) -> WorkerProcess:
        """A process with a child that holds nothing. Raises WorkerError if there is none within minutes."""
        process = self._process
        if process is None or not process.running:
            self.close()
            with self._lock:
                if self._stopped:
                    raise Closed
                setup = wire.Setup(os.getpid(), self._device, self._effort, self._clean_pool)
                process = self._process = WorkerProcess.start(setup)
                if self._paused:
                    process.send_signal(signal.SIGSTOP)
            weakref.finalize(self, process.end)
        process.send(wire.Fork())
        try:
            answer = self._wait(process, START_SECONDS, None)
        except Lost as lost:
            self.close()
            raise WorkerError(f"the measuring process does not start: {lost.reason}") from lost
        assert isinstance(answer, wire.Born)
        with self._lock:
            process.child = answer.pid
            if self._paused:
                process.send_signal(signal.SIGSTOP)
        return process

    def _last_line(self) -> str:
        lines = self._tail.decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        self._tail = b""
        return f"; it printed: {last[:200]}" if last else ""
