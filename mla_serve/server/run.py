"""One server process from start to exit status: engine, socket, signals, drain, and the engine's death."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import resource
import signal
import socket
import sys
from collections.abc import Generator
from typing import Any

import uvicorn
import uvloop
from fastapi import FastAPI

from mla_serve.engine.base import Engine, EngineDeadError, Request, Sampling
from mla_serve.engine.embedded.config import ModelConfig
from mla_serve.engine.embedded.messages import EngineConfig
from mla_serve.engine.vllm import VllmConfig
from mla_serve.errors import UserError
from mla_serve.server.app import create_app
from mla_serve.server.banner import banner, start_record
from mla_serve.server.http import BoundedHttp
from mla_serve.server.settings import ServerSettings
from mla_serve.server.state import ServerState
from mla_serve.server.text import Tokenizer

log = logging.getLogger("mla_serve.server")

WATCH_INTERVAL = 0.25  # seconds between looks at the engine's health
FLUSH = 5  # seconds that finished answers get to reach their clients
KEEP_ALIVE = 75  # seconds that an idle connection stays open: longer than clients and proxies keep theirs
LAST_ANSWERS = 1.0  # seconds that requests get to end with an error once the engine has died


def serve(settings: ServerSettings) -> int:
    """Runs the server until a signal or the engine's death; returns the exit status (0 after a signal, 1 after a death).

    Raises UserError if the address is taken, or if the model cannot be served. Must be called in the main thread.
    """
    _log_to_stderr()
    _raise_file_limit()
    if isinstance(settings.engine, EngineConfig):
        ModelConfig.from_dir(settings.model_dir)  # a directory that is no model says so now, in the engine's words
    with contextlib.closing(_bind(settings)) as listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(settings, listener))


def _log_to_stderr() -> None:
    """Access lines are JSON on their own; everything else gets a time and a name."""
    for name, form in (("mla_serve.access", "%(message)s"), ("mla_serve", None), ("uvicorn.error", None)):
        logger = logging.getLogger(name)
        if not logger.handlers:
            handler = logging.StreamHandler(sys.stderr)
            handler.setFormatter(logging.Formatter(form or "%(asctime)s %(levelname)s %(name)s: %(message)s"))
            logger.addHandler(handler)
        logger.propagate = False
        logger.setLevel(logging.WARNING if name == "uvicorn.error" else logging.INFO)


def _bind(settings: ServerSettings) -> socket.socket:
    """Takes the address before the model is loaded, but does not listen yet: clients are refused until somebody can answer."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise _cannot_listen(settings, error) from error
    listener.setblocking(False)
    return listener


def _cannot_listen(settings: ServerSettings, error: OSError) -> UserError:
    return UserError(
        f"cannot listen on {settings.host} port {settings.port} ({error.strerror or error}); "
        "choose another port, or end the process that has it"
    )


