"""The measuring process as its parent holds it: how it is started, stopped, watched and ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import mla_serve
from mla_serve.selection import wire
from mla_serve.selection.measure import NotMeasured


class WorkerError(NotMeasured):
    """No measuring process can be had."""


@dataclass(slots=True)
class WorkerProcess:
    """`popen` is the process that forks, `child` the process id of the one that measures, None where there is none.

    `link` carries packets of `wire`, `output` all that either prints.
    """

    popen: subprocess.Popen[bytes]
    link: socket.socket
    board: wire.Board
    output: int
    child: int | None = None

    @classmethod
    def start(cls, setup: wire.Setup) -> WorkerProcess:
        """Starts the process that forks, in a session of its own. Raises WorkerError if the host refuses."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        page = os.memfd_create("mla-serve-board")
        os.ftruncate(page, wire.Board.SIZE)
        root = str(Path(mla_serve.__file__).parents[1])
        # Whatever can be imported here can be there. -P: the working directory is no place for modules.
        path = os.pathsep.join(dict.fromkeys([root, *filter(None, sys.path)]))
        command = [sys.executable, "-P", "-m", "mla_serve.selection.worker", str(theirs.fileno()), str(page)]
        try:
            with theirs:
                popen = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0,
                    pass_fds=(theirs.fileno(), page), env={**os.environ, "PYTHONPATH": path}, start_new_session=True,
                )  # fmt: skip
            assert popen.stdout is not None
            process = cls(popen, ours, wire.Board(page), popen.stdout.fileno())
        except OSError as error:
            ours.close()
            raise WorkerError(f"no process can be started to measure in ({error.strerror or error})") from error
        finally:
            os.close(page)
        process.send(setup)
        return process

    def send(self, message: wire.ToWorker) -> None:
        """To a process that has ended nothing is sent; who waits for its answer learns of that."""
        with contextlib.suppress(BrokenPipeError, ConnectionError):
            wire.send(self.link, message)

    @property
    def running(self) -> bool:
        return self.popen.poll() is None

    @property
    def resident(self) -> int:
        """Bytes of host memory that the child uses; 0 for one that is gone."""
        try:
            return int(Path(f"/proc/{self.child}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError):
            return 0

    def send_signal(self, number: signal.Signals) -> None:
        """To both processes and what they have started."""
        if self.running:
            self.signal_child(number)
            _signal_group(self.popen.pid, number)

    def signal_child(self, number: signal.Signals) -> None:
        if self.child is not None:
            _signal_group(self.child, number)

    def end(self) -> None:
        """Leaves nothing of it; may be called again."""
        if self.popen.returncode is None:
            self.send_signal(signal.SIGKILL)
            self.popen.wait()
        assert self.popen.stdout is not None
        self.popen.stdout.close()
        self.link.close()
        self.board.close()


def how_it_ended(status: int) -> str:
    """An exit status in words; a negative one is a signal's."""
    if status >= 0:
        return f"ended its process with exit status {status}"
    hint = ", perhaps by a host out of memory" if status == -signal.SIGKILL else ""
    return f"its process was ended by signal {-status}, {signal.strsignal(-status)}{hint}"


def _signal_group(leader: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)
