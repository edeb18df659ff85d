"""Reasoning and tool calls: whole texts, and every way of cutting them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_serve.server.parsers import (
    CallArguments,
    CallName,
    Content,
    Event,
    Parser,
    Reasoning,
    Thinking,
    detect_tool_format,
    make_parser,
)
from mla_serve.server.parsers.events import joined

V3 = (
    "Let me look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    '{"city": "客单价", "note": "a ``` b"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n'
    "{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
V31 = (
    "Let me look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    '{"city": "客单价", "note": "a ``` b"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>"
)
KIMI = (
    "Let me look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    '{"city": "客单价", "note": "a ``` b"}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>'
    "{}<|tool_call_end|><|tool_calls_section_end|>"
)
DSML = (
    'Let me look.<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
    '<｜DSML｜parameter name="city" string="true">客单价</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="note" string="true">a ``` b</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
)
FORMATS = {"deepseek-v3": V3, "deepseek-v3.1": V31, "deepseek-v3.2": DSML, "kimi-k2": KIMI}
WEATHER, NOW = {"city": "客单价", "note": "a ``` b"}, {}


def read(parser: Parser, pieces: list[str]) -> list[Event]:
    events = [event for piece in pieces for event in parser.push(piece)]
    return list(joined([*events, *parser.finish()]))


def cuts(text: str) -> Iterator[list[str]]:
    """Whole, by character, and every cut in two."""
    yield [text]
    yield list(text)
    yield from ([text[:at], text[at:]] for at in range(1, len(text)))


@pytest.mark.parametrize("name", FORMATS)
def test_two_calls_after_a_sentence(name: str) -> None:
    content, first, weather, second, now = read(make_parser(name, thinking=None), [FORMATS[name]])
    assert content == Content("Let me look.")
    assert isinstance(first, CallName)
    assert (first.index, first.name) == (0, "get_weather")
    assert first.id == ("functions.get_weather:0" if name == "kimi-k2" else None)
    assert isinstance(weather, CallArguments)
    assert (weather.index, json.loads(weather.text)) == (0, WEATHER)
    assert isinstance(second, CallName)
    assert (second.index, second.name) == (1, "now")
    assert isinstance(now, CallArguments)
    assert (now.index, json.loads(now.text)) == (1, NOW)


@pytest.mark.parametrize("name", FORMATS)
def test_every_cut_gives_the_calls_of_the_whole(name: str) -> None:
    text = f"<think>one < two</think>\n\n{FORMATS[name]}"
    whole = read(make_parser(name, thinking=Thinking()), [text])
    assert whole[:2] == [Reasoning("one < two"), Content("Let me look.")]
    for pieces in cuts(text):
        assert read(make_parser(name, thinking=Thinking()), pieces) == whole, pieces


@pytest.mark.parametrize("name", FORMATS)
def test_a_text_cut_off_anywhere_gives_a_part_of_what_the_whole_gives(name: str) -> None:
    text = FORMATS[name]
    for end in range(len(text)):
        events = read(make_parser(name, thinking=None), list(text[:end]))
        assert events == read(make_parser(name, thinking=None), [text[:end]])
        names = [event.name for event in events if isinstance(event, CallName)]
        assert names == ["get_weather", "now"][: len(names)]


PIECES = [
    "<think>", "</think>", "<", "\n", "\n```", "```json\n", "word", "客", '"', "{", "}", "\\", "👩‍👩‍👧",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
    "function",
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "functions.a:0",
    "<｜DSML｜function_calls>", '<｜DSML｜invoke name="', '<｜DSML｜parameter name="', '" string="', "true", '">',
    "</｜DSML｜parameter>", "</｜DSML｜invoke>",
]  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=30), st.data(), st.sampled_from([*FORMATS, None]), st.booleans())
def test_no_text_depends_on_its_cuts(parts: list[str], data: st.DataObject, name: str | None, inside: bool) -> None:
    text = "".join(parts)
    prompt = "<think>\n" if inside else ""
    at = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]
    cut, whole = (make_parser(name, thinking=Thinking.of_prompt(prompt)) for _ in range(2))
    assert read(cut, pieces) == read(whole, [text])


def test_dsml_values_are_json_and_text_is_escaped() -> None:
    text = (
        '<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="n" string="false">3</｜DSML｜parameter>'
        '<｜DSML｜parameter name="l" string="false"> [1, "x"] </｜DSML｜parameter>'
        '<｜DSML｜parameter name="bad" string="false">not json</｜DSML｜parameter>'
        '<｜DSML｜parameter name="s" string="true">a "b"\n\\c</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>'
    )
    name, arguments = read(make_parser("deepseek-v3.2", thinking=None), list(text))
    assert name == CallName(0, "f")
    assert isinstance(arguments, CallArguments)
    assert json.loads(arguments.text) == {"n": 3, "l": [1, "x"], "bad": "not json", "s": 'a "b"\n\\c'}


@pytest.mark.parametrize(
    ("make", "text", "events"),
    [
        (Thinking, "<think>a</think>\n\nb", [Reasoning("a"), Content("b")]),
        (Thinking, "\n <think>a</think>b", [Reasoning("a"), Content("b")]),
        (Thinking, "no <think>a</think>b", [Content("no <think>a</think>b")]),
        (Thinking, "<thin", [Content("<thin")]),
        (Thinking, "<think>a</thi", [Reasoning("a</thi")]),
        (lambda: Thinking.of_prompt("…<think>\n"), "a</think>b</think>", [Reasoning("a"), Content("b</think>")]),
        (lambda: Thinking.of_prompt("…</think>"), "<think>a", [Content("<think>a")]),
    ],
)
def test_thinking(make: Callable[[], Parser], text: str, events: list[Event]) -> None:
    for pieces in cuts(text):
        assert read(make(), pieces) == events


def test_a_call_without_its_section_is_a_call() -> None:
    assert read(make_parser("kimi-k2", thinking=None), [KIMI.replace("<|tool_calls_section_begin|>", "")])[1] == CallName(
        0, "get_weather", "functions.get_weather:0"
    )


@pytest.mark.parametrize(("name", "text"), [*FORMATS.items(), (None, "{{ messages[0].content }}")])
def test_the_format_is_told_from_the_chat_template(name: str | None, text: str) -> None:
    assert detect_tool_format(text) == name
