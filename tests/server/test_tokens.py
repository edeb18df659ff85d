"""/tokenize and /detokenize, against the tokenizer itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from mla_serve.demo.tokenizer import ASSISTANT
from mla_serve.server.protocol.chat import MAX_TOOLS
from tests.server.conftest import MAX_LEN, Server
from tests.server.scripted import UNICODE
from tests.server.test_bad_requests import refused


@pytest.mark.parametrize("text", ["", "abc", UNICODE, "<|stop|>x", "a" * 5000])
def test_a_text_there_and_back(server: Server, checkpoint: Path, text: str) -> None:
    answer = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert answer["tokens"] == AutoTokenizer.from_pretrained(checkpoint)(text)["input_ids"]
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), MAX_LEN)
    assert len(answer["token_strs"]) == answer["count"]
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": text}


def test_a_chat_is_what_the_model_is_given(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    answer = server.post("/tokenize", body).json()
    usage = server.post("/v1/chat/completions", {**body, "max_tokens": 1}).json()["usage"]
    assert answer["count"] == usage["prompt_tokens"]
    assert answer["token_strs"] is None
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json()["prompt"].endswith(ASSISTANT)


def test_a_text_longer_than_the_model_takes(server: Server) -> None:
    """To learn how long it is, is what the route is for."""
    assert server.post("/tokenize", {"prompt": "a" * 200_000}).json()["count"] == 200_000


@pytest.mark.parametrize("body", [{}, {"prompt": 5}, {"messages": []}, {"prompt": "a", "model": "other"}])
def test_what_is_no_text(server: Server, body: dict[str, object]) -> None:
    message = refused(server.post("/tokenize", body), 404 if "model" in body else 400)
    assert "Body" not in message
    assert "list" not in message
    assert "(" not in message


@pytest.mark.parametrize("tokens", [[-1], [10**9], "x", None])
def test_what_are_no_tokens(server: Server, tokens: object) -> None:
    refused(server.post("/detokenize", {"tokens": tokens}), param="tokens")


def test_as_many_tools_as_a_chat_takes_and_no_more(server: Server) -> None:
    tools = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(MAX_TOOLS + 1)]
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    assert server.post("/tokenize", {**body, "tools": tools[1:]}).status_code == 200
    refused(server.post("/tokenize", {**body, "tools": tools}), param="tools")
