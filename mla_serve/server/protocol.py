"""The bodies that clients send: OpenAI's fields, vLLM's extra ones, strictly typed. null means absent everywhere.

Fields that no engine honours yet are declared as well, so that a value that asks for something is refused by name instead of
being ignored. Fields that are not declared at all are ignored, and the answer says which (`X-MLA-Serve-Ignored`).
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from mla_serve.server.errors import bad_request

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1000

FAST = Field(fail_fast=True)  # one wrong item is enough: ten thousand errors would only cost time

TokenIds = Annotated[list[int], FAST]
Strings = Annotated[list[str], FAST]
Json = dict[str, Any]


class Strict(BaseModel):
    """No coercion ("5" is no integer); unknown fields are kept aside."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())


class StreamOptions(Strict):
    include_usage: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]


class GenerationBody(Strict):
    """What both routes share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_N)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: str | Strings | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None

    # Declared to be refused by name where they ask for something.
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0)
    min_p: float | None = Field(None, ge=0, le=1)
    min_tokens: int | None = Field(None, ge=0)
    logit_bias: dict[str, float] | None = None
    prompt_logprobs: int | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Strings | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    use_beam_search: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: Json | None = None
    guided_json: str | Json | None = None
    guided_regex: str | None = None
    guided_choice: Strings | None = None
    guided_grammar: str | None = None

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,), "min_p": (0,), "min_tokens": (0,),
        "logit_bias": ({},), "prompt_logprobs": (), "allowed_token_ids": (), "bad_words": ([],),
        "truncate_prompt_tokens": (), "priority": (0,), "use_beam_search": (False,), "structured_outputs": (),
        "guided_json": (), "guided_regex": (), "guided_choice": (), "guided_grammar": (),
    }  # fmt: skip
    """Field -> values that ask for nothing, beside null."""

    def check(self) -> None:
        """What types and ranges cannot say. Raises ApiError."""
        for name, harmless in self.REFUSED.items():
            value = getattr(self, name)
            if value is not None and value not in harmless:
                raise bad_request(f"{name} is not supported by this server; leave it out.", name, "unsupported_parameter")
        if self.response_format is not None and self.response_format.type != "text":
            raise bad_request("response_format is not supported by this server but for the type text.", "response_format")
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options is only allowed where stream is true.", "stream_options")
        if len(self.stops) > MAX_STOPS:
            raise bad_request(f"stop may hold at most {MAX_STOPS} strings.", "stop")
        if any(not 0 < len(stop) <= MAX_STOP_CHARACTERS for stop in self.stops):
            raise bad_request(f"Each stop string must have 1 to {MAX_STOP_CHARACTERS} characters.", "stop")

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def requested_max_tokens(self) -> tuple[str, int | None]:
        """The field that bounds the answer, and its value."""
        return "max_tokens", self.max_tokens

    @property
    def requested_logprobs(self) -> int | None:
        """How many likeliest tokens to give at each position; None for no logprobs at all."""
        return None

    @property
    def ignored(self) -> list[str]:
        """Names of unknown fields that are fit for a header."""
        names = [*(self.model_extra or ()), *((self.stream_options and self.stream_options.model_extra) or ())]
        return [name for name in names if re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name)][:32]


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: str | TokenIds | Strings | Annotated[list[TokenIds], FAST]
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    best_of: int | None = Field(None, ge=1)
    suffix: str | None = None

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {**GenerationBody.REFUSED, "suffix": ("",)}

    def check(self) -> None:
        super().check()
        if self.best_of not in (None, self.n or 1):
            raise bad_request("best_of is not supported by this server unless it equals n.", "best_of")
        if self.echo and self.logprobs is not None:
            raise bad_request("echo together with logprobs is not supported by this server.", "echo")

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Always a list of prompts, each a text or a list of token ids. Raises ApiError for an empty one."""
        prompt = self.prompt
        many: Any = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
        if not many or any(isinstance(one, list) and not one for one in many):
            raise bad_request("prompt is empty; give at least one token.", "prompt")
        return list(many)

    @property
    def requested_logprobs(self) -> int | None:
        return self.logprobs


class TextPart(Strict):
    type: Literal["text"]
    text: str


class FunctionCall(Strict):
    name: str
    arguments: str


class ToolCall(Strict):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], FAST] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[ToolCall], FAST] | None = None

    @property
    def text(self) -> str | None:
        """The content as one text, which is what chat templates take."""
        return self.content if self.content is None or isinstance(self.content, str) else "".join(p.text for p in self.content)


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], FAST, Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, str | bool | int | float | None] | None = None

    # Declared to be refused by name where they ask for something.
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    functions: list[Json] | None = None
    function_call: str | Json | None = None
    modalities: Strings | None = None
    audio: Json | None = None
    chat_template: str | None = None
    documents: list[Json] | None = None

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {
        **GenerationBody.REFUSED, "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],),
        "function_call": ("none", "auto"), "modalities": ([], ["text"]), "audio": (), "chat_template": (), "documents": ([],),
    }  # fmt: skip

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise bad_request("top_logprobs is only allowed where logprobs is true.", "top_logprobs")
        for index, message in enumerate(self.messages):
            if message.content is None and message.role != "assistant":
                raise bad_request(f"messages[{index}].content is required.", f"messages[{index}].content")
        if self.continue_final_message and self.add_generation_prompt:
            raise bad_request("continue_final_message and add_generation_prompt exclude each other.", "continue_final_message")

    @property
    def requested_max_tokens(self) -> tuple[str, int | None]:
        """max_completion_tokens wins over the older max_tokens where both are there."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    @property
    def requested_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
