"""Which requests can run at all. The client asks before it sends, the engine core asks again before it queues."""

from __future__ import annotations

import math

from mla_serve.engine.base import EngineInfo, Request

MAX_LOGPROBS = 100  # alternatives per position; more would be a dump of the vocabulary, not an answer


def check_request(request: Request, info: EngineInfo) -> None:
    """Raises ValueError, one sentence with the numbers that matter, for a request that can never run."""
    prompt, sampling = request.prompt_token_ids, request.sampling
    if not prompt:
        raise ValueError("the prompt is empty; give at least one token")
    if min(prompt) < 0 or max(prompt) >= info.vocab_size:
        wrong = next(token for token in prompt if not 0 <= token < info.vocab_size)
        raise ValueError(f"token id {wrong} is not in the vocabulary of {info.vocab_size} tokens")
    if sampling.max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {sampling.max_tokens}")
    if len(prompt) + sampling.max_tokens > info.max_model_len:
        raise ValueError(
            f"the limit is {info.max_model_len} tokens for prompt and answer together, and the prompt has {len(prompt)} "
            f"and max_tokens is {sampling.max_tokens}; shorten one of them"
        )
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise ValueError(f"temperature must be a number of at least 0, got {sampling.temperature}")
    if not 0 < sampling.top_p <= 1:
        raise ValueError(f"top_p must be over 0 and at most 1, got {sampling.top_p}")
    if sampling.top_k < 0:
        raise ValueError(f"top_k must be at least 0 (0 keeps every token), got {sampling.top_k}")
    if sampling.seed is not None and not -(2**63) <= sampling.seed < 2**64:
        raise ValueError(f"seed must fit 64 bits, got {sampling.seed}")
    for token in sampling.stop_token_ids:
        if not 0 <= token < info.vocab_size:
            raise ValueError(f"stop token id {token} is not in the vocabulary of {info.vocab_size} tokens")
    if sampling.logprobs is not None and not 0 <= sampling.logprobs <= min(MAX_LOGPROBS, info.vocab_size):
        raise ValueError(f"logprobs must be from 0 to {min(MAX_LOGPROBS, info.vocab_size)}, got {sampling.logprobs}")
