"""Log probabilities in the two forms that OpenAI gives them. Minus infinity, which JSON lacks, is written as -9999."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mla_serve.engine.base import TokenLogprobs
from mla_serve.server.generation import Token
from mla_serve.server.text import Tokenizer

FLOOR = -9999.0


Lists = dict[str, list[Any]]


def echoed_logprobs(prompt: Sequence[int], told: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> tuple[Lists, int]:
    """/v1/completions with `echo`: the prompt's part of the lists, and the length of its text. Its first token has none."""
    result: Lists = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    detokenizer, offset = tokenizer.detokenizer(), 0
    for token_id, logprobs in zip(prompt, (None, *told), strict=True):
        text = tokenizer.token_text(token_id)
        result["tokens"].append(text)
        result["text_offset"].append(offset)
        result["token_logprobs"].append(logprobs and max(logprobs.logprob, FLOOR))
        result["top_logprobs"].append(logprobs and _top(logprobs, text, tokenizer))
        offset += len(detokenizer.push(token_id))
    return result, offset


def prompt_logprobs(prompt: Sequence[int], told: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> list[dict[str, Any] | None]:
    """vLLM's form: for each token of the prompt but the first, token id -> logprob and text, the token itself included."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {"logprob": max(logprob, FLOOR), "decoded_token": tokenizer.token_text(token_id)}

    return [
        None,
        *(
            {str(other): entry(other, value) for other, value in ((token_id, logprobs.logprob), *logprobs.top)}
            for token_id, logprobs in zip(prompt[1:], told, strict=True)
        ),
    ]


def _top(logprobs: TokenLogprobs, text: str, tokenizer: Tokenizer) -> dict[str, float]:
    top = {tokenizer.token_text(other): max(value, FLOOR) for other, value in logprobs.top}
    return {**top, text: max(logprobs.logprob, FLOOR)}


def completion_logprobs(tokens: Iterable[Token], tokenizer: Tokenizer, start: int = 0) -> Lists:
    """/v1/completions: parallel lists; the chosen token is always among the likeliest. `start` is where the text begins."""
    result: Lists = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token in tokens:
        if token.logprobs is None:
            continue
        text = tokenizer.token_text(token.id)
        result["tokens"].append(text)
        result["token_logprobs"].append(max(token.logprobs.logprob, FLOOR))
        result["top_logprobs"].append(_top(token.logprobs, text, tokenizer))
        result["text_offset"].append(start + token.offset)
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
