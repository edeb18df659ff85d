"""The engine in its own process: streams, aborts, slow readers, and every way in which one side can end."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import aclosing
from types import SimpleNamespace

import msgspec
import psutil
import pytest
import zmq

from mla_serve.engine.base import EngineDeadError, Request, Sampling, Stats, Step, TokenLogprobs
from mla_serve.engine.embedded import EmbeddedEngine, client, process
from mla_serve.engine.embedded import messages as m
from mla_serve.engine.embedded.core import EngineCore
from mla_serve.engine.embedded.process import Link
from mla_serve.engine.embedded.threads import available_threads
from mla_serve.errors import UserError

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")


def request(name, prompt=(5, 6, 7), max_tokens=20, **sampling):
    return Request(
        name, list(prompt), Sampling(**{"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True} | sampling)
    )


async def collect(engine, asked):
    steps = [step async for step in engine.generate(asked)]
    assert [step.finish_reason for step in steps[:-1]] == [None] * (len(steps) - 1)
    assert steps[-1].completion_tokens == sum(len(step.token_ids) for step in steps)
    return [token for step in steps for token in step.token_ids], steps[-1]


async def rest(steps):
    return [step async for step in steps]


async def until(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < end, "it did not happen in time"
        await asyncio.sleep(0.02)


def idle(engine):
    async def check():
        stats = await engine.stats()
        return stats.running == stats.waiting == 0 and stats.kv_pages_free == stats.kv_pages_total

    return check


@pytest.fixture(scope="module")
def loop():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def engine(loop, settings):
    engine = loop.run(EmbeddedEngine.start(settings()))
    yield engine
    loop.run(engine.shutdown())
    assert engine._child.process.returncode == 0


def test_streams_say_what_the_core_says(loop, engine, settings):
    """Greedy, seeded and with logprobs, all at once."""
    asked = [
        request("g", range(3, 60), logprobs=2),
        request("s", temperature=1.0, seed=11),
        *(request(f"r{i}", [i + 3], max_tokens=i + 1) for i in range(8)),
    ]
    core, expected, logprobs = EngineCore(settings()), {each.id: [] for each in asked}, []
    for each in asked:
        core.add(each)
    while core.has_work:
        for step in core.step():
            expected[step.id] += step.token_ids
            logprobs += step.logprobs or []

    async def all_at_once():
        return await asyncio.gather(*(collect(engine, each) for each in asked))

    answers = loop.run(all_at_once())
    assert {each.id: tokens for each, (tokens, _) in zip(asked, answers, strict=True)} == expected
    assert all(last.finish_reason == "length" for _, last in answers)
    assert engine.info == core.info

    async def with_logprobs():
        return [entry async for step in engine.generate(asked[0]) for entry in step.logprobs]

    again = loop.run(with_logprobs())
    assert [entry.top[0][0] for entry in again] == [entry.top[0][0] for entry in logprobs]
    assert [entry.logprob for entry in again] == pytest.approx([entry.logprob for entry in logprobs], abs=1e-3)


def test_closing_the_iterator_aborts(loop, engine):
    async def close_fifty():
        async def three(i):
            async with aclosing(engine.generate(request(f"c{i}", [i + 3] * 9, max_tokens=900))) as steps:
                seen = 0
                async for step in steps:
                    seen += len(step.token_ids)
                    if seen >= 3:
                        return

        await asyncio.gather(*(three(i) for i in range(50)))
        await until(idle(engine))

    loop.run(close_fifty())
    assert engine._mail == {}


def test_cancelling_the_reader_aborts(loop, engine):
    async def cancel():
        reader = asyncio.create_task(collect(engine, request("k", max_tokens=900)))

        async def running():
            return (await engine.stats()).running == 1

        await until(running)
        reader.cancel()
        await asyncio.wait([reader])
        await until(idle(engine))

    loop.run(cancel())


def test_abort_by_id_ends_the_stream(loop, engine):
    async def abort():
        await engine.abort("nobody")
        reason = None
        async for step in engine.generate(request("a", max_tokens=900)):
            await engine.abort("a")
            reason = step.finish_reason
        assert reason == "abort"
        assert 0 < step.completion_tokens < 900
        await until(idle(engine))

    loop.run(abort())


def test_a_slow_reader_gets_one_merged_step(loop, engine):
    async def slow():
        steps = engine.generate(request("slow", max_tokens=30, logprobs=1))
        first = await anext(steps)
        await until(idle(engine))
        (last,) = await rest(steps)
        assert len(first.token_ids) + len(last.token_ids) == last.completion_tokens == 30
        assert len(last.logprobs) == len(last.token_ids)
        return first.token_ids + last.token_ids

    assert loop.run(slow()) == loop.run(collect(engine, request("quick", max_tokens=30)))[0]


def test_requests_that_cannot_run_are_refused_at_once(loop, engine):
    with pytest.raises(ValueError, match="limit is 1024 tokens"):
        engine.generate(request("r", max_tokens=1022))

    async def twice():
        steps = engine.generate(request("same", max_tokens=900))
        await anext(steps)
        with pytest.raises(ValueError, match="'same' is running"):
            await anext(engine.generate(request("same")))
        await steps.aclose()
        await until(idle(engine))
        assert len((await collect(engine, request("same")))[0]) == 20

    loop.run(twice())


def test_the_child_has_the_last_word(loop, engine):
    """What the client lets through and the core refuses comes back as ValueError too."""

    async def stale():
        engine.info, info = msgspec.structs.replace(engine.info, vocab_size=10**6), engine.info
        try:
            with pytest.raises(ValueError, match="token id 5000"):
                await collect(engine, request("r", [5000]))
        finally:
            engine.info = info

    loop.run(stale())
    assert engine._mail == {}


def test_health_stats_decisions(loop, engine):
    loop.run(collect(engine, request("one")))
    health = loop.run(engine.health())
    assert (health.alive, health.reason) == (True, None)
    assert loop.run(engine.stats()).generation_tokens >= 20
    decisions = loop.run(engine.decisions())
    assert {decision["bucket"]["phase"] for decision in decisions} >= {"prefill", "decode"}


def test_signals_to_the_whole_group_are_the_parents_to_answer(loop, engine):
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(engine.pid, number)
    assert len(loop.run(collect(engine, request("after")))[0]) == 20


@pytest.fixture
def private_tmp(tmp_path_factory, monkeypatch):
    """An empty directory for temporary files, with a path short enough for a socket."""
    path = tmp_path_factory.mktemp("t")
    monkeypatch.setattr("tempfile.tempdir", str(path))
    return path


def test_sigkill_is_told_to_every_stream_and_by_health(settings, private_tmp):
    async def killed():
        engine = await EmbeddedEngine.start(settings())
        assert list(private_tmp.iterdir()) == []
        readers = [asyncio.create_task(collect(engine, request(f"r{i}", max_tokens=900))) for i in range(3)]
        steps = engine.generate(request("seen", max_tokens=900))
        await anext(steps)
        os.kill(engine.pid, signal.SIGKILL)
        readers.append(asyncio.create_task(rest(steps)))
        ended, late = await asyncio.wait(readers, timeout=5)
        assert not late
        for reader in ended:
            with pytest.raises(EngineDeadError, match="exit status -9"):
                await reader
        health = await engine.health()
        assert not health.alive
        assert "exit status -9" in health.reason
        with pytest.raises(EngineDeadError):
            await collect(engine, request("late"))
        with pytest.raises(EngineDeadError):
            await engine.decisions()
        await engine.abort("r0")
        await engine.shutdown()
        await engine.shutdown()
        assert "exit status -9" in (await engine.health()).reason

    asyncio.run(killed())


CRASHING = """
import sys
from mla_serve.engine.embedded import core, process
def crash(self):
    raise LookupError("the step is broken")
