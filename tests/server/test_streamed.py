"""Text streamed is text not streamed: random prompts, seeds, stops and parameters, over the three routes, many at once.

Where a route takes stop strings, half of them are cut from what the model says without any, so that most are met.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.server.conftest import Server

Json = dict[str, Any]
Ends = list[tuple[Any, ...]]
"""Text, finish reason and stop reason, and the tokens of the logprobs if there are any, of each choice."""

LETTERS = "ab XYé客👩\n"
TOGETHER = 16


def random_body(rng: random.Random) -> tuple[str, Json]:
    """A route and a request that ends, with a seed, so that it can be asked twice."""
    text = "".join(rng.choice(LETTERS) for _ in range(rng.randint(1, 12))) + rng.choice(["", "<|stop|>", "<|unicode|>"])
    body: Json = {"seed": rng.choice([rng.randrange(2**31), -(2**63), 2**63 - 1])}
    maybe: dict[str, Callable[[], Any]] = {
        "temperature": lambda: rng.choice([0, 0.5, 1.0, 2.0]),
        "top_p": lambda: rng.choice([0.2, 0.9, 1.0]),
        "top_k": lambda: rng.choice([1, 5, 50]),
    }
    more: dict[str, Callable[[], Any]] = {
        "min_p": lambda: rng.choice([0.0, 0.1]),
        "frequency_penalty": lambda: rng.choice([-1.0, 1.5]),
        "presence_penalty": lambda: rng.choice([-1.0, 1.5]),
        "repetition_penalty": lambda: rng.choice([0.8, 1.3]),
        "logit_bias": lambda: {str(rng.randrange(250)): rng.choice([-100, 5])},
        "include_stop_str_in_output": lambda: True,
        "stop_token_ids": lambda: [rng.randrange(250)],
        "ignore_eos": lambda: True,
        "min_tokens": lambda: 1,
        "skip_special_tokens": lambda: False,
        "n": lambda: rng.randint(2, 3),
    }
    route = rng.choice(["/v1/completions", "/v1/completions", "/v1/chat/completions", "/v1/chat/completions", "/v1/responses"])
    tokens = rng.randint(1, 60)
    for name, value in (maybe if route == "/v1/responses" else maybe | more).items():
        if rng.random() < 0.25:
            body[name] = value()
    logprobs = rng.random() < 0.25
    if route == "/v1/completions":
        return route, {**body, "max_tokens": tokens, "prompt": text, **({"logprobs": 1} if logprobs else {})}
    if route == "/v1/responses":
        return route, {**body, "max_output_tokens": tokens, "input": text, **({"top_logprobs": 1} if logprobs else {})}
    messages = [{"role": "user", "content": text}]
    return route, {**body, "max_tokens": tokens, "messages": messages, **({"logprobs": True} if logprobs else {})}


def tokens_of(logprobs: Any) -> list[str]:
    """From either form of logprobs; none without them."""
    entries = logprobs.get("content", logprobs.get("tokens", ())) if isinstance(logprobs, dict) else logprobs or ()
    return [entry if isinstance(entry, str) else entry["token"] for entry in entries]


def of_response(answer: Json) -> Ends:
    parts = [part for item in answer["output"] for part in item.get("content", ())]
    tokens = [token for part in parts for token in tokens_of(part["logprobs"])]
    return [("".join(part["text"] for part in parts), answer["status"], None, tokens)]


async def whole(client: httpx.AsyncClient, route: str, body: Json) -> Ends:
    answer = await client.post(route, json=body)
    assert answer.status_code == 200, answer.text
    if route == "/v1/responses":
        return of_response(answer.json())
    found = []
    for choice in sorted(answer.json()["choices"], key=lambda choice: choice["index"]):
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        found.append((text, choice["finish_reason"], choice["stop_reason"], tokens_of(choice["logprobs"])))
    return found


async def streamed(client: httpx.AsyncClient, route: str, body: Json) -> Ends:
    texts, tokens = [""] * body.get("n", 1), [list[str]() for _ in range(body.get("n", 1))]
    ends: dict[int, tuple[Any, Any]] = {}
    async with client.stream("POST", route, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        events = [json.loads(line[6:]) async for line in response.aiter_lines() if line.startswith("data: {")]
    if route == "/v1/responses":
        deltas = [event for event in events if event["type"] == "response.output_text.delta"]
        ((text, status, _, last),) = of_response(events[-1]["response"])
        said, named = "".join(event["delta"] for event in deltas), [t for e in deltas for t in tokens_of(e["logprobs"])]
        assert (said, named) == (text, last), "the deltas add up to the last event's answer"
        return [(said, status, None, named)]
    for choice in (choice for event in events for choice in event["choices"]):
        index = choice["index"]
        texts[index] += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        tokens[index] += tokens_of(choice["logprobs"])
        if choice["finish_reason"]:
            assert index not in ends
            ends[index] = choice["finish_reason"], choice["stop_reason"]
    return [(text, *ends[index], tokens[index]) for index, text in enumerate(texts)]


async def compare(client: httpx.AsyncClient, rng: random.Random, counts: Counter[str]) -> Any:
    """One random request asked both ways; None where the answers are one."""
    route, body = random_body(rng)
    if route != "/v1/responses" and rng.random() < 0.6:
        stops = [rng.choice([*"abcxyz ", "ef", "客", "zzz"]) for _ in range(rng.randint(0, 2))]
        said = (await whole(client, route, body))[0][0]
        for _ in range(rng.randint(1, 2)):
            start = rng.randrange(len(said) + 1)
            stops.append(said[start : start + rng.randint(1, 5)])
        body["stop"] = [stop for stop in stops if stop]
    one, two = await whole(client, route, body), await streamed(client, route, body)
    stopped = any(isinstance(reason, str) for _, _, reason, _ in one)
    counts.update(requests=1, stopped=stopped, characters=sum(len(text) for text, *_ in one), **{route: 1})
    if stopped and not body.get("include_stop_str_in_output"):
        assert not any(stop in text for text, *_ in one for stop in body["stop"])
    return None if one == two else (route, body, one, two)


def differences(server: Server, count: int) -> tuple[list[Any], Counter[str]]:
    """Requests whose two answers are not one, of `count` random ones, and what those were like."""
    counts: Counter[str] = Counter()

    async def run() -> list[Any]:
        gate = asyncio.Semaphore(TOGETHER)
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:

            async def one(seed: int) -> Any:
                async with gate:
                    return await compare(client, random.Random(seed), counts)

            return await asyncio.gather(*(one(random.getrandbits(64)) for _ in range(count)))

    return [difference for difference in asyncio.run(run()) if difference is not None], counts


def test_text_streamed_is_text_not_streamed(server: Server) -> None:
    found, counts = differences(server, 60)
    assert found == []
    assert counts["stopped"] >= 6


@pytest.mark.slow("streamed")
def test_the_same_of_500(server: Server, record_property: Callable[[str, object], None]) -> None:
    found, counts = differences(server, 500)
    record_property("figures", {**counts, "differences": len(found)})
    assert found == []
    assert counts["stopped"] >= 50
