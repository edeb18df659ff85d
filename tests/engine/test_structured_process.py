"""Structured output and what the first Step tells, through the engine's own process."""

import asyncio
from contextlib import aclosing

import pytest

from mla_serve.engine.base import Structured
from mla_serve.engine.embedded import EmbeddedEngine
from tests.engine.conftest import DEMO
from tests.engine.test_process import collect, idle, request, until


def test_structured_output_through_the_process(settings, tokenizer):
    """Compiled beside the loop: plain requests stream meanwhile, what cannot be followed is refused, the rest is said."""

    async def talk():
        engine = await EmbeddedEngine.start(settings(model=str(DEMO), dtype="float32"))
        try:
            choice, wrong = Structured("choice", '["<think>客单价</think>", "👩‍👩‍👧"]'), Structured("regex", "(")
            plain = asyncio.create_task(collect(engine, request("plain", max_tokens=100)))
            asked = [
                asyncio.create_task(
                    collect(engine, request(f"c{i}", temperature=1.0, seed=i, structured=choice, max_tokens=40))
                )
                for i in range(8)
            ]
            with pytest.raises(ValueError, match="regular expression cannot be followed"):
                await collect(engine, request("wrong", structured=wrong))
            tokens, _ = await collect(engine, request("told", (5, 6, 7, 8), prompt_logprobs=1))
            assert len(tokens) == 20
            answers = await asyncio.gather(*asked)
            async with aclosing(engine.generate(request("again", (5, 6, 7, 8), prompt_logprobs=2))) as steps:
                first = await anext(steps)
            gone = engine.generate(request("gone", structured=Structured("regex", "[a-z]{500}"), max_tokens=900))
            waiting = asyncio.create_task(anext(gone))
            await asyncio.sleep(0)
            await engine.abort("gone")
            await waiting
            assert [step async for step in gone] == []
            await until(idle(engine))
            return answers, await plain, first
        finally:
            await engine.shutdown()

    answers, (plain, _), first = asyncio.run(talk())
    said = {tokenizer.decode(tokens[:-1]) for tokens, last in answers}
    assert said <= {"<think>客单价</think>", "👩‍👩‍👧"}
    assert {last.finish_reason for _, last in answers} == {"stop"}
    assert len(plain) == 100
    assert [len(entry.top) for entry in first.prompt_logprobs] == [2, 2, 2]
    assert first.queue_seconds >= 0
    assert first.prefill_seconds > 0
