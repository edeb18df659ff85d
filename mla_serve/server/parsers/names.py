"""Which format a model writes its tool calls in, told from its own chat template, and the parser for a request."""

from __future__ import annotations

from collections.abc import Mapping

from mla_serve.server.parsers.dsml import DsmlCalls
from mla_serve.server.parsers.events import Content, Event, Parser
from mla_serve.server.parsers.thinking import CLOSE, OPEN, Thinking
from mla_serve.server.parsers.tokens import DeepSeekV3Calls, DeepSeekV31Calls, KimiK2Calls

ToolParser = type[DeepSeekV3Calls] | type[DeepSeekV31Calls] | type[KimiK2Calls] | type[DsmlCalls]

TOOL_FORMATS: Mapping[str, ToolParser] = {
    "deepseek-v3": DeepSeekV3Calls,
    "deepseek-v3.1": DeepSeekV31Calls,
    "deepseek-v3.2": DsmlCalls,
    "kimi-k2": KimiK2Calls,
}


def detect_tool_format(template: str) -> str | None:
    """The format that a chat template writes earlier calls in; None if it writes none of ours."""
    if "｜DSML｜" in template:
        return "deepseek-v3.2"
    if KimiK2Calls.section[0] in template:
        return "kimi-k2"
    if DeepSeekV31Calls.section[0] in template:
        return "deepseek-v3" if "```json" in template else "deepseek-v3.1"
    return None


def detect_reasoning(template: str) -> bool:
    """Whether a chat template belongs to a model that thinks between `<think>` and `</think>`."""
    return OPEN in template or CLOSE in template


def make_parser(tool_format: str | None, *, thinking: Thinking | None) -> Parser:
    """Reasoning where `thinking` finds it (None: this model has none), then tool calls in the rest."""
    return _Chain(thinking, TOOL_FORMATS[tool_format]() if tool_format else None)


class _Chain:
    """What the first parser calls content is the second one's text."""

    def __init__(self, thinking: Parser | None, calls: Parser | None) -> None:
        self._thinking, self._calls = thinking, calls

    def push(self, text: str) -> list[Event]:
        return self._through(self._thinking.push(text) if self._thinking else [Content(text)] if text else [])

    def finish(self) -> list[Event]:
        events = self._through(self._thinking.finish() if self._thinking else [])
        return events + (self._calls.finish() if self._calls else [])

    def _through(self, events: list[Event]) -> list[Event]:
        if self._calls is None:
            return events
        found: list[Event] = []
        for event in events:
            found += self._calls.push(event.text) if isinstance(event, Content) else [event]
        return found
