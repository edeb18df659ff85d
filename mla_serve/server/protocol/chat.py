"""The body of POST /v1/chat/completions: messages, tools, and what the chat template is given."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from mla_serve.engine.base import Structured
from mla_serve.server.errors import bad_request
from mla_serve.server.parsers import calls_schema
from mla_serve.server.protocol.base import FAST, Strict, Strings
from mla_serve.server.protocol.common import MAX_LOGPROBS, GenerationBody
from mla_serve.server.protocol.structured import json_schema

MAX_TOOLS = 512
FUNCTION_NAME = r"^[A-Za-z0-9_.-]{1,64}$"

Json = dict[str, Any]


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
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[ToolCall], FAST] | None = None

    @property
    def text(self) -> str | None:
        """The content as one text, which is what chat templates take."""
        return self.content if self.content is None or isinstance(self.content, str) else "".join(p.text for p in self.content)


class Function(Strict):
    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    name: str = Field(pattern=FUNCTION_NAME)


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], FAST, Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, str | bool | int | float | None] | None = None
    tools: Annotated[list[Tool], FAST, Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    # Declared to be refused by name where they ask for something.
    functions: list[Json] | None = None
    function_call: str | Json | None = None
    modalities: Strings | None = None
    audio: Json | None = None
    chat_template: str | None = None
    documents: list[Json] | None = None

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {
        **GenerationBody.REFUSED, "functions": ([],), "function_call": ("none", "auto"), "modalities": ([], ["text"]),
        "audio": (), "chat_template": (), "documents": ([],),
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
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise bad_request("tools holds two functions of one name.", "tools")
        if self.tool_choice not in (None, "none", "auto") and not names:
            raise bad_request("tool_choice asks for a call, and tools is empty.", "tool_choice")
        if self.named is not None and self.named not in names:
            raise bad_request("tool_choice names a function that tools does not hold.", "tool_choice")

    @property
    def requested_max_tokens(self) -> tuple[str, int | None]:
        """max_completion_tokens wins over the older max_tokens where both are there."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    @property
    def requested_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def named(self) -> str | None:
        """The one function that must be called."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None

    @property
    def offered(self) -> list[Tool]:
        """The tools that the model may call; none where tool_choice says so."""
        return [] if self.tool_choice == "none" else list(self.tools or ())

    @property
    def requested_structure(self) -> Structured | None:
        """As the request says it, or what a call that must be made looks like."""
        asked = super().requested_structure
        must = self.named is not None or self.tool_choice == "required"
        if not must:
            return asked
        if asked is not None:
            raise bad_request("tool_choice asks for a call, which excludes another structure of the output.", "tool_choice")
        functions = {tool.function.name: tool.function.parameters or {} for tool in self.tools or ()}
        if self.named is not None:
            return json_schema(functions[self.named], "tools")
        try:
            return json_schema(calls_schema(functions, several=self.parallel_tool_calls is not False), "tools")
        except ValueError as error:
            raise bad_request(f"tools cannot be offered together: {error}.", "tools") from error
