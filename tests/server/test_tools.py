"""Tool calls and reasoning through the real client: S12. The texts come out of the real engine, forced token by token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from mla_serve.server.parsers import TOOL_FORMATS
from tests.server.conftest import MODEL, Server, start_server
from tests.server.parsers.test_parsers import FORMATS

CITIES = ["Münster", "北京", "👩‍👩‍👧 客单价"]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": CITIES}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NOW: Any = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "additionalProperties": False}}}
ASK: Any = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def thinker(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server told that its model thinks, and writes calls as DeepSeek V3 does."""
    log = tmp_path_factory.mktemp("thinker") / "server.log"
    running = start_server(log, checkpoint, tool_format="deepseek-v3", reasoning="on")
    try:
        yield running.wait()
    finally:
        assert running.stop() == 0, running.output


@pytest.fixture
def thinking(thinker: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{thinker.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def forced(text: str) -> dict[str, Any]:
    """The rest of a request whose answer must be this text."""
    return {"extra_body": {"structured_outputs": {"choice": [text]}}, "max_tokens": 2000}


def whole(client: openai.OpenAI, **fields: Any) -> tuple[Any, str]:
    """The message and finish reason of an answer in one piece, as plain data."""
    choice = client.chat.completions.create(model=MODEL, messages=ASK, **fields).choices[0]
    return choice.message.to_dict(), choice.finish_reason


def streamed(client: openai.OpenAI, **fields: Any) -> tuple[dict[str, Any], str]:
    """The same from a stream, put together as clients do."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}}
    finish = ""
    for chunk in client.chat.completions.create(model=MODEL, messages=ASK, stream=True, **fields):
        choice = chunk.choices[0]
        delta = choice.delta.to_dict()
        message["content"] += delta.get("content") or ""
        message["reasoning"] += delta.get("reasoning") or ""  # type: ignore[operator]
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for part in delta.get("tool_calls") or ():  # type: ignore[attr-defined]
            call = message["calls"].setdefault(part["index"], {"arguments": ""})
            call |= {key: part[key] for key in ("id", "type") if key in part}
            call |= {"name": part["function"]["name"]} if "name" in part["function"] else {}
            call["arguments"] += part["function"].get("arguments", "")
        finish = choice.finish_reason or finish
    return message, finish


def calls(message: dict[str, Any]) -> list[tuple[str, str]]:
    """Names and arguments, from either form."""
    if "calls" in message:
        return [(call["name"], call["arguments"]) for _, call in sorted(message["calls"].items())]
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]


@pytest.mark.parametrize("read", [whole, streamed])
@pytest.mark.parametrize("city", CITIES)
def test_s12_literal_utf8_in_arguments(thinking: openai.OpenAI, city: str, read: Any) -> None:
    arguments = json.dumps({"city": city}, ensure_ascii=False)
    text = (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        f"{arguments}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    )
    message, finish = read(thinking, tools=[WEATHER], **forced(text))
    assert calls(message) == [("weather", arguments)]
    assert not message["content"]
    assert finish == "tool_calls"


@pytest.mark.parametrize("read", [whole, streamed])
def test_a_call_that_must_be_made(client: openai.OpenAI, read: Any) -> None:
    """Named: any model can, since the output's grammar is the function's own parameters."""
    named: Any = {"type": "function", "function": {"name": "weather"}}
    message, finish = read(client, tools=[WEATHER, NOW], tool_choice=named, temperature=0, max_tokens=200)
    ((name, arguments),) = calls(message)
    assert name == "weather"
    assert json.loads(arguments)["city"] in CITIES
    assert "\\u" not in arguments
    assert finish == "stop"


@pytest.mark.parametrize("read", [whole, streamed])
@pytest.mark.parametrize("seed", range(3))
def test_required_calls(client: openai.OpenAI, read: Any, seed: int) -> None:
    fields: dict[str, Any] = {"tools": [WEATHER, NOW], "tool_choice": "required", "parallel_tool_calls": False}
    message, finish = read(client, seed=seed, max_tokens=300, **fields)
    ((name, arguments),) = calls(message)
    assert name in ("weather", "now")
    assert set(json.loads(arguments)) == ({"city"} if name == "weather" else set())
    assert finish == "tool_calls"


@pytest.mark.parametrize("format_name", list(TOOL_FORMATS))
def test_each_format_from_the_engine(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, format_name: str) -> None:
    """Two calls in parallel, as the format's own example has them, streamed and not."""
    log = tmp_path_factory.mktemp(format_name) / "server.log"
    server = start_server(log, checkpoint, tool_format=format_name)
    try:
        server.wait()
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            one, finish = whole(client, tools=[WEATHER, NOW], **forced(FORMATS[format_name]))
            two, also = streamed(client, tools=[WEATHER, NOW], **forced(FORMATS[format_name]))
    finally:
        assert server.stop() == 0, server.output
    assert calls(one) == calls(two)
    assert len(calls(one)) >= 2
    assert (one["content"] or "") == two["content"]
    assert (finish, also) == ("tool_calls", "tool_calls")


@pytest.mark.parametrize("read", [whole, streamed])
def test_reasoning_is_told_apart(thinking: openai.OpenAI, read: Any) -> None:
    message, finish = read(thinking, **forced("<think>客单价 first</think>\n\nThen 👩‍👩‍👧."))
    assert (message["reasoning"], message["content"], finish) == ("客单价 first", "Then 👩‍👩‍👧.", "stop")


@pytest.mark.parametrize("read", [whole, streamed])
def test_without_tools_a_call_is_text(thinking: openai.OpenAI, read: Any) -> None:
    text = "<｜tool▁calls▁begin｜>x"
    for fields in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        message, _ = read(thinking, **fields, **forced(text))
        assert message["content"] == text
        assert not calls(message)


def test_a_stop_string_inside_arguments_ends_them(thinking: openai.OpenAI) -> None:
    text = '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "北京"}\n```'
    message, finish = whole(thinking, tools=[WEATHER], stop=["京"], **forced(text))
    assert calls(message) == [("weather", '{"city": "北')]
    assert finish == "tool_calls"


def test_a_conversation_with_calls_goes_on(client: openai.OpenAI) -> None:
    """The template of this model knows no tools: their messages are refused by it or rendered, never a fault."""
    call: Any = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages: Any = [*ASK, {"role": "assistant", "content": "x", "tool_calls": [call]}, {"role": "user", "content": "y"}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
    assert answer.choices[0].finish_reason == "length"
