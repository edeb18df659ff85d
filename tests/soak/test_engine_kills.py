"""`kill -9` of the engine at random times under load: every stream ends with an error event, and the server with status 1."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import start_server

KILLS = 20
STREAMS = 12
BODY: dict[str, Any] = {"prompt": "XY", "max_tokens": 4000, "ignore_eos": True, "stream": True}


async def one_stream(client: httpx.AsyncClient, started: asyncio.Event) -> tuple[str, float]:
    """How a stream ended: "error", "done" or "cut", and when."""
    last = ""
    try:
        async with client.stream("POST", "/v1/completions", json=BODY) as response:
            if response.status_code != 200:
                return ("error" if "error" in (await response.aread()).decode() else "cut"), time.monotonic()
            async for line in response.aiter_lines():
                if line:
                    last = line
                    started.set()
    except httpx.HTTPError:
        return "cut", time.monotonic()
    if last == "data: [DONE]":
        return "done", time.monotonic()
    return ("error" if "error" in json.loads(last.removeprefix("data: ")) else "cut"), time.monotonic()


async def kill_under_load(url: str, pid: int, delay: float) -> tuple[list[str], float]:
    """How the streams ended, and the seconds from the kill to the last of their ends."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
        started = asyncio.Event()
        tasks = [asyncio.create_task(one_stream(client, started)) for _ in range(STREAMS)]
        await started.wait()
        await asyncio.sleep(delay)
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        ends = await asyncio.gather(*tasks)
    return [how for how, _ in ends], max(when for _, when in ends) - killed


@pytest.mark.slow("engine-kills")
def test_kill_9_at_random_times(checkpoint: Path, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    rows = []
    for number in range(KILLS):
        before = set(Path(tempfile.gettempdir()).glob("mla-serve-*"))
        server = start_server(tmp_path / f"log-{number}", checkpoint).wait()
        try:
            delay = random.uniform(0, 2)
            ends, seconds = asyncio.run(kill_under_load(server.url, server.engine_pid(), delay))
            status = server.process.wait(30)
        finally:
            server.close()
        left = set(Path(tempfile.gettempdir()).glob("mla-serve-*")) - before
        row = {"delay": round(delay, 3), "ends": sorted(set(ends)), "seconds": round(seconds, 3), "status": status}
        record_property("row", {**row, "left": len(left)})
        rows.append((row, left))
    for row, left in rows:
        assert row["ends"] == ["error"], row
        assert row["seconds"] < 5, row
        assert row["status"] == 1, row
        assert not left
