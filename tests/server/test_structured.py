"""Structured output through the real client: S09, and texts that no model would say."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import httpx
import openai
import pytest

from tests.server.conftest import MODEL, Server

SCHEMA: Any = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
TEXTS = ["客单价", "👩‍👩‍👧", "ďábel", "<think>x</think>y", "<｜tool▁calls▁begin｜>", 'a\nb\t"c"']


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_choice_comes_out_literally(server: Server, text: str, stream: bool) -> None:
    body = {
        "prompt": "x",
        "structured_outputs": {"choice": [text]},
        "max_tokens": 200,
        "logprobs": 1,
        "skip_special_tokens": False,
    }
    if not stream:
        choice = server.complete(**body)["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (text, "stop")
        return
    found = ""
    with httpx.stream("POST", server.url + "/v1/completions", json={**body, "stream": True}, timeout=60) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                piece = json.loads(line[6:])["choices"][0]["text"]
                assert "\ufffd" not in piece
                found += piece
    assert found == text


@pytest.mark.parametrize("seed", range(4))
def test_a_schema_is_kept(client: openai.OpenAI, seed: int) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "x"}], response_format=form, seed=seed, max_tokens=400
    )
    assert answer.choices[0].finish_reason == "stop"
    data = json.loads(answer.choices[0].message.content or "")
    assert set(data) == {"name", "n"}
    assert len(data["name"]) <= 8
    assert 0 <= data["n"] <= 99


@pytest.mark.parametrize(
    "form", [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "any", "schema": {}}}]
)
def test_s09_any_object_is_an_object(server: Server, form: dict[str, Any]) -> None:
    """An empty schema does not run to max_tokens in digits: the first token opens an object."""
    text = server.complete(prompt="x", response_format=form, max_tokens=30, seed=1)["choices"][0]["text"]
    assert text.lstrip().startswith("{")


@pytest.mark.parametrize("field", ["structured_outputs", "guided_regex"])
def test_a_regular_expression_is_kept(server: Server, field: str) -> None:
    pattern = r"[0-9]{3}-[a-f]{2,4}"
    asked = {"regex": pattern} if field == "structured_outputs" else pattern
    for seed in range(4):
        text = server.complete(prompt="x", seed=seed, max_tokens=50, **{field: asked})["choices"][0]["text"]
        assert re.fullmatch(pattern, text)


def test_structured_and_free_requests_share_a_batch(server: Server) -> None:
    async def all_of_them() -> list[Any]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            bodies = [
                {"prompt": "x", "max_tokens": 60, "seed": i, **({"guided_choice": [TEXTS[i % 3]]} if i % 2 else {})}
                for i in range(16)
            ]
            return [answer.json() for answer in await asyncio.gather(*(client.post("/v1/completions", json=b) for b in bodies))]

    alone = [server.complete(prompt="x", max_tokens=60, seed=i)["choices"][0]["text"] for i in range(0, 16, 2)]
    answers = [answer["choices"][0]["text"] for answer in asyncio.run(all_of_them())]
    assert answers[1::2] == [TEXTS[i % 3] for i in range(1, 16, 2)]
    assert answers[::2] == alone


def test_a_stop_string_still_stops(server: Server) -> None:
    body = {"prompt": "x", "structured_outputs": {"choice": ["one two three"]}, "stop": [" three"], "max_tokens": 50}
    choice = server.complete(**body)["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("one two", "stop", " three")