def _raise_file_limit() -> None:
    """Each client is an open file, and the usual soft limit of 1,024 is soon reached; the hard one is ours to take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(65536, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _url(settings: ServerSettings, listener: socket.socket) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{listener.getsockname()[1]}"


async def start_engine(settings: ServerSettings) -> Engine:
    """The engine that the settings ask for, ready to take requests. Raises UserError if it cannot be started."""
    if isinstance(settings.engine, VllmConfig):
        from mla_serve.engine.vllm import VllmEngine

        return await VllmEngine.start(settings.engine)
    from mla_serve.engine.embedded.client import EmbeddedEngine

    try:
        return await EmbeddedEngine.start(settings.engine)
    except EngineDeadError as error:
        raise UserError(f"the engine did not start: {error}") from error


async def _warm_up(engine: Engine) -> None:
    """Two tokens, so that a first client waits for nothing and the kernels in force can be shown. Raises UserError."""
    prompt = [0] * max(1, min(32, engine.info.max_model_len - 2))
    sampling = Sampling(max_tokens=min(2, engine.info.max_model_len - len(prompt)), temperature=0.0, ignore_eos=True)
    try:
        async for step in engine.generate(Request("warm-up", prompt, sampling)):
            if step.finish_reason == "error":
                raise UserError(f"the engine cannot make a token: {step.error}")
    except EngineDeadError as error:
        raise UserError(f"the engine ended over its first tokens: {error}") from error


class UvicornServer(uvicorn.Server):
    """uvicorn without its own signal handlers, since a signal drains first; `listening` is set once it accepts connections."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class _Signals:
    """Counts SIGTERM and SIGINT: the first asks for a drain, the second ends it."""

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._received)

    def _received(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


async def _serve(settings: ServerSettings, listener: socket.socket) -> int:
    signals = _Signals()
    starting = asyncio.create_task(start_engine(settings))
    loading = asyncio.create_task(asyncio.to_thread(Tokenizer.load, settings.model_dir, settings.chat_template))
    stopped = asyncio.create_task(signals.first.wait())
    ready = asyncio.gather(starting, loading)
    try:
        both: list[asyncio.Future[Any]] = [ready, stopped]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            return 0
        engine, tokenizer = ready.result()
        await _warm_up(engine)
        return await _run(create_app(engine, settings, tokenizer), settings, listener, signals)
    finally:
        for task in (starting, loading, stopped):
            task.cancel()
        # `ready` too: a cancellation that nobody fetched from it would be logged as an error.
        found, *_ = await asyncio.gather(starting, loading, stopped, ready, return_exceptions=True)
        if not isinstance(found, BaseException):
            await found.shutdown()


async def _run(app: FastAPI, settings: ServerSettings, listener: socket.socket, signals: _Signals) -> int:
    """Answers requests until a signal or the engine's death; the exit status."""
    state: ServerState = app.state.server
    server = UvicornServer(
        uvicorn.Config(
            app, http=BoundedHttp, ws="none", lifespan="off", loop="none", log_config=None, access_log=False,
            timeout_keep_alive=KEEP_ALIVE,
            server_header=False, proxy_headers=False, timeout_graceful_shutdown=FLUSH,
        )
    )  # fmt: skip
    try:
        listener.listen(server.config.backlog)
    except OSError as error:  # another process had bound the same port while we loaded, and listened first
        raise _cannot_listen(settings, error) from error
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    death = asyncio.create_task(_watch(state))
    first, second = asyncio.create_task(signals.first.wait()), asyncio.create_task(signals.second.wait())
    try:
        await server.listening.wait()
        url, decisions = _url(settings, listener), await state.engine.decisions()
        started = (
            json.dumps(start_record(state, url, decisions)) + "\n" if settings.json_start else banner(state, url, decisions)
        )
        sys.stdout.write(started)
        sys.stdout.flush()
        await asyncio.wait({serving, death, first}, return_when=asyncio.FIRST_COMPLETED)
        if first.done():
            state.draining = True
            log.info("draining: %d open, up to %g s", state.open, settings.drain_timeout)
            await _idle(state, settings.drain_timeout, death, second)
        died = not (await state.engine.health()).alive
        if died:
            log.error("the engine has ended: %s", state.dead or (await state.unhealthy()))
            await _idle(state, LAST_ANSWERS)
            if not first.done():  # stay a moment, so that a health check can see why
                await asyncio.wait({first, serving}, timeout=settings.death_linger, return_when=asyncio.FIRST_COMPLETED)
        else:
            await state.engine.shutdown()  # whatever is still open now ends with an error
            await _idle(state, LAST_ANSWERS)
        server.should_exit = True
        await serving
        return int(died)
    finally:
        for task in (serving, death, first, second):
            task.cancel()
        await asyncio.gather(serving, death, first, second, return_exceptions=True)
        if state.tracing is not None:
            await asyncio.to_thread(state.tracing.shutdown)


async def _watch(state: ServerState) -> None:
    """Returns once the engine has died, and keeps the reason for those who ask."""
    while True:
        health = await state.engine.health()
        if not health.alive:
            state.dead = health.reason or "its process has ended"
            return
        await asyncio.sleep(WATCH_INTERVAL)


async def _idle(state: ServerState, seconds: float, *ends: asyncio.Task[Any]) -> None:
    """Waits until nothing is open, one of `ends` is done, or the time is up."""
    idle = asyncio.create_task(state.idle.wait())
    await asyncio.wait({idle, *ends}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    idle.cancel()
