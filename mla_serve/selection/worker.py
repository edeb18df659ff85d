"""The process that measures: whatever a kernel does to it, nobody else is harmed.

Started by `workshop.Workshop` as `python -m mla_serve.selection.worker SOCKET BOARD`, two open descriptors. It imports torch
once and then only forks: each child serves requests until it ends or is killed, and the next one is there within milliseconds.
The process that forks never touches a device and starts no threads, so that a child is as good as fresh.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import signal
import socket
import sys
import traceback
import warnings
from importlib import import_module

import torch

from mla_serve.backends.base import Backend
from mla_serve.backends.padded import Padded
from mla_serve.backends.registry import load_backends
from mla_serve.errors import UserError
from mla_serve.selection import timing, wire
from mla_serve.selection.candidates import Candidate
from mla_serve.selection.decision import CandidateResult
from mla_serve.selection.floor import Rates
from mla_serve.selection.gate import describe
from mla_serve.selection.measure import Bench, TooLarge

_PR_SET_PDEATHSIG = 1


class Child:
    """Answers requests, one at a time. An exception is a row; what ends this process is told by who forked it."""

    def __init__(self, link: socket.socket, board: wire.Board, setup: wire.Setup) -> None:
        self._link, self._board, self._setup = link, board, setup
        self._device = torch.device(setup.device)
        self._bench: Bench | None = None
        self._backends: dict[str, Backend] = {}
        self._measure: timing.Measure | None = None
        self._rates = Rates.of(self._device)
        self._runs = board.read()[1]
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)  # the other half is for those that serve meanwhile
            torch.cuda.set_per_process_memory_fraction(0.5 * free / total, self._device.index or 0)

    @torch.inference_mode()
    def serve(self) -> None:
        """Until the parent is gone."""
        wire.send(self._link, wire.Born(os.getpid()))
        while (request := wire.receive_request(self._link)) is not None:
            wire.send(self._link, self._answer(request))

    def _answer(self, request: wire.ToWorker) -> wire.FromWorker:
        match request:
            case wire.Open():
                return self._open(request)
            case wire.Qualify():
                row, ready = self._qualify(request)
                return wire.Qualified(row, ready)
            case wire.Time(rows):
                assert self._bench is not None
                return wire.Timed(self._bench.time(rows, self._announced, self._setup.effort))
            case wire.AskRates(shape):
                self._bench = None
                gc.collect()
                try:
                    self._rates.floor_ms(shape)
                except RuntimeError as error:  # a large product or copy may not fit into memory
                    return wire.Problem(describe(error))
                return wire.Rates(self._rates.arithmetic[shape.dtype], self._rates.memory)
            case _:
                return wire.Problem(f"{type(request).__name__} is no request to a child")

    def _open(self, request: wire.Open) -> wire.FromWorker:
        self._bench = None
        gc.collect()
        torch.set_num_threads(request.threads)
        if self._device.type == "cpu":  # with CUDA the limit would count address space that its driver only reserves
            _limit_memory(request.memory)
        try:
            self._bench = Bench(request.shape, self._device, clean_pool=self._setup.clean_pool)
        except TooLarge as error:
            return wire.Problem(str(error), too_large=True)
        except (RuntimeError, MemoryError) as error:
            return wire.Problem(f"the inputs could not be made: {describe(error)}")
        return wire.Opened()

    def _qualify(self, request: wire.Qualify) -> tuple[CandidateResult, bool]:
        assert self._bench is not None
        try:
            backend = self._backend(request.backend, request.path)
        except Exception as error:  # noqa: BLE001  foreign code may raise anything; the reason is kept
            reason = f"the measuring process cannot load it: {describe(error)}"
            return CandidateResult(request.backend, request.padding, "unsupported", reason), False
        form = Padded(backend, request.padding) if request.padding else backend
        row = self._bench.qualify(request.number, Candidate(form, request.padding), gate=request.gate)
        ready = request.number in self._bench.trials
        if not ready and self._device.type == "cuda":
            try:
                torch.cuda.synchronize(self._device)
            except RuntimeError as error:  # it has spoilt the CUDA context for all that come after it
                return CandidateResult(row.backend, row.padding, "crashed", f"left CUDA in error: {describe(error)}"), False
        return row, ready

    def _backend(self, name: str, path: str | None) -> Backend:
        if name not in self._backends:
            if path is None:
                self._backends[name] = load_backends(self._device, only={name})[0]
            else:
                module, _, qualified = path.partition(":")
                made = import_module(module)
                for part in qualified.split("."):
                    made = getattr(made, part)
                backend = made(self._device)  # type: ignore[operator]
                if not isinstance(backend, Backend):
                    raise UserError(f"{path} is no Backend")
                self._backends[name] = backend
        return self._backends[name]

    def _announced(self, trial: timing.Trial, part: timing.Part) -> float:
        """The device's clock, having told the parent whose turn it is."""
        assert self._bench is not None
        if self._measure is None:
            self._measure = timing.clock(self._device)
        number = next(number for number, known in self._bench.trials.items() if known is trial)
        self._runs += 1
        self._board.write(number, self._runs)
        try:
            return self._measure(trial, part)
        except torch.AcceleratorError as error:  # all later calls of this process would fail with it
            sys.exit(f"{describe(error)}, while it was timed")


def _limit_memory(more: int) -> None:
    """Lets this process allocate so many more bytes. Only the soft limit is set, so that the next bucket may raise it."""
    with open("/proc/self/statm") as file:
        data = int(file.read().split()[5]) * resource.getpagesize()  # what RLIMIT_DATA counts, Linux 4.7
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = data + more if hard == resource.RLIM_INFINITY else min(data + more, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _die_with(parent: int) -> None:
    """The kernel kills this process when `parent` ends, also while it hangs or is stopped."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _live(link: socket.socket, board: wire.Board, setup: wire.Setup, parent: int) -> int:
    """A child's life; its exit status."""
    os.setpgid(0, 0)  # a group of its own: it is stopped and killed with whatever it starts
    _die_with(parent)
    try:
        Child(link, board, setup).serve()
    except SystemExit as error:
        if isinstance(error.code, int | None):
            return error.code or 0
        sys.stderr.write(f"{error.code}\n")
        sys.stderr.flush()
        return 1
    except BaseException:  # noqa: BLE001  the last lines of what is printed here are the reason that the parent gives
        traceback.print_exc()
        sys.stderr.flush()
        return 1
    return 0


def main() -> int:
    link = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(link.fileno(), False)
    board = wire.Board(int(sys.argv[2]))
    os.close(int(sys.argv[2]))
    setup = wire.receive_request(link)
    if not isinstance(setup, wire.Setup):
        return 1
    _die_with(setup.parent)
    # Threads that a BLAS library starts when it is imported know of forks.
    warnings.filterwarnings("ignore", "This process.*is multi-threaded", DeprecationWarning)
    gc.freeze()
    me = os.getpid()
    while True:
        while not isinstance(request := wire.receive_request(link), wire.Fork):
            if request is None:
                return 0
        child = os.fork()
        if child == 0:
            os._exit(_live(link, board, setup, me) & 0xFF)
        _, status = os.waitpid(child, 0)
        wire.send(link, wire.Died(os.waitstatus_to_exitcode(status)))


if __name__ == "__main__":
    sys.exit(main())
