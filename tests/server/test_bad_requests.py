"""Requests that cannot be served: S04 to S09. Each gets one sentence in OpenAI's shape, and the next request works."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.server.conftest import MAX_LEN, MODEL, Server
from tests.server.scripted import STOP

JSON = {"Content-Type": "application/json"}
ROUTES = ["/v1/completions", "/v1/chat/completions"]


def body_for(path: str, **fields: Any) -> dict[str, Any]:
    base: dict[str, Any] = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    return {**base, **fields}


def refused(response: httpx.Response, status: int = 400, param: str | None = None) -> str:
    """Checks the error's shape; its message."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert len(response.content) < 16 * 1024
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    if param is not None:
        assert error["param"].startswith(param)
        assert error["param"] in error["message"]
    message: str = error["message"]
    assert message.endswith(".")
    return message


@pytest.fixture(autouse=True)
def _still_serves(server: Server) -> Iterator[None]:
    yield
    assert server.complete(prompt="<|stop|>", temperature=0, max_tokens=2)["choices"][0]["text"] == "".join(STOP[:2])


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "null",
        '"x"',
        "{bad",
        "",
        "1",
        "[" * 100_000,
        '{"prompt": "\\ud800"}',
        '{"temperature": NaN}',
        '{"seed": ' + "9" * 5000 + "}",
    ],
)
def test_s04_bodies_that_are_no_objects(server: Server, path: str, content: str) -> None:
    refused(httpx.post(server.url + path, content=content, headers=JSON, timeout=60))


@pytest.mark.parametrize("path", ROUTES)
def test_s04_no_content_type(server: Server, path: str) -> None:
    message = refused(httpx.post(server.url + path, content=json.dumps(body_for(path)), timeout=60))
    assert "Content-Type: application/json" in message


@pytest.mark.parametrize(
    ("path", "field", "value", "param"),
    [
        ("/v1/completions", "prompt", [{"secret": "x"}] * 10_000, "prompt"),
        ("/v1/completions", "prompt", ["secret"] * 9_999 + [1], "prompt"),
        ("/v1/completions", "prompt", [1, "secret"], "prompt"),
        ("/v1/completions", "prompt", [True], "prompt"),
        ("/v1/completions", "stop", [1] * 10_000, "stop"),
        ("/v1/completions", "stop_token_ids", ["secret"] * 10_000, "stop_token_ids[0]"),
        ("/v1/completions", "stream", "secret", "stream"),
        ("/v1/completions", "top_p", "0.5", "top_p"),
        ("/v1/completions", "temperature", 3, "temperature"),
        ("/v1/completions", "ignore_eos", 1, "ignore_eos"),
        ("/v1/chat/completions", "messages", [1] * 10_000, "messages[0]"),
        ("/v1/chat/completions", "messages", [{"role": "user", "content": 5}] * 10_000, "messages[0].content"),
        ("/v1/chat/completions", "messages", [{"role": "secret", "content": "a"}], "messages[0].role"),
        ("/v1/chat/completions", "messages", [{"content": "a"}], "messages[0].role"),
        ("/v1/chat/completions", "messages", [{"role": "user"}], "messages[0].content"),
        ("/v1/chat/completions", "messages", [{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content"),
        ("/v1/chat/completions", "messages", {"role": "user"}, "messages"),
        ("/v1/chat/completions", "logprobs", 3, "logprobs"),
        ("/v1/chat/completions", "top_logprobs", 3, "top_logprobs"),
        ("/v1/chat/completions", "chat_template_kwargs", {"tokenize": True}, "chat_template_kwargs"),
        ("/v1/chat/completions", "chat_template_kwargs", {"self": 1}, "chat_template_kwargs"),
    ],
)
def test_s04_wrong_types_name_the_field_and_nothing_else(server: Server, path: str, field: str, value: Any, param: str) -> None:
    message = refused(server.post(path, body_for(path, **{field: value})), param=param)
    assert "secret" not in message
    assert len(message) < 200


def test_a_field_that_is_missing(server: Server) -> None:
    assert refused(server.post("/v1/completions", {}), param="prompt") == "prompt is required."
    assert refused(server.post("/v1/chat/completions", {}), param="messages") == "messages is required."


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], [[], [5]], ["a", ""]])
def test_s05_empty_prompts(server: Server, prompt: Any) -> None:
    assert "empty" in refused(server.post("/v1/completions", {"prompt": prompt}), param="prompt")


def test_s05_no_messages(server: Server) -> None:
    refused(server.post("/v1/chat/completions", {"messages": []}), param="messages")