core.EngineCore.step = crash
sys.exit(process.main())
"""


def test_an_engine_that_breaks_says_why_and_exits_with_1(settings, monkeypatch):
    monkeypatch.setattr(client, "COMMAND", (sys.executable, "-c", CRASHING))

    async def crash():
        engine = await EmbeddedEngine.start(settings())
        with pytest.raises(EngineDeadError, match="exit status 1: LookupError: the step is broken"):
            await collect(engine, request("r"))
        assert not (await engine.health()).alive
        await engine.shutdown()

    asyncio.run(crash())


def test_a_bad_checkpoint_is_one_sentence(settings, tmp_path, private_tmp):
    with pytest.raises(UserError, match=r"config\.json"):
        asyncio.run(EmbeddedEngine.start(settings(model=str(tmp_path))))
    assert list(private_tmp.iterdir()) == []


def test_a_child_that_never_speaks(settings, monkeypatch, private_tmp):
    monkeypatch.setattr(client, "COMMAND", (sys.executable, "-c", "raise SystemExit(7)"))
    with pytest.raises(EngineDeadError, match="exit status 7, while loading"):
        asyncio.run(EmbeddedEngine.start(settings()))
    assert list(private_tmp.iterdir()) == []


PARENT = """
import asyncio, sys, msgspec
from mla_serve.engine.embedded import EmbeddedEngine, EngineConfig
async def main():
    engine = await EmbeddedEngine.start(msgspec.json.decode(sys.argv[1], type=EngineConfig))
    print(engine.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def test_the_child_does_not_outlive_its_parent(settings):
    command = [sys.executable, "-c", PARENT, msgspec.json.encode(settings()).decode()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    _, alive = psutil.wait_procs([child], timeout=5)
    # Where nobody reaps orphans it stays as a zombie.
    assert all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


STATS = Stats(1, 0, 0.5, 4, 2, 3, 4, 0)


class FullSocket:
    """Takes nothing until `room` is set."""

    def __init__(self):
        self.room, self.sent = False, []

    def send(self, data, flags):
        if not self.room:
            raise zmq.Again
        self.sent.append(m.decode_to_server(data))


def step(name, n, logprobs=None, reason=None):
    return Step(name, [n], 3, n, logprobs and [TokenLogprobs(logprobs, [])], reason)


def test_a_server_that_does_not_read_costs_one_step_per_request():
    socket = FullSocket()
    link = Link(socket)
    for n in range(1, 500):
        link.turn([step("a", n), step("b", n, -1.0)], STATS)
        link.flush()
    link.turn([step("b", 500, -2.0, "length")], STATS)
    link.reply(m.Refused("c", "no"))
    link.flush()
    assert link.full
    socket.room = True
    link.flush()
    assert not link.full
    refused, turn = socket.sent
    assert refused == m.Refused("c", "no")
    a, b = turn.steps
    assert (a.token_ids, a.completion_tokens, a.logprobs) == (list(range(1, 500)), 499, None)
    assert (b.token_ids, b.completion_tokens, b.finish_reason) == (list(range(1, 501)), 500, "length")
    assert [entry.logprob for entry in b.logprobs] == [-1.0] * 499 + [-2.0]


def test_a_containers_quota_bounds_the_threads(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert available_threads(tmp_path / "cpu.max") == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert available_threads(tmp_path / "cpu.max") == available_threads(tmp_path / "nothing") >= 1


def test_omp_num_threads_is_obeyed(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert available_threads() == 7
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert available_threads() != 7


class OneLongStep:
    """A core whose only step takes 40 s by the clock it is given, one layer every second; then it is told to stop."""

    prober, compiling, take_compiled = None, False, dict

    def __init__(self, now):
        self.now, self.runner, self.measurer, self.stepped = now, SimpleNamespace(), SimpleNamespace(), False

    @property
    def has_work(self):
        return not self.stepped

    def step(self):
        for _ in range(40):
            self.now[0] += 1.0
            self.runner.progress()
        self.stepped = True
        return []

    def stats(self):
        return STATS

    def close(self):
        pass


def test_an_engine_in_a_long_step_is_not_silent(monkeypatch):
    now, silent, heard = [0.0], [], [0.0]
    monkeypatch.setattr(process.time, "monotonic", lambda: now[0])
    core = OneLongStep(now)

    def turn(steps, stats):
        silent.append(now[0] - heard[0])
        heard[0] = now[0]

    link = SimpleNamespace(
        turn=turn, flush=lambda: None, full=False, receive=lambda seconds: [m.Stop()] if core.stepped else []
    )
    process.serve(core, link)
    assert core.stepped
    assert len(silent) >= 40
    assert max(silent) <= 1.0
