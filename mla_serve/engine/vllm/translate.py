"""From our requests to vLLM's parameters, and from its outputs to Steps."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mla_serve.engine.base import Request, Sampling, Step, Structured, TokenLogprobs

__all__ = ["Reader", "end_tokens", "sampling_params"]


class Reader:
    """Turns one request's outputs, new tokens each, into Steps."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._count = 0
        self._timed = False

    def step(self, output: Any) -> Step | None:
        """None for an output without news."""
        completion = output.outputs[0]
        ids = list(completion.token_ids)
        reason = completion.finish_reason
        if not ids and reason is None:
            return None
        self._count += len(ids)
        sampling, request = self._request.sampling, self._request
        first = not self._timed
        self._timed = True
        return Step(
            id=request.id,
            token_ids=ids,
            prompt_tokens=len(request.prompt_token_ids),
            completion_tokens=self._count,
            logprobs=None if sampling.logprobs is None else _logprobs(ids, completion.logprobs or (), sampling.logprobs),
            finish_reason=reason if reason in (None, "stop", "length", "abort") else "error",
            error=None if reason in (None, "stop", "length", "abort") else f"vLLM ended it: {reason}",
            cached_tokens=output.num_cached_tokens or 0,
            prompt_logprobs=_prompt_logprobs(request, output.prompt_logprobs) if first else None,
            **(_times(output.metrics) if first else {}),
        )

    def failed(self, reason: str) -> Step:
        request = self._request
        return Step(request.id, [], len(request.prompt_token_ids), self._count, finish_reason="error", error=reason)


def sampling_params(asked: Sampling) -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        max_tokens=asked.max_tokens,
        min_tokens=asked.min_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        min_p=asked.min_p,
        seed=asked.seed,
        stop_token_ids=list(asked.stop_token_ids),
        ignore_eos=asked.ignore_eos,
        logprobs=asked.logprobs,
        prompt_logprobs=asked.prompt_logprobs,
        logit_bias=dict(asked.logit_bias) or None,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        repetition_penalty=asked.repetition_penalty,
        structured_outputs=None if asked.structured is None else _structured(asked.structured),
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _structured(asked: Structured) -> Any:
    from vllm.sampling_params import StructuredOutputsParams

    match asked.kind:
        case "json_object":
            return StructuredOutputsParams(json_object=True)
        case "json_schema":
            return StructuredOutputsParams(json=asked.value)
        case "regex":
            return StructuredOutputsParams(regex=asked.value)
        case "choice":
            return StructuredOutputsParams(choice=json.loads(asked.value))


def _logprobs(ids: Sequence[int], told: Sequence[Mapping[int, Any]], n: int) -> list[TokenLogprobs]:
    """vLLM gives the chosen token beside the N likeliest, each with its rank."""
    return [_position(token_id, entries, n) for token_id, entries in zip(ids, told, strict=True)]


def _prompt_logprobs(request: Request, told: Sequence[Mapping[int, Any] | None] | None) -> list[TokenLogprobs] | None:
    n = request.sampling.prompt_logprobs
    if n is None or told is None:
        return None
    pairs = zip(request.prompt_token_ids[1:], told[1:], strict=True)
    return [_position(token_id, entries or {}, n) for token_id, entries in pairs]


def _position(token_id: int, entries: Mapping[int, Any], n: int) -> TokenLogprobs:
    ranked = sorted((entry.rank or 0, other, entry.logprob) for other, entry in entries.items())
    return TokenLogprobs(entries[token_id].logprob, [(other, logprob) for rank, other, logprob in ranked if rank <= n][:n])


def _times(metrics: Any) -> dict[str, float]:
    if metrics is None or not metrics.scheduled_ts:
        return {}
    return {
        "queue_seconds": metrics.scheduled_ts - metrics.queued_ts,
        "prefill_seconds": max(0.0, metrics.first_token_ts - metrics.scheduled_ts),
    }


def end_tokens(model: Any) -> list[int]:
    """The model's end tokens, of its generation config or else of its config."""
    found = model.try_get_generation_config().get("eos_token_id", getattr(model.hf_config, "eos_token_id", None))
    return list(found) if isinstance(found, list | tuple) else [] if found is None else [int(found)]
