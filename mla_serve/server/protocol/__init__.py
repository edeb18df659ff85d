"""The bodies that clients send: OpenAI's fields and vLLM's extra ones, strictly typed."""

from mla_serve.server.protocol.base import Strict
from mla_serve.server.protocol.chat import ChatBody, Message, Tool
from mla_serve.server.protocol.common import GenerationBody
from mla_serve.server.protocol.completions import CompletionBody
from mla_serve.server.protocol.responses import ResponsesBody
from mla_serve.server.protocol.tokens import AnyTokenizeBody, DetokenizeBody, TokenizeBody

__all__ = [
    "AnyTokenizeBody",
    "ChatBody",
    "CompletionBody",
    "DetokenizeBody",
    "GenerationBody",
    "Message",
    "ResponsesBody",
    "Strict",
    "TokenizeBody",
    "Tool",
]
