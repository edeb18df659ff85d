"""S10: a client that goes away takes its request with it, streamed or not, alone or fifty at once."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.server.conftest import Server

BODY: dict[str, Any] = {"prompt": "XY", "max_tokens": 2048, "ignore_eos": True}


async def leave_stream(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    """Closes the connection after three chunks."""
    async with client.stream(
        "POST", "/v1/completions", json={**body, "stream": True, "skip_special_tokens": False}
    ) as response:
        chunks = 0
        async for line in response.aiter_lines():
            chunks += line.startswith("data: ")
            if chunks == 3:
                return


async def leave_whole(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    """Closes the connection while the answer is still being made."""
    with pytest.raises(httpx.ReadTimeout):
        await client.post("/v1/completions", json=body, timeout=httpx.Timeout(60, read=1.0))


@pytest.mark.parametrize("count", [1, 50])
@pytest.mark.parametrize("leave", [leave_stream, leave_whole])
def test_s10_pages_come_back_within_a_second(server: Server, leave: Any, count: int) -> None:
    async def run() -> None:
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
            await asyncio.gather(*(leave(client, BODY) for _ in range(count)))

    asyncio.run(run())
    load = server.until_idle(1.0)
    assert (load["running"], load["waiting"], load["server_load"]) == (0, 0, 0)
    assert load["kv_pages_free"] == load["kv_pages_total"]


def test_s10_all_choices_of_a_request_end(server: Server) -> None:
    async def run() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            await leave_stream(client, {**BODY, "prompt": ["X", "Y"], "n": 4})

    asyncio.run(run())
    assert server.until_idle(1.0)["running"] == 0


def test_one_that_leaves_does_not_disturb_the_others(server: Server) -> None:
    body = {"prompt": "XY", "max_tokens": 60, "ignore_eos": True, "seed": 3}
    alone = server.complete(**body)["choices"]

    async def run() -> Any:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            stays, *_ = await asyncio.gather(
                client.post("/v1/completions", json=body), *(leave_stream(client, BODY) for _ in range(4))
            )
            return stays.json()["choices"]

    assert asyncio.run(run()) == alone
