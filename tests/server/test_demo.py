"""The demo model answers over HTTP, word for word: both dtypes, whole and in chunks and pages of 16, all questions at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from mla_serve.demo import MODEL_DIR, Question, questions
from tests.server.conftest import MODEL, Server, start_server

WHOLE: dict[str, Any] = {}
CHUNKED: dict[str, Any] = {"max_tokens": 16, "page_size": 16, "context_chunk": 16}


@pytest.fixture(
    scope="module",
    params=[("float32", WHOLE), ("float32", CHUNKED), ("bfloat16", WHOLE), ("bfloat16", CHUNKED)],
    ids=["fp32-whole", "fp32-chunks", "bf16-whole", "bf16-chunks"],
)
def demo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    dtype, engine = request.param
    log: Path = tmp_path_factory.mktemp("demo") / "server.log"
    running = start_server(log, MODEL_DIR, engine={"dtype": dtype, "threads": 1, "num_pages": 4096, **engine})
    try:
        yield running.wait()
    finally:
        running.close()


async def answer(client: openai.AsyncOpenAI, question: Question, stream: bool) -> str:
    """With no sampling parameter at all: the model's generation_config.json makes it greedy."""
    messages: Any = question.messages()
    if not stream:
        whole = await client.chat.completions.create(model=MODEL, messages=messages)
        return whole.choices[0].message.content or ""
    chunks = await client.chat.completions.create(model=MODEL, messages=messages, stream=True)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])


def test_the_demo_model_answers_word_for_word(demo: Server) -> None:
    asked = questions()
    assert len(asked) >= 150
    assert sum(question.long for question in asked) >= 30

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0, timeout=280) as client:
            return await asyncio.gather(*(answer(client, question, index % 2 == 0) for index, question in enumerate(asked)))

    answers = asyncio.run(run())
    wrong = [(q.prompt[-80:], text) for q, text in zip(asked, answers, strict=True) if text != q.answer]
    assert len(wrong) <= len(asked) * 0.05, wrong
    assert not any(prompt == "What is MLA?" for prompt, _ in wrong)
    assert not any(question.long and text != question.answer for question, text in zip(asked, answers, strict=True)), wrong
    load = demo.until_idle(5)
    assert load["kv_pages_free"] == load["kv_pages_total"]
