"""The shapes of answers, for the OpenAPI document and the type checker; answers are plain dicts, so encoding costs little."""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import TypedDict

FinishReason = Literal["stop", "length"]


class ErrorObject(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(TypedDict):
    error: ErrorObject


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None


class Completion(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[ChatLogprob]
    refusal: str | None


class ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    refusal: str | None


class ChatChoice(TypedDict):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None


class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]


class Status(TypedDict):
    status: Literal["ok"]


class Version(TypedDict):
    version: str


class Load(TypedDict):
    server_load: int
    running: int
    waiting: int
    kv_cache_usage: float
    kv_pages_total: int
    kv_pages_free: int


class Decisions(TypedDict):
    decisions: list[dict[str, Any]]
