"""Which requests can run at all. The client asks before it sends, the engine core asks again before it queues."""

from __future__ import annotations

import math

from mla_serve.engine.base import EngineInfo, Request, Sampling

MAX_LOGPROBS = 100  # alternatives per position; more would be a dump of the vocabulary, not an answer
MAX_BIASES = 1024
BIAS = 100.0  # OpenAI's bound; it decides every choice already
PENALTY = 2.0  # OpenAI's bound


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
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(sampling, name)
        if count is not None and not 0 <= count <= min(MAX_LOGPROBS, info.vocab_size):
            raise ValueError(f"{name} must be from 0 to {min(MAX_LOGPROBS, info.vocab_size)}, got {count}")
    _check_logits(sampling, info)


def _check_logits(sampling: Sampling, info: EngineInfo) -> None:
    """What changes logits. NaN fails every comparison, so it is refused with the rest."""
    if not 0 <= sampling.min_p <= 1:
        raise ValueError(f"min_p must be from 0 to 1, got {sampling.min_p}")
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        raise ValueError(f"min_tokens must be from 0 to max_tokens ({sampling.max_tokens}), got {sampling.min_tokens}")
    for name in ("presence_penalty", "frequency_penalty"):
        if not -PENALTY <= getattr(sampling, name) <= PENALTY:
            raise ValueError(f"{name} must be from {-PENALTY:g} to {PENALTY:g}, got {getattr(sampling, name)}")
    if not 0.01 <= sampling.repetition_penalty <= 100:
        raise ValueError(f"repetition_penalty must be from 0.01 to 100 (1 changes nothing), got {sampling.repetition_penalty}")
    if len(sampling.logit_bias) > MAX_BIASES:
        raise ValueError(f"logit_bias has {len(sampling.logit_bias)} entries, and the limit is {MAX_BIASES}")
    for token, bias in sampling.logit_bias:
        if not 0 <= token < info.vocab_size:
            raise ValueError(f"token id {token} of logit_bias is not in the vocabulary of {info.vocab_size} tokens")
        if not -BIAS <= bias <= BIAS:
            raise ValueError(f"logit_bias must be from {-BIAS:g} to {BIAS:g}, got {bias} for token id {token}")
