"""The server's side of the embedded engine: starts its process, sends requests, hands out Steps as they come."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

import mla_serve
from mla_serve.engine.base import EngineDeadError, EngineInfo, Health, Request, Stats, Step
from mla_serve.engine.embedded import messages as m
from mla_serve.engine.embedded.limits import check_request
from mla_serve.errors import UserError

__all__ = ["EmbeddedEngine"]

logger = logging.getLogger(__name__)

WATCH = 0.1  # seconds between looks at a process that says nothing
GRACE = 5.0  # seconds from Stop to SIGKILL
COMMAND = (sys.executable, "-P", "-m", "mla_serve.engine.embedded.process")  # -P: the working directory is no place for modules


class EmbeddedEngine:
    """An engine process, as the Engine protocol has it. Build one with `start`; every call belongs on that event loop."""

    def __init__(self, child: _Child, ready: m.Ready) -> None:
        self.info: EngineInfo = ready.info
        self._child = child
        self._stats = ready.stats
        self._heard = asyncio.get_running_loop().time()
        self._mail: dict[str, _Mailbox] = {}  # requests whose last message is still to come
        self._asked: dict[int, asyncio.Future[list[dict[str, Any]]]] = {}
        self._numbers = itertools.count()
        self._death: str | None = None
        self._stopping = False
        self._listener = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, config: m.EngineConfig) -> EmbeddedEngine:
        """Spawns the process and waits until the model is loaded.

        Raises UserError with the child's one sentence if the model cannot be served as `config` asks, and EngineDeadError if
        the process ends for another reason.
        """
        child = _Child(config)
        try:
            return cls(child, await child.ready())
        except BaseException:
            child.close()
            raise

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._child.process.pid

    def generate(self, request: Request) -> AsyncGenerator[Step, None]:
        """See Engine.generate; ValueError is raised by this call itself, before anything is iterated."""
        check_request(request, self.info)
        return self._stream(request)

    async def abort(self, request_id: str) -> None:
        if request_id in self._mail:
            await self._child.send(m.Abort(request_id))

    async def stats(self) -> Stats:
        """As of the engine's last turn, at most half a second ago while it is idle."""
        return self._stats

    async def decisions(self) -> list[dict[str, Any]]:
        """Answered between two steps. Raises EngineDeadError."""
        self._require_life()
        number = next(self._numbers)
        self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            await self._child.send(m.AskDecisions(number))
            return await self._asked[number]
        finally:
            del self._asked[number]

    async def health(self) -> Health:
        age = asyncio.get_running_loop().time() - self._heard
        reason = self._death or self._child.ended()
        return Health(alive=reason is None, heartbeat_age=age, reason=reason)

    async def shutdown(self) -> None:
        """Ends the process, by SIGKILL if it does not stop within seconds; streams still open raise EngineDeadError."""
        self._stopping = True
        await self._child.send(m.Stop())
        await asyncio.wait([self._listener], timeout=GRACE)
        self._child.kill()
        await asyncio.wait([self._listener])
        self._child.close()

    async def _stream(self, request: Request) -> AsyncGenerator[Step, None]:
        self._require_life()
        if request.id in self._mail:
            raise ValueError(f"a request with the id {request.id!r} is running; give each its own")
        mailbox = self._mail[request.id] = _Mailbox()
        try:
            await self._child.send(m.Add(request))
            while True:
                step = await mailbox.take()
                yield step
                if step.finish_reason is not None:
                    return
        finally:
            # The entry stays until the engine has said its last word on this request, so that the id is not reused too early.
            if self._mail.get(request.id) is mailbox:
                await self._child.send(m.Abort(request.id))

    async def _listen(self) -> None:
        """The one reader: hands messages on until the process has ended and nothing of it is left to read."""
        try:
            while (message := await self._child.receive()) is not None:
                self._heard = asyncio.get_running_loop().time()
                self._take(message)
        except Exception as error:
            logger.exception("what the engine process says makes no sense; it is killed")
            self._child.last_words = f"it sent what cannot be understood ({error})"
            self._child.kill()
        self._bury(await self._child.wait())

    def _take(self, message: m.ToServer) -> None:
        match message:
            case m.Turn(steps, stats):
                self._stats = stats
                for step in steps:
                    mailbox = self._mail[step.id] if step.finish_reason is None else self._mail.pop(step.id)
                    mailbox.put(step)
            case m.Refused(id, reason):
                self._mail.pop(id).fail(ValueError(reason))
            case m.Decisions(number, decisions):
                if number in self._asked and not self._asked[number].done():
                    self._asked[number].set_result(decisions)
            case m.Dying(reason):
                self._child.last_words = reason

    def _bury(self, reason: str) -> None:
        """Everything that waits for the engine learns that it is dead."""
        self._death = "the engine was shut down" if self._stopping else reason
        for mailbox in self._mail.values():
            mailbox.fail(EngineDeadError(self._death))
        self._mail.clear()
        for future in self._asked.values():
            if not future.done():
                future.set_exception(EngineDeadError(self._death))

    def _require_life(self) -> None:
        if self._death is not None:
            raise EngineDeadError(self._death)


