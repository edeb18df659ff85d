"""`mla-serve bench serve --layers`: what HTTP costs against the same engine called without it, in interleaved rounds.

The client shares the process and its event loop with the server, so what a client costs counts against HTTP too.
"""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import uvicorn

from mla_serve.bench.serve import Load, Note
from mla_serve.engine.base import Request, Sampling
from mla_serve.engine.embedded.client import EmbeddedEngine
from mla_serve.engine.embedded.messages import EngineConfig
from mla_serve.server.app import create_app
from mla_serve.server.http import BoundedHttp
from mla_serve.server.run import UvicornServer
from mla_serve.server.settings import ServerSettings

Answer = tuple[float, int]  # seconds to the first token, tokens
Ask = Callable[[list[int], int], Awaitable[Answer]]


async def without_http(engine: EmbeddedEngine, prompt: list[int], output_tokens: int) -> Answer:
    """One greedy answer through the engine's client."""
    begin = time.perf_counter()
    first, count = 0.0, 0
    sampling = Sampling(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
    async for step in engine.generate(Request(uuid.uuid4().hex, prompt, sampling)):
        if step.token_ids and not first:
            first = time.perf_counter() - begin
        count = step.completion_tokens
    return first, count


async def over_http(port: int, prompt: list[int], output_tokens: int) -> Answer:
    """The same as a stream of /v1/completions, over a connection of its own."""
    body = json.dumps({
        "prompt": prompt, "max_tokens": output_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }).encode()  # fmt: skip
    begin = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    writer.write(f"{head}Connection: close\r\n\r\n".encode() + body)
    first, count = 0.0, 0
    try:
        async for line in reader:
            if not line.startswith(b"data: {"):
                continue
            first = first or time.perf_counter() - begin
            event = json.loads(line[6:])
            if event.get("usage"):
                count = event["usage"]["completion_tokens"]
    finally:
        writer.close()
    return first, count


@asynccontextmanager
async def serving(engine: EmbeddedEngine, settings: ServerSettings) -> AsyncIterator[int]:
    """The application on a free loopback port, on this event loop; yields the port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1024)
        config = uvicorn.Config(
            create_app(engine, settings), http=BoundedHttp, lifespan="off", log_config=None, access_log=False
        )
        server = UvicornServer(config)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        await server.listening.wait()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            await task


async def one_round(ask: Ask, prompts: Sequence[list[int]], output_tokens: int) -> float:
    """Tokens per second with all prompts at once."""
    begin = time.perf_counter()
    answers = await asyncio.gather(*(ask(prompt, output_tokens) for prompt in prompts))
    assert all(count == output_tokens for _, count in answers), "an answer is not whole"
    return sum(count for _, count in answers) / (time.perf_counter() - begin)


async def measure(model: Path, load: Load, note: Note, *, rounds: int = 5, singles: int = 40) -> dict[str, Any]:
    """Median seconds to the first token of single requests, and tokens per second of `load`, both ways."""
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    engine = await EmbeddedEngine.start(EngineConfig(model=str(model), threads=load.threads, prefix_cache=False))
    settings = ServerSettings(engine=EngineConfig(model=str(model)))
    try:
        async with serving(engine, settings) as port:
            ways: dict[str, Ask] = {
                "engine": lambda prompt, tokens: without_http(engine, prompt, tokens),
                "http": lambda prompt, tokens: over_http(port, prompt, tokens),
            }
            for ask in ways.values():  # warm up
                await one_round(ask, load.prompts(vocab_size, seed=1000)[:2], 8)
            firsts: dict[str, list[float]] = {way: [] for way in ways}
            rates: dict[str, list[float]] = {way: [] for way in ways}
            for index in range(singles):
                prompt = load.prompts(vocab_size, seed=index)[0]
                for way, ask in (list(ways.items()), list(ways.items())[::-1])[index % 2]:
                    firsts[way].append((await ask(prompt, 2))[0])
            for index in range(rounds):
                for way, ask in (list(ways.items()), list(ways.items())[::-1])[index % 2]:
                    rates[way].append(await one_round(ask, load.prompts(vocab_size, seed=index), load.output_tokens))
                    note(f"{way}, round {index + 1}: {rates[way][-1]:.1f} tokens/s")
    finally:
        await engine.shutdown()
    first = {way: statistics.median(values) for way, values in firsts.items()}
    paired = [http - direct for direct, http in zip(firsts["engine"], firsts["http"], strict=True)]
    rate = {way: statistics.median(values) for way, values in rates.items()}
    return {
        "load": asdict(load),
        "first_token_ms": {way: 1000 * seconds for way, seconds in first.items()},
        "first_token_added_ms": 1000 * statistics.median(paired),
        "tokens_per_s": rate,
        "throughput_lost": 1 - rate["http"] / rate["engine"],
    }
