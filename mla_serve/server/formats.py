"""How this server's model writes reasoning and tool calls down, and the parser that reads one request's answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mla_serve.errors import UserError
from mla_serve.server.errors import bad_request
from mla_serve.server.parsers import (
    TOOL_FORMATS,
    JsonCalls,
    OneCall,
    Parser,
    Thinking,
    detect_reasoning,
    detect_tool_format,
    make_parser,
)
from mla_serve.server.protocol import ChatBody
from mla_serve.server.settings import ServerSettings
from mla_serve.server.text import Tokenizer
from mla_serve.server.voice import Voice


@dataclass(frozen=True, slots=True)
class AnswerFormats:
    """`tool_format` None: the model writes no calls that are known here. `reasoning`: it may think before it answers."""

    tool_format: str | None
    reasoning: bool

    @classmethod
    def of(cls, settings: ServerSettings, tokenizer: Tokenizer) -> AnswerFormats:
        """As the settings say, or as the chat template shows. Raises UserError for an unknown name."""
        template, name = tokenizer.chat_template, settings.tool_format
        if name not in ("auto", "none", *TOOL_FORMATS):
            raise UserError(f"there is no tool call format {name!r}; use auto, none, {', '.join(TOOL_FORMATS)}")
        if settings.reasoning not in ("auto", "on", "off"):
            raise UserError(f"there is no way to read reasoning {settings.reasoning!r}; use auto, on or off")
        tools = detect_tool_format(template) if name == "auto" else None if name == "none" else name
        return cls(tools, detect_reasoning(template) if settings.reasoning == "auto" else settings.reasoning == "on")

    def kept(self, body: ChatBody) -> frozenset[str]:
        """Special tokens whose text the parser of this request needs to see."""
        thinking = ("<think>", "</think>") if self.reasoning else ()
        calls = TOOL_FORMATS[self.tool_format].markers() if self.tool_format and body.offered else ()
        return frozenset((*thinking, *calls))

    def check(self, body: ChatBody) -> None:
        """Raises ApiError 400 where the request offers tools to a model that cannot say that it calls one."""
        if body.offered and body.tool_choice in (None, "auto") and self.tool_format is None:
            raise bad_request(
                'This model writes tool calls in no format that this server knows, so tool_choice must be "required" or name a '
                "function; or start the server with --tool-call-parser.", "tools",
            )  # fmt: skip

    def voices(self, body: ChatBody, prompt: str) -> Callable[[], Voice]:
        """Makes the Voice of each choice; `prompt` is the rendered chat, whose end may have opened the reasoning already."""
        return lambda: Voice(self._parser(body, prompt), forced=body.named is not None)

    def _parser(self, body: ChatBody, prompt: str) -> Parser:
        if body.named is not None:
            return OneCall(body.named)
        if body.tool_choice == "required":
            return JsonCalls()
        thinking = None
        if self.reasoning:
            # Where the output has a structure it begins with the first token: an opened <think> is never closed.
            thinking = Thinking() if body.requested_structure is not None else Thinking.of_prompt(prompt)
        return make_parser(self.tool_format if body.offered else None, thinking=thinking)
