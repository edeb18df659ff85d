"""What a model's text means beside its words: reasoning and tool calls, told apart while the text is still coming."""

from mla_serve.server.parsers.dsml import DsmlCalls
from mla_serve.server.parsers.events import CallArguments, CallName, Content, Event, Parser, Reasoning
from mla_serve.server.parsers.json_calls import JsonCalls, OneCall, calls_schema
from mla_serve.server.parsers.names import TOOL_FORMATS, detect_reasoning, detect_tool_format, make_parser
from mla_serve.server.parsers.thinking import Thinking
from mla_serve.server.parsers.tokens import DeepSeekV3Calls, DeepSeekV31Calls, KimiK2Calls

__all__ = [
    "TOOL_FORMATS",
    "CallArguments",
    "CallName",
    "Content",
    "DeepSeekV3Calls",
    "DeepSeekV31Calls",
    "DsmlCalls",
    "Event",
    "JsonCalls",
    "KimiK2Calls",
    "OneCall",
    "Parser",
    "Reasoning",
    "Thinking",
    "calls_schema",
    "detect_reasoning",
    "detect_tool_format",
    "make_parser",
]
