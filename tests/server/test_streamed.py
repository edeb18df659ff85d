"""Text streamed is text not streamed: random prompts, seeds, stops and parameters, over both routes, many at once."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.server.conftest import Server
from tests.server.scripted import STOP, UNICODE

LETTERS = "ab XYé客👩\n"


def random_body(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A route and a request that ends, with a seed, so that it can be asked twice."""
    body: dict[str, Any] = {"seed": rng.randrange(2**31), "max_tokens": rng.randint(1, 60)}
    maybe: dict[str, Callable[[], Any]] = {
        "temperature": lambda: rng.choice([0, 0.5, 1.0, 2.0]),
        "top_p": lambda: rng.choice([0.2, 0.9, 1.0]),
        "top_k": lambda: rng.choice([1, 5, 50]),
        "min_p": lambda: rng.choice([0.0, 0.1]),
        "frequency_penalty": lambda: rng.choice([-1.0, 1.5]),
        "presence_penalty": lambda: rng.choice([-1.0, 1.5]),
        "repetition_penalty": lambda: rng.choice([0.8, 1.3]),
        "logit_bias": lambda: {str(rng.randrange(250)): rng.choice([-100, 5])},
        "stop": lambda: [
            rng.choice([*"abcxyz ", UNICODE[:1], "".join(STOP[1:3]), "ef", " end"]) for _ in range(rng.randint(1, 3))
        ],
        "include_stop_str_in_output": lambda: True,
        "stop_token_ids": lambda: [rng.randrange(250)],
        "ignore_eos": lambda: True,
        "min_tokens": lambda: 1,
        "skip_special_tokens": lambda: False,
        "n": lambda: rng.randint(2, 3),
    }
    for name, value in maybe.items():
        if rng.random() < 0.25:
            body[name] = value()
    text = "".join(rng.choice(LETTERS) for _ in range(rng.randint(1, 12))) + rng.choice(["", "<|stop|>", "<|unicode|>"])
    if rng.random() < 0.5:
        return "/v1/completions", {**body, "prompt": text}
    return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": text}]}


def told(choice: dict[str, Any]) -> str:
    return choice.get("text") or (choice.get("message") or choice.get("delta") or {}).get("content") or ""


async def whole(client: httpx.AsyncClient, route: str, body: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Text, finish and stop reason of each choice."""
    answer = await client.post(route, json=body)
    assert answer.status_code == 200, answer.text
    choices = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
    return [(told(choice), choice["finish_reason"], choice["stop_reason"]) for choice in choices]


async def streamed(client: httpx.AsyncClient, route: str, body: dict[str, Any]) -> list[tuple[Any, ...]]:
    texts = [""] * body.get("n", 1)
    ends: dict[int, tuple[Any, Any]] = {}
    async with client.stream("POST", route, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    texts[choice["index"]] += told(choice)
                    if choice.get("finish_reason"):
                        ends[choice["index"]] = choice["finish_reason"], choice["stop_reason"]
    return [(text, *ends[index]) for index, text in enumerate(texts)]


def differences(server: Server, count: int) -> list[Any]:
    """Requests whose two answers are not one, of `count` random ones, sixteen at a time."""

    async def run() -> list[Any]:
        gate = asyncio.Semaphore(16)
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:

            async def both(route: str, body: dict[str, Any]) -> Any:
                async with gate:
                    one, two = await whole(client, route, body), await streamed(client, route, body)
                return None if one == two else (route, body, one, two)

            rng = random.Random(random.getrandbits(64))
            found = await asyncio.gather(*(both(*random_body(rng)) for _ in range(count)))
        return [difference for difference in found if difference is not None]

    return asyncio.run(run())


def test_text_streamed_is_text_not_streamed(server: Server) -> None:
    assert differences(server, 60) == []


@pytest.mark.slow("streamed")
def test_the_same_of_500(server: Server, record_property: Callable[[str, object], None]) -> None:
    found = differences(server, 500)
    record_property("figures", {"requests": 500, "differences": len(found)})
    assert found == []
