"""/v1/responses through the real client, whole and streamed; each answer is validated by the openai package's types."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from tests.server.conftest import MODEL, Server, start_server
from tests.server.scripted import CHAT
from tests.server.test_bad_requests import refused

CHAT_TEXT = "".join(CHAT)
WEATHER: Any = {
    "type": "function", "name": "weather", "strict": True,
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "enum": ["北京"]}}, "required": ["city"],
                   "additionalProperties": False},
}  # fmt: skip


def strict(answer: Response) -> Response:
    """The client builds models without validating them; this does."""
    return Response.model_validate(answer.to_dict())


def final(client: openai.OpenAI, **fields: Any) -> tuple[Response, list[Any]]:
    """The response that a stream ends with, and all its events."""
    events = list(client.responses.create(model=MODEL, stream=True, **fields))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type in ("response.completed", "response.incomplete")
    return events[-1].response, events


def test_a_text(client: openai.OpenAI) -> None:
    answer = strict(client.responses.create(model=MODEL, input="Hi", temperature=0))
    assert answer.output_text == CHAT_TEXT
    assert (answer.status, answer.object, answer.model, answer.error) == ("completed", "response", MODEL, None)
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (5, 5, 10)
    assert [item.type for item in answer.output] == ["message"]


def test_streamed_is_the_same(client: openai.OpenAI) -> None:
    answer, events = final(client, input="Hi", temperature=0)
    assert strict(answer).output_text == CHAT_TEXT
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == CHAT_TEXT
    assert [e.type for e in events if "delta" not in e.type] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip


def test_cut_off(client: openai.OpenAI) -> None:
    answer = strict(client.responses.create(model=MODEL, input="Hi", temperature=0, max_output_tokens=2))
    assert (answer.status, answer.output_text) == ("incomplete", "".join(CHAT[:2]))
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert final(client, input="Hi", temperature=0, max_output_tokens=2)[1][-1].type == "response.incomplete"


def test_a_call_and_its_output(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "weather"}}
    one = strict(client.responses.create(model=MODEL, input="Hi", **fields))
    two, events = final(client, input="Hi", **fields)
    for answer in (one, strict(two)):
        (call,) = answer.output
        assert call.type == "function_call"
        assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "北京"})
    arguments = [e.arguments for e in events if e.type == "response.function_call_arguments.done"]
    assert [json.loads(text) for text in arguments] == [{"city": "北京"}]


def test_a_schema(client: openai.OpenAI) -> None:
    schema: Any = {"type": "object", "properties": {"a": {"const": 7}}, "required": ["a"], "additionalProperties": False}
    text: Any = {"format": {"type": "json_schema", "name": "thing", "schema": schema, "strict": True}}
    assert json.loads(client.responses.create(model=MODEL, input="Hi", text=text).output_text) == {"a": 7}


def test_logprobs(client: openai.OpenAI) -> None:
    include: Any = ["message.output_text.logprobs"]
    answer = strict(client.responses.create(model=MODEL, input="Hi", temperature=0, include=include, top_logprobs=2))
    part = answer.output[0].content[0]  # type: ignore[union-attr, index]
    assert part.type == "output_text"
    assert [entry.token for entry in part.logprobs or ()][: len(CHAT)] == CHAT
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs or ())


def test_a_conversation_is_sent_whole(client: openai.OpenAI, server: Server) -> None:
    """It is the chat that the same messages are."""
    conversation: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "A"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "B", "annotations": []}]},
        {"role": "user", "content": "C"},
    ]
    answer = client.responses.create(model=MODEL, instructions="S", input=conversation, temperature=0)
    chat = [("system", "S"), ("user", "A"), ("assistant", "B"), ("user", "C")]
    messages = [{"role": role, "content": text} for role, text in chat]
    asked = server.post("/v1/chat/completions", {"messages": messages, "temperature": 0}).json()
    assert answer.usage is not None
    assert answer.usage.input_tokens == asked["usage"]["prompt_tokens"]
    assert answer.output_text == asked["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("previous_response_id", "resp_1"), ("conversation", "conv_1"), ("background", True), ("truncation", "auto"),
        ("include", ["file_search_call.results"]), ("input", []), ("input", 5), ("input", [{"type": "image"}]),
        ("tools", [{"type": "web_search"}]), ("max_output_tokens", 0),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_said(server: Server, field: str, value: Any) -> None:
    refused(server.post("/v1/responses", {"input": "Hi", field: value}))


def test_unknown_fields_are_named(server: Server) -> None:
    response = server.post("/v1/responses", {"input": "Hi", "max_output_tokens": 1, "prompt_cache_key": "k"})
    assert response.headers["x-mla-serve-ignored"] == "prompt_cache_key"


def test_reasoning(checkpoint: Path, tmp_path: Path) -> None:
    """A prompt that has opened <think>: what follows is thought until it is closed."""
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}<think>")
    server = start_server(tmp_path / "server.log", checkpoint, chat_template=str(template))
    try:
        with openai.OpenAI(base_url=f"{server.wait().url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            one = strict(client.responses.create(model=MODEL, input="Hi", temperature=0, max_output_tokens=6))
            two, events = final(client, input="Hi", temperature=0, max_output_tokens=6)
    finally:
        assert server.stop() == 0, server.output
    for answer in (one, strict(two)):
        (item,) = answer.output
        assert item.type == "reasoning"
        assert item.content
        assert answer.output_text == ""
        assert answer.usage is not None
        assert answer.usage.output_tokens_details.reasoning_tokens == 6
    thought = "".join(e.delta for e in events if e.type == "response.reasoning_text.delta")
    assert [part.text for part in one.output[0].content or ()] == [thought]  # type: ignore[union-attr]
