"""The body of POST /v1/responses, and the chat that it stands for. Nothing is stored: a client sends the whole conversation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from mla_serve.server.errors import bad_request
from mla_serve.server.protocol.base import FAST, Strict, Strings, header_names
from mla_serve.server.protocol.chat import FUNCTION_NAME, MAX_TOOLS, ChatBody
from mla_serve.server.protocol.common import MAX_LOGPROBS, Json

LOGPROBS = "message.output_text.logprobs"


class InputText(Strict):
    type: Literal["input_text", "output_text", "text"]
    text: str


class InputMessage(Strict):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[InputText], FAST]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class InputCall(Strict):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class InputCallOutput(Strict):
    type: Literal["function_call_output"]
    call_id: str
    output: str


class ReasoningText(Strict):
    type: Literal["reasoning_text"]
    text: str


class InputReasoning(Strict):
    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], FAST] | None = None


class ResponseTool(Strict):
    type: Literal["function"]
    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class NamedResponseTool(Strict):
    type: Literal["function"]
    name: str = Field(pattern=FUNCTION_NAME)


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, pattern=r"^[A-Za-z0-9_-]{1,64}$")
    description: str | None = None
    schema_: Json | None = Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(Strict):
    format: TextFormat | None = None


class ReasoningConfig(Strict):
    effort: str | None = None
    summary: str | None = None


Items = Annotated[list[InputMessage | InputCall | InputCallOutput | InputReasoning], FAST, Field(min_length=1)]


class ResponsesBody(Strict):
    """POST /v1/responses."""

    model: str | None = None
    input: str | Items
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    include: Strings | None = None
    stream: bool | None = None
    tools: Annotated[list[ResponseTool], FAST, Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedResponseTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1)
    store: bool | None = None  # accepted, since clients send it; nothing is ever stored

    # Declared to be refused by name where they ask for something.
    previous_response_id: str | None = None
    conversation: str | Json | None = None
    background: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None

    def check(self) -> None:
        """What types and ranges cannot say. Raises ApiError."""
        for name in ("previous_response_id", "conversation"):
            if getattr(self, name) is not None:
                raise bad_request(f"{name} needs a stored conversation, and this server keeps none; send it whole.", name)
        if self.background:
            raise bad_request("background is not supported by this server; leave it out.", "background")
        if self.truncation == "auto":
            raise bad_request("truncation by the server is not supported; shorten the input.", "truncation")
        if unknown := set(self.include or ()) - {LOGPROBS, "reasoning.encrypted_content"}:
            raise bad_request(f"include holds {len(unknown)} thing(s) that this server has not.", "include")

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())

    def chat(self) -> ChatBody:
        """The same request as a chat; every check of a chat applies to it."""
        form = self.text.format if self.text else None
        response_format: Json | None = None
        if form is not None and form.type != "text":
            schema = {"name": form.name or "answer", "schema": form.schema_}
            response_format = {"type": form.type, **({"json_schema": schema} if form.type == "json_schema" else {})}
        choice: Any = self.tool_choice
        if isinstance(choice, NamedResponseTool):
            choice = {"type": "function", "function": {"name": choice.name}}
        tools = [
            {"type": "function", "function": tool.model_dump(include={"name", "description", "parameters", "strict"})}
            for tool in self.tools or ()
        ]
        return ChatBody.model_validate(
            {
                "messages": self._messages(), "max_completion_tokens": self.max_output_tokens,
                "temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "seed": self.seed,
                "priority": self.priority, "stream": self.stream, "logprobs": self.wants_logprobs or None,
                "top_logprobs": self.top_logprobs, "tools": tools or None, "tool_choice": choice,
                "parallel_tool_calls": self.parallel_tool_calls, "response_format": response_format,
            }
        )  # fmt: skip

    def _messages(self) -> list[Json]:
        """Calls and reasoning belong to the assistant's message that they stand beside."""
        messages: list[Json] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        thought: str | None = None
        for item in self.input:
            match item:
                case InputMessage():
                    messages.append({"role": item.role, "content": item.text})
                    if item.role == "assistant" and thought is not None:
                        messages[-1]["reasoning_content"], thought = thought, None
                case InputReasoning():
                    thought = "".join(part.text for part in item.content or ())
                case InputCall():
                    if not messages or messages[-1]["role"] != "assistant":
                        messages.append({"role": "assistant", "content": None})
                        if thought is not None:
                            messages[-1]["reasoning_content"], thought = thought, None
                    function = {"name": item.name, "arguments": item.arguments}
                    calls = messages[-1].setdefault("tool_calls", [])
                    calls.append({"id": item.call_id, "type": "function", "function": function})
                case InputCallOutput():
                    messages.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
        if not messages:
            raise bad_request("input holds no message.", "input")
        return messages

    @property
    def ignored(self) -> list[str]:
        """Names of unknown fields that are fit for a header."""
        return header_names(self.model_extra or ())