@pytest.mark.parametrize("prompt_tokens", [MAX_LEN, MAX_LEN + 1])
def test_s06_prompts_that_do_not_fit(server: Server, prompt_tokens: int) -> None:
    for prompt in ([20] * prompt_tokens, "x" * prompt_tokens):
        message = refused(server.post("/v1/completions", {"prompt": prompt}))
        assert f"{MAX_LEN} tokens" in message
        assert f"the prompt has {prompt_tokens} tokens" in message


def test_s06_the_answer_does_not_fit(server: Server) -> None:
    message = refused(server.post("/v1/completions", {"prompt": [20] * 8, "max_tokens": MAX_LEN - 3}), param="max_tokens")
    assert f"{MAX_LEN} tokens" in message
    assert "8 tokens" in message
    assert f"{MAX_LEN - 3} more" in message
    fits = server.complete(prompt=[20] * (MAX_LEN - 1), max_tokens=1)
    assert fits["usage"]["total_tokens"] == MAX_LEN


@pytest.mark.parametrize("path", ROUTES)
def test_s07_max_tokens(server: Server, path: str) -> None:
    expected = server.post(path, body_for(path, temperature=0)).json()["choices"]
    assert server.post(path, body_for(path, temperature=0, max_tokens=None)).json()["choices"] == expected
    for value in (-1, 0, "5", 5.5, True):
        refused(server.post(path, body_for(path, max_tokens=value)), param="max_tokens")
    # Too large is refused on both routes, with the true limit.
    assert f"{MAX_LEN} tokens" in refused(server.post(path, body_for(path, max_tokens=100_000_000)), param="max_tokens")
    content = json.dumps(body_for(path)).replace("}", ', "max_tokens": 1e8}', 1) if path == ROUTES[0] else None
    if content is not None:
        refused(httpx.post(server.url + path, content=content, headers=JSON, timeout=60), param="max_tokens")


def test_s07_max_completion_tokens(server: Server) -> None:
    path = "/v1/chat/completions"
    for fields in ({"max_completion_tokens": 2}, {"max_completion_tokens": 2, "max_tokens": 4}):
        answer = server.post(path, body_for(path, **fields)).json()
        assert answer["usage"]["completion_tokens"] == 2
        assert answer["choices"][0]["finish_reason"] == "length"
    refused(server.post(path, body_for(path, max_completion_tokens=-1)), param="max_completion_tokens")
    refused(server.post(path, body_for(path, max_completion_tokens=100_000_000)), param="max_completion_tokens")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {"191222": -100}),
        ("logit_bias", {"-1": 5}),
        ("logit_bias", {"abc": 1}),
        ("stop_token_ids", [100_000]),
        ("stop_token_ids", [-1]),
        ("seed", 2**64),
        ("seed", "5"),
        ("logit_bias", {"5": "x"}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {str(i): 1 for i in range(2000)}),
    ],
)
def test_s08_ids_and_seeds_out_of_range(server: Server, field: str, value: Any) -> None:
    for path in ROUTES:
        refused(server.post(path, body_for(path, **{field: value})), param=field)


NO_SCHEMA = {"type": "object", "properties": {"foo": "bar"}}
MALFORMED = [
    ("response_format", {"type": "json_schema"}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x"}}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": NO_SCHEMA}}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x y", "schema": {}}}),
    ("response_format", {"type": "xml"}),
    ("structured_outputs", {}),
    ("structured_outputs", {"regex": "("}),
    ("structured_outputs", {"regex": "a", "choice": ["b"]}),
    ("structured_outputs", {"choice": []}),
    ("structured_outputs", {"choice": [""]}),
    ("structured_outputs", {"json": "{"}),
    ("structured_outputs", {"json": "[1]"}),
    ("guided_json", {"type": 5}),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), MALFORMED)
def test_s09_malformed_structures(server: Server, field: str, value: Any) -> None:
    for path in ROUTES:
        refused(server.post(path, body_for(path, max_tokens=5, **{field: value})))


def test_two_structures_exclude_each_other(server: Server) -> None:
    body = body_for("/v1/completions", guided_regex="a", response_format={"type": "json_object"})
    assert "exclude" in refused(server.post("/v1/completions", body), param="guided_regex")


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [TOOL]},  # the model writes calls in no known format
        {"tools": [TOOL], "tool_choice": "auto"},
        {"tools": [TOOL, TOOL], "tool_choice": "required"},
        {"tools": [{"type": "function"}]},
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        {"tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": "always"},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        {"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}},
    ],
)
def test_tools_that_cannot_be_offered(server: Server, fields: dict[str, Any]) -> None:
    refused(server.post("/v1/chat/completions", body_for("/v1/chat/completions", **fields)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("min_tokens", 9), ("min_p", 1.5), ("repetition_penalty", 0), ("frequency_penalty", 3), ("presence_penalty", -3),
        ("prompt_logprobs", 100_000), ("priority", 2**40), ("n", 100_000),
    ],
)  # fmt: skip
def test_parameters_out_of_range(server: Server, field: str, value: Any) -> None:
    for path in ROUTES:
        refused(server.post(path, body_for(path, max_tokens=8, **{field: value})), param=field)


