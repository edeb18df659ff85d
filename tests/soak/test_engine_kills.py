"""`kill -9` of the engine at random times under load: every stream ends with an error event, the server with status 1, and
neither leaves a process, a socket or a directory behind."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.server.conftest import Server, start_server

KILLS = 20
WITHIN = 5.0  # seconds from the kill to the last stream's end
LONG = {
    "type": "json_schema", "name": "long", "schema": {
        "type": "object", "properties": {"a": {"type": "string", "minLength": 1000, "maxLength": 1000}}, "required": ["a"],
    },
}  # fmt: skip
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "XY", "max_tokens": 4000, "ignore_eos": True}),
    ("/v1/completions", {"prompt": "XY", "max_tokens": 4000, "ignore_eos": True, "n": 3, "logprobs": 2}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "aä"}], "max_tokens": 4000, "ignore_eos": True}),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "guided_regex": "[ab]{1000}", "max_tokens": 4000},
    ),
    ("/v1/responses", {"input": "a", "text": {"format": LONG}, "max_output_tokens": 4000}),
]
STREAMS = 20


async def stream(client: httpx.AsyncClient, number: int, opened: list[int]) -> tuple[str, float]:
    """How an endless stream ended ("error event", "503" and so on, or "cut"), and when."""
    route, body = ROUTES[number % len(ROUTES)]
    try:
        async with client.stream("POST", route, json={**body, "stream": True}) as response:
            if response.status_code != 200:
                told = json.loads(await response.aread())
                return f"{response.status_code} {told['error']['code']}", time.monotonic()
            opened.append(number)
            last = ""
            async for line in response.aiter_lines():
                last = line if line.startswith("data: ") else last
    except httpx.HTTPError as error:
        return f"cut: {type(error).__name__}", time.monotonic()
    error = {} if last == "data: [DONE]" else json.loads(last.removeprefix("data: ")).get("error") or {}
    return ("error event" if error.get("code") == "engine_dead" else f"ended well: {last[:60]}"), time.monotonic()


async def kill_under_load(server: Server, delay: float) -> tuple[Counter[str], float, int]:
    """How the streams ended, the seconds from the kill to the last of their ends, and how many had begun by then."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
        opened: list[int] = []
        pid = server.engine_pid()
        tasks = [asyncio.create_task(stream(client, number, opened)) for number in range(STREAMS)]
        await asyncio.sleep(delay)
        os.kill(pid, signal.SIGKILL)
        killed, begun = time.monotonic(), len(opened)
        ends = await asyncio.gather(*tasks)
    return Counter(how for how, _ in ends), max(when for _, when in ends) - killed, begun


def survivors(processes: list[psutil.Process]) -> list[int]:
    """Those that still run a moment after their server has ended."""
    return [process.pid for process in psutil.wait_procs(processes, timeout=5)[1]]


@pytest.mark.slow("engine-kills")
@pytest.mark.timeout(1200)
def test_kill_9_at_random_times(
    checkpoint: Path, tmp_path: Path, record_property: Callable[[str, object], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = []
    for number in range(KILLS):
        scratch = tmp_path / f"tmp-{number}"  # where the server and its engine put what they share
        scratch.mkdir()
        monkeypatch.setenv("TMPDIR", str(scratch))
        server = start_server(tmp_path / f"log-{number}", checkpoint).wait()
        try:
            family = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
            delay = random.uniform(0, 3)
            ends, seconds, begun = asyncio.run(kill_under_load(server, delay))
            status = server.process.wait(30)
            left = survivors(family)
        finally:
            server.close()
        row = {"delay": round(delay, 3), "streams": STREAMS, "begun": begun, "ends": dict(ends), "seconds": round(seconds, 3),
               "status": status, "processes_left": len(left), "files_left": len([*scratch.rglob("*")])}  # fmt: skip
        record_property("row", row)
        rows.append(row)
    monkeypatch.undo()
    worst = max(row["seconds"] for row in rows)
    record_property("figures", {"kills": KILLS, "worst_seconds": worst, "asked_seconds": WITHIN})
    for row in rows:
        assert row["ends"].keys() <= {"error event", "503 engine_dead"}, row
        assert row["ends"].get("error event", 0) >= row["begun"], row
        assert row["seconds"] < WITHIN, row
        assert row["status"] == 1, row
        assert (row["processes_left"], row["files_left"]) == (0, 0), row
    assert sum(row["begun"] for row in rows) > KILLS * STREAMS / 2
