"""What the generating routes share: OpenAI's fields and vLLM's extra ones.

Fields that no engine honours are declared as well, so that a value that asks for something is refused by name instead of
being ignored. Fields that are not declared at all are ignored, and the answer says which (`X-MLA-Serve-Ignored`).
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar

from pydantic import Field

from mla_serve.engine.base import Structured
from mla_serve.server.errors import bad_request
from mla_serve.server.protocol.base import Strict, Strings, TokenIds, header_names
from mla_serve.server.protocol.structured import ResponseFormat, StructuredOutputs, choice, json_schema, regex

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1000
MAX_BIASES = 1024

Json = dict[str, Any]
Bias = Annotated[float, Field(ge=-100, le=100)]


class StreamOptions(Strict):
    include_usage: bool | None = None


class GenerationBody(Strict):
    """Sampling, structure and form of the answer."""

    model: str | None = None
    user: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_N)
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int | None = Field(None, ge=0)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    logit_bias: dict[str, Bias] | None = None
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: str | Strings | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1)
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | Json | None = None
    guided_regex: str | None = Field(None, min_length=1)
    guided_choice: Strings | None = Field(None, min_length=1)

    # Declared to be refused by name where they ask for something.
    allowed_token_ids: TokenIds | None = None
    bad_words: Strings | None = None
    truncate_prompt_tokens: int | None = None
    use_beam_search: bool | None = None
    guided_grammar: str | None = None

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "allowed_token_ids": (), "bad_words": ([],), "truncate_prompt_tokens": (), "use_beam_search": (False,),
        "guided_grammar": (),
    }  # fmt: skip
    """Field -> values that ask for nothing, beside null."""

    def check(self) -> None:
        """What types and ranges cannot say. Raises ApiError."""
        for name, harmless in self.REFUSED.items():
            value = getattr(self, name)
            if value is not None and value not in harmless:
                raise bad_request(f"{name} is not supported by this server; leave it out.", name, "unsupported_parameter")
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options is only allowed where stream is true.", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise bad_request("prompt_logprobs is only allowed where stream is false.", "prompt_logprobs")
        if len(self.stops) > MAX_STOPS:
            raise bad_request(f"stop may hold at most {MAX_STOPS} strings.", "stop")
        if any(not 0 < len(stop) <= MAX_STOP_CHARACTERS for stop in self.stops):
            raise bad_request(f"Each stop string must have 1 to {MAX_STOP_CHARACTERS} characters.", "stop")
        if len(self.logit_bias or ()) > MAX_BIASES:
            raise bad_request(f"logit_bias may hold at most {MAX_BIASES} tokens.", "logit_bias")

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
    def requested_prompt_logprobs(self) -> int | None:
        """The same at each position of the prompt."""
        return self.prompt_logprobs

    @property
    def requested_structure(self) -> Structured | None:
        """What the output must look like. Raises ApiError where the request says it twice, or not wholly."""
        found = {
            "response_format": self.response_format and self.response_format.structured(),
            "structured_outputs": self.structured_outputs and self.structured_outputs.structured(),
            "guided_json": None if self.guided_json is None else json_schema(self.guided_json, "guided_json"),
            "guided_regex": self.guided_regex and regex(self.guided_regex, "guided_regex"),
            "guided_choice": self.guided_choice and choice(self.guided_choice, "guided_choice"),
        }
        asked = {name: structure for name, structure in found.items() if isinstance(structure, Structured)}
        if len(asked) > 1:
            first, second = list(asked)[:2]
            raise bad_request(f"{second} and {first} exclude each other.", second)
        return next(iter(asked.values()), None)

    def biases(self, vocab: int) -> tuple[tuple[int, float], ...]:
        """logit_bias by token id. Raises ApiError for a key that is no id of the model's."""
        found = []
        for key, value in (self.logit_bias or {}).items():
            if not re.fullmatch(r"[0-9]{1,9}", key) or int(key) >= vocab:
                raise bad_request(f"logit_bias must be keyed by token ids from 0 to {vocab - 1}.", "logit_bias")
            found.append((int(key), value))
        return tuple(found)

    @property
    def ignored(self) -> list[str]:
        """Names of unknown fields that are fit for a header."""
        return header_names([*(self.model_extra or ()), *((self.stream_options and self.stream_options.model_extra) or ())])
