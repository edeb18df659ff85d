"""The Engine protocol: token ids in, token ids out. Text, stop strings and HTTP live in the server, once for all engines.

The types are msgspec structs, so that the same objects cross the socket between server and engine process.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Literal, Protocol

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]


StructureKind = Literal["json_object", "json_schema", "regex", "choice"]


class Structured(msgspec.Struct, frozen=True):
    """A grammar that the output must follow: any JSON object, a JSON schema (its text), a regular expression, or one of a list.

    `value` is the schema's JSON text or the expression; for "choice" a JSON list of strings; unused for "json_object".
    """

    kind: StructureKind
    value: str = ""


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How to pick tokens. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 keep every token.

    `seed` makes a request's tokens repeatable whatever else is in the batch. `stop_token_ids` end the request (the id is the
    last one delivered), as do the model's own end tokens unless `ignore_eos`; neither can be picked before `min_tokens`.
    `logprobs` N asks for the N likeliest tokens beside the chosen one at each step, `prompt_logprobs` for the same at each
    prompt token. To the logits are applied, in this order: the grammar of `structured`, `logit_bias` (token id, added value),
    `repetition_penalty` (over prompt and output: positive logits divided by it, negative ones multiplied), and
    `frequency_penalty` times a token's count plus `presence_penalty`, both over the output alone.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    structured: Structured | None = None


class Request(msgspec.Struct, frozen=True):
    """One prompt. `id` must be unique among running requests; of those that wait, lower `priority` runs first."""

    id: str
    prompt_token_ids: list[int]
    sampling: Sampling
    priority: int = 0


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Natural-log probabilities of one position, before temperature: the token's and the likeliest ones', descending."""

    logprob: float
    top: list[tuple[int, float]]


class Step(msgspec.Struct, frozen=True):
    """New tokens of one request since its last Step. The last Step has `finish_reason`; `error` goes with reason "error".

    `cached_tokens` of the prompt came from the prefix cache. The first Step may carry `prompt_logprobs`, one entry a prompt
    token after the first, and the seconds that the request waited (`queue_seconds`) and was then computed (`prefill_seconds`).
    """

    id: str
    token_ids: list[int]
    prompt_tokens: int
    completion_tokens: int
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] | None = None
    queue_seconds: float | None = None
    prefill_seconds: float | None = None


class EngineInfo(msgspec.Struct, frozen=True):
    """What the server must know before it takes requests."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: list[int]
    dtype: str
    device: str


class Stats(msgspec.Struct, frozen=True):
    """A snapshot of the engine's load. `kv_cache_usage` is a fraction of all pages; `prefix_*` count prompt tokens."""

    running: int
    waiting: int
    kv_cache_usage: float
    kv_pages_total: int
    kv_pages_free: int
    prompt_tokens: int
    generation_tokens: int
    preemptions: int
    prefix_queries: int = 0
    prefix_hits: int = 0


class Health(msgspec.Struct, frozen=True):
    """`alive`: the engine process runs; `heartbeat_age`: seconds since its loop last turned; `reason` where not healthy."""

    alive: bool
    heartbeat_age: float
    reason: str | None = None


class EngineDeadError(Exception):
    """The engine process has ended or cannot be reached; the message says how it ended."""


class Engine(Protocol):
    """What the server needs of an engine. All calls are made on one event loop."""

    @property
    def info(self) -> EngineInfo: ...

    def generate(self, request: Request) -> AsyncIterator[Step]:
        """Yields Steps until one has a finish reason. Closing the iterator early aborts the request.

        Raises ValueError for a request that can never run (too long, empty, token id outside the vocabulary) and
        EngineDeadError if the engine ends first.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """Ends a request and frees its pages; unknown ids are ignored."""
        ...

    async def stats(self) -> Stats: ...

    async def decisions(self) -> list[dict[str, Any]]:
        """The kernel decisions in force, as `Decision.to_json` gives them."""
        ...

    async def health(self) -> Health: ...

    async def shutdown(self) -> None:
        """Ends the engine process; safe to call twice."""
        ...