class _Mailbox:
    """What one request's reader has not fetched yet: one Step at most, since later ones are merged into it."""

    def __init__(self) -> None:
        self._step: Step | None = None
        self._error: Exception | None = None
        self._filled = asyncio.Event()

    def put(self, step: Step) -> None:
        self._step = step if self._step is None else m.merge(self._step, step)
        self._filled.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._filled.set()

    async def take(self) -> Step:
        """Waits for news; what came before an error is delivered before it."""
        await self._filled.wait()
        if self._step is None:
            assert self._error is not None
            raise self._error
        step, self._step = self._step, None
        if self._error is None:
            self._filled.clear()
        return step


class _Child:
    """The process, its socket and the private directory in which the two met."""

    def __init__(self, config: m.EngineConfig) -> None:
        self.last_words: str | None = None
        self._directory = Path(tempfile.mkdtemp(prefix="mla-serve-"))  # mode 0700: no other user may talk to the engine
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.SNDHWM, 0)  # the server bounds its queue; a full socket would only move it
        path = self._directory / "engine"
        try:
            if len(os.fsencode(path)) > zmq.IPC_PATH_MAX_LEN:
                raise UserError(f"the path {path} is too long for a socket; set TMPDIR to a shorter one")
            self._socket.bind(f"ipc://{path}")
            self.process = _spawn(m.Launch(f"ipc://{path}", os.getpid(), config))
        except BaseException:
            self._socket.close()
            self._context.term()
            shutil.rmtree(self._directory, ignore_errors=True)
            raise

    async def ready(self) -> m.Ready:
        """Waits for the model; see EmbeddedEngine.start."""
        while True:
            match await self.receive():
                case m.Ready() as ready:
                    # The connection stands, and its name is needed no more: not even SIGKILL leaves a directory behind now.
                    shutil.rmtree(self._directory, ignore_errors=True)
                    return ready
                case m.Failed(reason):
                    raise UserError(reason)
                case m.Dying(reason):
                    self.last_words = reason
                case None:
                    raise EngineDeadError(f"{self.ended()}, while loading")

    async def send(self, message: m.ToEngine) -> None:
        """Sends without waiting. A dead engine takes nothing; its listener tells everyone."""
        try:
            await self._socket.send(m.encode(message), zmq.DONTWAIT)
        except zmq.ZMQError:
            logger.debug("not delivered to the engine: %s", type(message).__name__)

    async def receive(self) -> m.ToServer | None:
        """The next message; None once the process has ended and all is read."""
        while True:
            ended = self.ended()
            if await self._socket.poll(int(WATCH * 1000)):
                return m.decode_to_server(await self._socket.recv())
            if ended is not None:
                return None

    def ended(self) -> str | None:
        """How the process ended, or None while it runs."""
        status = self.process.poll()
        if status is None:
            return None
        how = f"ended with exit status {status}"
        if status < 0:
            how = f"was ended by signal {-status}, {signal.strsignal(-status)} (exit status {status})"
        if self.last_words:
            return f"the engine process {how}: {self.last_words}"
        memory = "; perhaps the host ran out of memory" if status == -signal.SIGKILL else ""
        return f"the engine process {how}{memory}"

    async def wait(self) -> str:
        """Waits until the process has ended, and says how."""
        await asyncio.to_thread(self.process.wait)
        return self.ended() or ""

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()

    def close(self) -> None:
        """Kills what is left and removes every trace; safe to call twice."""
        self.kill()
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self._socket.close()
        self._context.term()
        shutil.rmtree(self._directory, ignore_errors=True)


def _spawn(launch: m.Launch) -> subprocess.Popen[bytes]:
    """A fresh interpreter that finds the same package. Its standard output is our standard error: ours may carry JSON."""
    root = str(Path(mla_serve.__file__).parents[1])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        COMMAND,
        stdin=subprocess.PIPE,
        stdout=2,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert process.stdin is not None
    try:
        process.stdin.write(msgspec.json.encode(launch) + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        logger.debug("the engine process ended at once")  # whoever waits for it says how
    return process
