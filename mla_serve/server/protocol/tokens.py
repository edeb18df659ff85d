"""The bodies of /tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from mla_serve.server.protocol.base import FAST, Strict, TokenIds
from mla_serve.server.protocol.chat import MAX_TOOLS, Message, Tool


class TokenizeBody(Strict):
    """A text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatBody(Strict):
    """A chat, through the model's template."""

    model: str | None = None
    messages: Annotated[list[Message], FAST, Field(min_length=1)]
    tools: Annotated[list[Tool], FAST, Field(max_length=MAX_TOOLS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, str | bool | int | float | None] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


def _kind(body: Any) -> str:
    return "(chat)" if isinstance(body, dict) and "messages" in body else "(text)"


# Told apart by what they hold, so that an error speaks of the body that was meant. The tags are no part of a field's path.
AnyTokenizeBody = Annotated[
    Annotated[TokenizeBody, Tag("(text)")] | Annotated[TokenizeChatBody, Tag("(chat)")], Discriminator(_kind)
]


class DetokenizeBody(Strict):
    model: str | None = None
    tokens: TokenIds