@pytest.mark.parametrize(("prompt"), [[100_000], [-1], [[5], [100_000]]])
def test_token_ids_outside_the_vocabulary(server: Server, prompt: Any) -> None:
    refused(server.post("/v1/completions", {"prompt": prompt}), param="prompt")
    refused(server.post("/v1/completions", {"prompt": prompt, "echo": True}), param="prompt")


@pytest.mark.parametrize(
    ("path", "field", "asks", "harmless"),
    [
        ("/v1/completions", "best_of", 2, 1),
        ("/v1/completions", "suffix", "x", ""),
        ("/v1/completions", "bad_words", ["x"], []),
        ("/v1/completions", "allowed_token_ids", [1], None),
        ("/v1/completions", "truncate_prompt_tokens", 5, None),
        ("/v1/completions", "use_beam_search", True, False),
        ("/v1/completions", "guided_grammar", "root ::= 'a'", None),
        ("/v1/chat/completions", "functions", [{"name": "f"}], []),
        ("/v1/chat/completions", "modalities", ["audio"], ["text"]),
        ("/v1/chat/completions", "chat_template", "{{ x }}", None),
    ],
)
def test_what_is_not_there_is_refused_only_where_it_asks_for_something(
    server: Server, path: str, field: str, asks: Any, harmless: Any
) -> None:
    assert "not supported" in refused(server.post(path, body_for(path, **{field: asks})), param=field)
    response = server.post(path, body_for(path, max_tokens=1, **{field: harmless}))
    assert response.status_code == 200, response.text
    assert "x-mla-serve-ignored" not in response.headers


@pytest.mark.parametrize("stream", [False, True])
def test_unknown_fields_are_ignored_and_named(server: Server, stream: bool) -> None:
    fields = {"store": True, "metadata": {"a": 1}, "bad\r\nname": 1, "é": 1, "max_tokens": 1, "stream": stream}
    for path in ROUTES:
        response = server.post(path, body_for(path, **fields))
        assert response.status_code == 200
        assert response.headers["x-mla-serve-ignored"] == "store, metadata"


def test_an_unknown_model_is_404_with_the_known_one(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as found:
        client.completions.create(model="gpt-9", prompt="a")
    assert found.value.code == "model_not_found"
    assert MODEL in found.value.message
    assert "gpt-9" not in found.value.message


def test_a_refusal_by_the_chat_template(server: Server) -> None:
    messages = [{"role": "tool", "content": "x", "tool_call_id": "1"}]
    message = refused(server.post("/v1/chat/completions", {"messages": messages}), param="messages")
    assert "Unknown role tool" in message


@pytest.mark.parametrize("stream", [False, True])
def test_errors_before_the_first_token_have_a_status_in_streams_too(server: Server, stream: bool) -> None:
    refused(server.post("/v1/completions", {"prompt": [20] * MAX_LEN, "stream": stream}))
    refused(server.post("/v1/chat/completions", {"messages": [], "stream": stream}))


def test_paths_and_methods(server: Server) -> None:
    refused(server.get("/nope"), 404)
    refused(server.get("/v1/models/nope"), 404)
    refused(server.get("/health/"), 404)
    for path in ROUTES:
        response = server.get(path)
        refused(response, 405)
        assert response.headers["allow"] == "POST"


def test_a_body_that_is_too_large(server: Server) -> None:
    big = b'{"prompt": "' + b"x" * (9 * 1024 * 1024) + b'"}'
    refused(httpx.post(server.url + "/v1/completions", content=big, headers=JSON, timeout=60), 413)
    pieces = (big[i : i + 2**20] for i in range(0, len(big), 2**20))
    refused(httpx.post(server.url + "/v1/completions", content=pieces, headers=JSON, timeout=60), 413)


@pytest.mark.parametrize("token_id", [-1, 291, -121645100408831999, 2**70])
def test_an_echo_of_what_is_no_token(server: Server, token_id: int) -> None:
    response = server.post("/v1/completions", {"prompt": [7, token_id], "echo": True, "max_tokens": 1})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith("prompt")
