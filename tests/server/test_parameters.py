"""Every parameter has its effect, through the real client, sync and async; what OpenAI's types say about the answers holds."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from transformers import AutoTokenizer

from tests.server.conftest import MODEL, Server
from tests.server.scripted import STOP

SCRIPT: dict[str, Any] = {"prompt": "<|stop|>", "temperature": 0}
FREE: dict[str, Any] = {"prompt": "XY", "max_tokens": 24, "ignore_eos": True, "skip_special_tokens": False}


def text(server: Server, **body: Any) -> str:
    found: str = server.complete(**body)["choices"][0]["text"]
    return found


def tokens_of(server: Server, **body: Any) -> list[str]:
    found: list[str] = server.complete(**body, logprobs=0)["choices"][0]["logprobs"]["tokens"]
    return found


def test_logit_bias_bans_and_forces(server: Server, checkpoint: Path) -> None:
    x = server.post("/tokenize", {"prompt": "x", "add_special_tokens": False}).json()["tokens"][0]
    assert text(server, prompt="XY", max_tokens=5, temperature=0, logit_bias={str(x): 100}) == "xxxxx"
    first = AutoTokenizer.from_pretrained(checkpoint).convert_tokens_to_ids(STOP[0].replace(" ", "Ġ"))
    assert text(server, **SCRIPT, max_tokens=3).startswith(STOP[0])
    assert not text(server, **SCRIPT, max_tokens=3, logit_bias={str(first): -100}).startswith(STOP[0])


def test_min_tokens_holds_the_end_back(server: Server) -> None:
    ended = server.complete(**SCRIPT)
    assert ended["choices"][0]["finish_reason"] == "stop"
    usual = ended["usage"]["completion_tokens"]
    longer = server.complete(**SCRIPT, min_tokens=usual + 5)
    assert longer["usage"]["completion_tokens"] >= usual + 5


@pytest.mark.parametrize("penalty", [{"frequency_penalty": 2}, {"presence_penalty": 2}, {"repetition_penalty": 5.0}])
def test_penalties_make_for_variety(server: Server, penalty: dict[str, float]) -> None:
    x = server.post("/tokenize", {"prompt": "x", "add_special_tokens": False}).json()["tokens"][0]
    drawn = {**FREE, "temperature": 0, "logit_bias": {str(x): 6}, "max_tokens": 40}
    plain, varied = tokens_of(server, **drawn), tokens_of(server, **drawn, **penalty)
    assert varied.count("x") < plain.count("x")


def test_top_k_top_p_and_min_p_of_one_token_are_greedy(server: Server) -> None:
    greedy = text(server, **FREE, temperature=0)
    for cut in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert text(server, **FREE, temperature=1.0, seed=5, **cut) == greedy


def test_seeds_of_64_bits_repeat_whatever_runs_beside(server: Server) -> None:
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def one(seed: int | None) -> str:
                body = {"ignore_eos": True, "skip_special_tokens": False}
                made = await client.completions.create(model=MODEL, prompt="XY", max_tokens=24, seed=seed, extra_body=body)
                return made.choices[0].text

            found = await asyncio.gather(*(one(seed) for seed in (2**63 - 1, -(2**63), None, 7, None, 7)))
        return list(found)

    crowd = asyncio.run(run())
    for seed, found in zip((2**63 - 1, -(2**63), 7), (crowd[0], crowd[1], crowd[3]), strict=True):
        assert text(server, **FREE, seed=seed) == found
    assert crowd[3] == crowd[5]


def test_prompt_logprobs(server: Server) -> None:
    answer = server.complete(prompt="abcd", max_tokens=1, prompt_logprobs=3)["choices"][0]["prompt_logprobs"]
    ids = server.post("/tokenize", {"prompt": "abcd"}).json()["tokens"]
    assert answer[0] is None
    assert len(answer) == len(ids) == 4
    for token, entries in zip(ids[1:], answer[1:], strict=True):
        assert str(token) in entries
        assert len(entries) in (3, 4)
        assert all(entry["logprob"] <= 0 for entry in entries.values())
        best = max(entries.values(), key=lambda entry: entry["logprob"])
        assert best["logprob"] >= entries[str(token)]["logprob"]


def test_echo_with_logprobs_scores_the_prompt_as_the_answer_was_scored(server: Server) -> None:
    """The log-probabilities of a text are the same whether it is generated or given."""
    made = server.complete(prompt="ab", max_tokens=6, temperature=0, logprobs=1, ignore_eos=True, skip_special_tokens=False)
    choice = made["choices"][0]
    ids = server.post("/tokenize", {"prompt": "ab"}).json()["tokens"]
    given = ids + [server.post("/tokenize", {"prompt": t, "add_special_tokens": False}).json()["tokens"][0] for t in ("c", "d")]
    scored = server.complete(prompt=given, max_tokens=1, echo=True, logprobs=1)["choices"][0]
    assert scored["text"].startswith("abcd")
    assert scored["logprobs"]["tokens"][:4] == ["a", "b", "c", "d"]
    assert scored["logprobs"]["token_logprobs"][0] is None
    assert scored["logprobs"]["text_offset"][:5] == [0, 1, 2, 3, 4]
    again = server.complete(prompt="ab", max_tokens=1, logprobs=5, temperature=0)["choices"][0]["logprobs"]
    top = again["top_logprobs"][0]
    assert choice["logprobs"]["token_logprobs"][0] == pytest.approx(again["token_logprobs"][0], abs=1e-4)
    if "c" in top:
        assert scored["logprobs"]["token_logprobs"][2] == pytest.approx(top["c"], abs=1e-4)


def test_echo_streams_too(server: Server, client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model=MODEL, prompt="abc", max_tokens=3, echo=True, logprobs=1, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks).startswith("abc")
    first = chunks[0].choices[0].logprobs
    assert first is not None
    assert (first.tokens or [])[:3] == ["a", "b", "c"]


def test_the_prefix_cache_is_counted(server: Server) -> None:
    prompt = "The same long beginning. " * 8
    server.complete(prompt=prompt + "A", max_tokens=1)
    usage = server.complete(prompt=prompt + "B", max_tokens=1)["usage"]
    assert 0 < usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]


def test_user_and_priority_are_accepted(client: openai.OpenAI) -> None:
    made = client.completions.create(model=MODEL, prompt="a", max_tokens=1, user="me", extra_body={"priority": -1})
    assert made.choices[0].finish_reason == "length"


def test_answers_are_what_the_openai_package_says(server: Server) -> None:
    """The client builds its models without validating; these validate."""
    Completion.model_validate(server.post("/v1/completions", {"prompt": "ab", "max_tokens": 3, "logprobs": 2}).json())
    chat = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 2, "max_tokens": 4}
    whole = ChatCompletion.model_validate(server.post("/v1/chat/completions", chat).json())
    assert whole.choices[0].logprobs is not None
    assert all(math.isfinite(entry.logprob) for entry in whole.choices[0].logprobs.content or ())
    streamed = server.post("/v1/chat/completions", {**chat, "stream": True, "stream_options": {"include_usage": True}}).text
    chunks = [line[6:] for line in streamed.splitlines() if line.startswith("data: {")]
    assert chunks
    for chunk in chunks:
        ChatCompletionChunk.model_validate_json(chunk)
