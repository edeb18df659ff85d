"""Answers through the `openai` client, from the real engine: S01, S02, S03, S11 and the parameters."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx
import openai
import pytest

from tests.server.conftest import MODEL, Server
from tests.server.scripted import CHAT, STOP, UNICODE, scripts

STOP_TEXT = "".join(STOP)
CHAT_TEXT = "".join(CHAT)
EOS_ID = 1


def events(server: Server, path: str, body: dict[str, Any]) -> list[Any]:
    """The data of each event; "[DONE]" stays a string."""
    with httpx.stream("POST", server.url + path, json={**body, "stream": True}, timeout=60) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


def texts(chunks: list[Any], choices: int = 1) -> list[str]:
    """What each choice's deltas add up to."""
    found = [""] * choices
    for chunk in chunks[:-1]:
        for choice in chunk["choices"]:
            found[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content") or ""
    return found


async def together(server: Server, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Completions that run at the same time."""
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        return [answer.json() for answer in await asyncio.gather(*(client.post("/v1/completions", json=b) for b in bodies))]


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}], temperature=0)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", CHAT_TEXT, "stop")
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage is not None
    # Start, user, two bytes, assistant; then the script and the end token.
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 5, 10)


def test_chat_streamed(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], temperature=0, stream=True
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    parts = [c.choices[0].delta.content or "" for c in chunks[1:-1]]
    assert "".join(parts) == "".join(CHAT)
    # Token by token, but for those that were ready together when the server came to write: a cut lies between tokens only.
    ends = {len("".join(CHAT[:n])) for n in range(1, len(CHAT) + 1)}
    assert {len("".join(parts[:n])) for n in range(1, len(parts) + 1)} <= ends
    assert parts
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len({c.id for c in chunks}) == 1
    assert {c.object for c in chunks} == {"chat.completion.chunk"}


def test_chat_content_in_parts_and_other_roles(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    one: Any = [{"role": "user", "content": parts}]
    two: Any = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yo"},
        *one,
    ]
    counts = []
    for messages in (one, two):
        answer = client.chat.completions.create(model=MODEL, messages=messages, temperature=0)
        assert answer.choices[0].message.content == CHAT_TEXT
        assert answer.usage is not None
        counts.append(answer.usage.prompt_tokens)
    assert counts == [5, 13]


def test_chat_continues_a_final_message(server: Server) -> None:
    body = {
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<|stop|>"}],
        "continue_final_message": True, "temperature": 0, "max_tokens": 3,
    }  # fmt: skip
    answer = server.post("/v1/chat/completions", body).json()
    assert answer["choices"][0]["message"]["content"] == "".join(STOP[:3])


def test_the_asynchronous_client(server: Server) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            answers = [client.completions.create(model=MODEL, prompt="<|stop|>", temperature=0) for _ in range(8)]
            found = [answer.choices[0].text for answer in await asyncio.gather(*answers)]
            stream = await client.completions.create(model=MODEL, prompt="<|stop|>", temperature=0, stream=True)
            return [*found, "".join([chunk.choices[0].text async for chunk in stream])]

    assert asyncio.run(ask()) == [STOP_TEXT] * 9


def test_prompts_in_every_form_are_choices_of_their_own(server: Server) -> None:
    token = server.complete(prompt="<|stop|>", max_tokens=1, logprobs=0, add_special_tokens=False)["usage"]["prompt_tokens"]
    assert token == 1
    # Ids 7 and 8 are the scripts' own start tokens, in the order of the tokenizer.
    for prompt, expected in (
        ("<|stop|>", [STOP_TEXT]),
        (["<|stop|>", "<|unicode|>"], [STOP_TEXT, UNICODE]),
        ([7], [STOP_TEXT]),
        ([[7], [8]], [STOP_TEXT, UNICODE]),
    ):
        body = {"prompt": prompt, "temperature": 0}
        answer = server.complete(**body)
        assert [choice["text"] for choice in answer["choices"]] == expected
        assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))
        assert answer["usage"]["prompt_tokens"] == len(expected)
        assert texts(events(server, "/v1/completions", body), len(expected)) == expected


def test_echo(server: Server) -> None:
    for prompt in ("x<|stop|>", [[7]]):
        body = {"prompt": prompt, "temperature": 0, "echo": True, "skip_special_tokens": False}
        expected = ("x<|stop|>" if prompt == "x<|stop|>" else "") + STOP_TEXT
        assert server.complete(**body)["choices"][0]["text"] == expected
        assert texts(events(server, "/v1/completions", body)) == [expected]


def test_end_tokens(server: Server) -> None:
    """An end token is counted and never shown, unless it is ignored: then it is a token like others."""
    plain = server.complete(prompt="<|stop|>", temperature=0, skip_special_tokens=False)
    assert (plain["choices"][0]["text"], plain["choices"][0]["finish_reason"]) == (STOP_TEXT, "stop")
    assert plain["usage"]["completion_tokens"] == len(STOP) + 1
    length = len(STOP) + 4
    on = server.complete(prompt="<|stop|>", temperature=0, ignore_eos=True, max_tokens=length, skip_special_tokens=False)
    assert on["choices"][0]["text"].startswith(STOP_TEXT + "<｜end▁of▁sentence｜>")
    assert (on["choices"][0]["finish_reason"], on["usage"]["completion_tokens"]) == ("length", length)
    skipped = server.complete(prompt="<|stop|>", temperature=0, ignore_eos=True, max_tokens=length)
    assert skipped["choices"][0]["text"] == on["choices"][0]["text"].replace("<｜end▁of▁sentence｜>", "")


def test_stop_token_ids(server: Server) -> None:
    logprobs = server.complete(prompt="<|stop|>", temperature=0, max_tokens=4, logprobs=1)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == STOP[:4]
    g = 9 + ord("G")  # the bytes follow nine special tokens
    answer = server.complete(prompt="<|stop|>", temperature=0, stop_token_ids=[g, 0])
    assert answer["choices"][0]["text"] == "ABC DEF"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["stop_reason"] == g


# S01


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_s01_usage_in_streams(server: Server, path: str) -> None:
    body: dict[str, Any] = (
        {"prompt": "<|stop|>"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Hi"}]}
    )
    body |= {"temperature": 0}
    for options in (None, {}, {"include_usage": False}):
        chunks = events(server, path, body if options is None else {**body, "stream_options": options})
        assert chunks[-1] == "[DONE]"
        assert not any("usage" in chunk for chunk in chunks[:-1])
        assert all(chunk["choices"] for chunk in chunks[:-1])
    *chunks, last, done = events(server, path, {**body, "stream_options": {"include_usage": True}})
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"] == server.post(path, body).json()["usage"]
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    response = server.post(path, {**body, "stream_options": {"include_usage": True}})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "stream_options"


# S02


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        ("DEFGHIJ", "ABC ", "DEFGHIJ"),
        ("b,c", "ABC DEFGHIJ then ", "b,c"),
        (["never", "HIJ"], "ABC DEFG", "HIJ"),
        ("DEFGHIX", STOP_TEXT, None),
        ("DEFGHI!", STOP_TEXT, None),
    ],
)
def test_s02_stop_strings(server: Server, stop: Any, text: str, reason: str | None) -> None:
    body = {"prompt": "<|stop|>", "temperature": 0, "stop": stop}
    choice = server.complete(**body)["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, "stop", reason)
    chunks = events(server, "/v1/completions", body)
    assert texts(chunks) == [text]
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    shown = ""
    for chunk in chunks[:-1]:
        shown += chunk["choices"][0]["text"]
        assert text.startswith(shown)


def test_s02_a_stop_string_can_be_kept(server: Server) -> None:
    body = {"prompt": "<|stop|>", "temperature": 0, "stop": "GHI", "include_stop_str_in_output": True}
    assert server.complete(**body)["choices"][0]["text"] == "ABC DEFGHI"
    assert texts(events(server, "/v1/completions", body)) == ["ABC DEFGHI"]


def test_s02_across_utf8_boundaries(server: Server) -> None:
    body = {"prompt": "<|unicode|>", "temperature": 0, "stop": ["‍👧 ď"]}
    choice = server.complete(**body)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("客单价 👩‍👩", "stop")
    assert texts(events(server, "/v1/completions", body)) == ["客单价 👩‍👩"]


# S03


def test_s03_no_half_characters_in_any_delta(server: Server) -> None:
    script = scripts()["<|unicode|>"]
    body = {"prompt": "<|unicode|>", "temperature": 0, "logprobs": 2}
    chunks = events(server, "/v1/completions", body)
    deltas = [chunk["choices"][0]["text"] for chunk in chunks[:-1]]
    assert "".join(deltas) == UNICODE
    assert not any("\ufffd" in delta for delta in deltas)
    assert "\ufffd" not in json.dumps(chunks, ensure_ascii=False)
    whole = server.complete(**body)["choices"][0]
    assert whole["text"] == UNICODE
    assert len(whole["logprobs"]["tokens"]) == len(script) + 1
    bodies = [{"prompt": "<|unicode|>", "temperature": 0, "max_tokens": cut} for cut in range(1, len(script))]
    for cut, answer in enumerate(asyncio.run(together(server, bodies)), 1):
        expected = b"".join(script[:cut]).decode(errors="ignore")
        assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == (expected, "length")
    assert texts(events(server, "/v1/completions", {"prompt": "<|unicode|>", "temperature": 0, "max_tokens": 1})) == [""]


def test_s03_chat_logprobs_carry_the_bytes(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    tokens = logprobs.content
    assert b"".join(bytes(token.bytes or []) for token in tokens[:-1]).decode() == CHAT_TEXT
    for token in tokens:
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token == token.token  # greedy
        assert token.top_logprobs[0].logprob == token.logprob <= 0
        assert [t.logprob for t in token.top_logprobs] == sorted((t.logprob for t in token.top_logprobs), reverse=True)


def test_completion_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="<|stop|>", temperature=0, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == [*STOP, "<｜end▁of▁sentence｜>"]
    assert logprobs.text_offset == [len("".join(STOP[:i])) for i in range(len(STOP) + 1)]
    assert logprobs.top_logprobs is not None
    assert logprobs.token_logprobs is not None
    for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert len(top) == 2
        assert top[token] == logprob == max(top.values())
    without = client.completions.create(model=MODEL, prompt="<|stop|>", temperature=0)
    assert without.choices[0].logprobs is None


# S11


@pytest.mark.parametrize("stream", [False, True])
def test_s11_n_choices(server: Server, stream: bool) -> None:
    body = {"prompt": "XY", "n": 2, "max_tokens": 6, "ignore_eos": True, "seed": 5}
    whole = server.complete(**body)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1]
    assert whole["choices"][0]["text"] != whole["choices"][1]["text"]
    usage = {"prompt_tokens": 2, "completion_tokens": 12, "total_tokens": 14, "prompt_tokens_details": {"cached_tokens": 0}}
    assert whole["usage"] == usage
    if stream:
        chunks = events(server, "/v1/completions", {**body, "stream_options": {"include_usage": True}})
        ends = [(c["index"], c["finish_reason"]) for chunk in chunks[:-1] for c in chunk["choices"] if c["finish_reason"]]
        assert sorted(ends) == [(0, "length"), (1, "length")]
        assert chunks[-2]["usage"] == whole["usage"]
        assert texts(chunks, 2) == [choice["text"] for choice in whole["choices"]]


def test_s11_n_times_prompts_in_chat_and_completions(server: Server) -> None:
    answer = server.complete(prompt=["<|stop|>", "<|unicode|>"], n=2, temperature=0)
    assert [choice["text"] for choice in answer["choices"]] == [STOP_TEXT, STOP_TEXT, UNICODE, UNICODE]
    assert answer["usage"]["prompt_tokens"] == 2
    chat = {"messages": [{"role": "user", "content": "Hi"}], "n": 3, "temperature": 0}
    whole = server.post("/v1/chat/completions", chat).json()
    assert [choice["message"]["content"] for choice in whole["choices"]] == [CHAT_TEXT] * 3
    chunks = events(server, "/v1/chat/completions", chat)
    assert texts(chunks, 3) == [CHAT_TEXT] * 3
    assert [c["choices"][0]["index"] for c in chunks if c != "[DONE]" and c["choices"][0]["delta"].get("role")] == [0, 1, 2]


@pytest.mark.parametrize("field", [{"n": 100_000}, {"logprobs": 100_000}, {"n": 128, "prompt": ["a"] * 100}])
def test_s11_too_many_is_400(server: Server, field: dict[str, Any]) -> None:
    response = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1, **field})
    assert response.status_code == 400
    assert next(iter(field)) in response.json()["error"]["message"]


# Sampling


def test_sampling_parameters(server: Server) -> None:
    body = {"prompt": "XY", "max_tokens": 12, "ignore_eos": True, "skip_special_tokens": False}
    greedy = server.complete(**body, temperature=0)["choices"][0]["text"]
    assert server.complete(**body, top_k=1)["choices"][0]["text"] == greedy
    assert server.complete(**body, top_p=1e-6)["choices"][0]["text"] == greedy
    seeded = [server.complete(**body, seed=seed)["choices"][0]["text"] for seed in (1, 1, 2, -(2**63), 2**63 - 1)]
    assert seeded[0] == seeded[1]
    assert len(set(seeded)) == 4


def test_s08_a_seeded_request_does_not_depend_on_its_batch(server: Server) -> None:
    body = {"prompt": "XY", "max_tokens": 24, "ignore_eos": True, "seed": 42}
    alone = server.complete(**body)["choices"][0]["text"]

    others = {"prompt": "other", "max_tokens": 40, "ignore_eos": True}
    answers = asyncio.run(together(server, [body if i == 3 else others for i in range(8)]))
    assert answers[3]["choices"][0]["text"] == alone


def test_streamed_text_is_the_whole_text(server: Server) -> None:
    """Random prompts, stops, seeds and lengths, many at once; the stops are cut from what the model really says."""
    rng = random.Random(7)

    def body() -> dict[str, Any]:
        made: dict[str, Any] = {
            "prompt": "".join(rng.choices("XY ,客ď!", k=rng.randint(1, 12))) + rng.choice(["", "<|stop|>", "<|unicode|>"]),
            "seed": rng.randrange(2**32), "max_tokens": rng.randint(1, 60), "temperature": rng.choice([0, 0.7, 1.3]),
            "ignore_eos": rng.random() < 0.5, "skip_special_tokens": rng.random() < 0.5,
        }  # fmt: skip
        return {**made, "logprobs": 1} if rng.random() < 0.3 else made

    async def run() -> int:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:

            async def whole(made: dict[str, Any]) -> dict[str, Any]:
                response = await client.post("/v1/completions", json=made)
                assert response.status_code == 200, response.text
                choice: dict[str, Any] = response.json()["choices"][0]
                return choice

            async def check(made: dict[str, Any]) -> bool:
                text = (await whole(made))["text"]
                if len(text) > 3:
                    start = rng.randrange(len(text))
                    made["stop"] = [text[start : start + rng.randint(1, 4)], "zzz"]
                plain = await whole(made)
                streamed, reason, tokens = "", None, []
                async with client.stream("POST", "/v1/completions", json={**made, "stream": True}) as response:
                    async for line in response.aiter_lines():
                        if line.startswith("data: {"):
                            choice = json.loads(line[6:])["choices"][0]
                            streamed += choice["text"]
                            reason = choice["finish_reason"]
                            tokens += (choice["logprobs"] or {"tokens": []})["tokens"]
                assert (streamed, reason) == (plain["text"], plain["finish_reason"]), made
                if plain["logprobs"]:
                    assert tokens == plain["logprobs"]["tokens"]
                if "stop" in made and reason == "stop" and plain["stop_reason"] is not None:
                    assert not any(stop in streamed for stop in made["stop"])
                return plain["stop_reason"] is not None

            return sum([sum(await asyncio.gather(*(check(body()) for _ in range(20)))) for _ in range(5)])

    assert asyncio.run(run()) > 50  # most stops were met
