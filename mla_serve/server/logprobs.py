"""Log probabilities in the two forms that OpenAI gives them. Minus infinity, which JSON lacks, is written as -9999."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mla_serve.server.generation import Token
from mla_serve.server.text import Tokenizer

FLOOR = -9999.0


def completion_logprobs(tokens: Iterable[Token], tokenizer: Tokenizer) -> dict[str, Any]:
    """/v1/completions: parallel lists; the chosen token is always among the likeliest."""
    result: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token in tokens:
        if token.logprobs is None:
            continue
        text = tokenizer.token_text(token.id)
        logprob = max(token.logprobs.logprob, FLOOR)
        top = {tokenizer.token_text(other): max(value, FLOOR) for other, value in token.logprobs.top}
        result["tokens"].append(text)
        result["token_logprobs"].append(logprob)
        result["top_logprobs"].append({**top, text: logprob})
        result["text_offset"].append(token.offset)
    return result


def chat_logprobs(tokens: Iterable[Token], tokenizer: Tokenizer) -> dict[str, Any]:
    """/v1/chat/completions: one entry a token, each with its bytes, so a character in several tokens can be put together."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": tokenizer.token_text(token_id),
            "logprob": max(logprob, FLOOR),
            "bytes": list(tokenizer.pieces[token_id]),
        }

    content = [
        {
            **entry(token.id, token.logprobs.logprob),
            "top_logprobs": [entry(other, value) for other, value in token.logprobs.top],
        }
        for token in tokens
        if token.logprobs is not None
    ]
    return {"content": content, "refusal": None}
