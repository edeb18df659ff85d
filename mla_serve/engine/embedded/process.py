"""The engine's process: loads a model, then turns the loop of receiving, computing one step, sending.

Started by the client as `python -m mla_serve.engine.embedded.process`, with a Launch as JSON on standard input. That pipe stays
open for as long as the parent lives; its end is this process's end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

import msgspec
import zmq

from mla_serve.engine.base import Stats, Step
from mla_serve.engine.embedded import messages as m
from mla_serve.errors import UserError

if TYPE_CHECKING:
    from mla_serve.engine.embedded.core import EngineCore

logger = logging.getLogger("mla_serve.engine")

HEARTBEAT = 0.5  # seconds between messages of an idle engine
RETRY = 0.01  # seconds until a full socket is tried again
COMPILING = 0.001  # seconds between looks at grammars that are being compiled
UNSENT = 64  # messages that wait in the socket before Steps are merged here


class Link:
    """The child's end of the socket. Sending never blocks: what the server does not take yet is kept, merged per request."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._replies: list[bytes] = []
        self._steps: dict[str, Step] = {}
        self._stats: Stats | None = None

    @property
    def full(self) -> bool:
        return self._stats is not None or bool(self._replies)

    def reply(self, message: m.ToServer) -> None:
        self._replies.append(m.encode(message))

    def turn(self, steps: list[Step], stats: Stats) -> None:
        for step in steps:
            earlier = self._steps.get(step.id)
            self._steps[step.id] = step if earlier is None else m.merge(earlier, step)
        self._stats = stats

    def flush(self) -> None:
        """Sends what the socket takes; the rest stays for the next call."""
        try:
            while self._replies:
                self._socket.send(self._replies[0], zmq.DONTWAIT)
                del self._replies[0]
            if self._stats is not None:
                self._socket.send(m.encode(m.Turn(list(self._steps.values()), self._stats)), zmq.DONTWAIT)
                self._steps, self._stats = {}, None
        except zmq.Again:
            return

    def receive(self, seconds: float) -> list[m.ToEngine]:
        """Everything that has arrived, after waiting for the first message for so long at most."""
        received: list[m.ToEngine] = []
        if self._socket.poll(int(seconds * 1000)):
            while self._socket.poll(0):
                received.append(m.decode_to_engine(self._socket.recv()))
        return received


def serve(core: EngineCore, link: Link) -> None:
    """Turns the loop until told to stop. Raises what `core.step` raises."""

    def beat() -> None:
        """While a kernel is measured in the middle of a step, so that the engine does not count as hung."""
        link.turn([], core.stats())
        link.flush()

    beaten = time.monotonic()

    def progress() -> None:
        """After each layer: a long step is no hung one, as long as its layers end."""
        nonlocal beaten
        if (now := time.monotonic()) - beaten >= HEARTBEAT:
            beaten = now
            beat()

    core.runner.progress = progress
    if core.prober is None:  # that one waits on a thread of its own
        core.measurer.waiting = beat
    while True:
        ended: list[Step] = []
        patience = COMPILING if core.compiling else RETRY if link.full else HEARTBEAT
        for message in link.receive(0 if core.has_work else patience):
            match message:
                case m.Add(request):
                    try:
                        core.add(request)
                    except ValueError as error:
                        link.reply(m.Refused(request.id, str(error)))
                case m.Abort(id):
                    step = core.abort(id)
                    ended += [step] if step else []
                case m.AskDecisions(number):
                    link.reply(m.Decisions(number, core.decisions()))
                case m.Stop():
                    core.close()
                    return
        for id, reason in core.take_compiled().items():
            link.reply(m.Refused(id, reason))
        steps: list[Step] = []
        if core.has_work:
            steps = core.step()
        elif not core.compiling:
            core.rest()
        link.turn(ended + steps, core.stats())
        link.flush()


def load(config: m.EngineConfig) -> EngineCore:
    """Builds the core and says on standard error how that goes. Raises UserError."""
    started = time.monotonic()
    import torch  # after the signals and the watch are set: importing it takes seconds

    from mla_serve.engine.embedded.core import EngineCore
    from mla_serve.engine.embedded.threads import available_threads

    threads = config.threads or available_threads()
    torch.set_num_threads(threads)
    logger.info("loading %s with %d CPU threads", config.model, threads)
    core = EngineCore(config)
    pages, info = core.scheduler.pages, core.info
    logger.info(
        "loaded in %.1f s: %s on %s, %d pages of %d tokens, at most %d tokens a request",
        time.monotonic() - started, info.dtype, info.device, pages.num_pages, pages.page_size, info.max_model_len,
    )  # fmt: skip
    return core


def watch(pipe: int, parent: int) -> None:
    """Ends this process at once when the parent has: its end of the pipe closes, or we have another parent."""
    while os.getppid() == parent:
        readable, _, _ = select.select([pipe], [], [], 1.0)
        if readable and not os.read(pipe, 1):
            break
    os._exit(1)


def main() -> int:
    """Exit status: 0 after Stop, 1 otherwise."""
    # A terminal's Ctrl-C and a supervisor's SIGTERM reach the whole group; the parent drains, then sends Stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    line = sys.stdin.buffer.readline()
    if not line:
        return 1
    launch = msgspec.json.decode(line, type=m.Launch)
    threading.Thread(target=watch, args=(sys.stdin.fileno(), launch.parent), daemon=True).start()
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="mla-serve engine: %(message)s")
    logging.getLogger("mla_serve").setLevel(logging.INFO)

    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.set(zmq.SNDHWM, UNSENT)
    socket.set(zmq.LINGER, 2000)
    socket.connect(launch.address)
    try:
        core = load(launch.config)
        socket.send(m.encode(m.Ready(core.info, core.stats())))
        serve(core, Link(socket))
        status = 0
    except UserError as error:
        socket.send(m.encode(m.Failed(str(error))))
        status = 1
    except BaseException as error:
        logger.exception("the engine ends")
        socket.set(zmq.SNDTIMEO, 1000)
        with contextlib.suppress(zmq.Again):
            socket.send(m.encode(m.Dying(f"{type(error).__name__}: {error}")))
        status = 1
    socket.close()
    context.term()
    sys.stderr.flush()
    # No teardown of libraries: after a fault of the accelerator it may hang, and streams would wait for us.
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
