"""Structured output on the demo model: what it would never say by itself, said token by token, and grammars that misbehave."""

import json
import re
import subprocess
import sys
import time

import pytest
import torch

from mla_serve.engine.base import Request, Sampling, Structured
from mla_serve.engine.embedded.core import EngineCore
from mla_serve.engine.embedded.structured import Grammars
from tests.engine.conftest import DEMO
from tests.engine.driver import Driver

EOS, THINK = 1, 5
WORDS = "[a-z]{3}( [a-z]{3}){20}"

CHOICES = [
    "客单价",
    "👩‍👩‍👧 and 👍🏽",
    "<think>Let me see. 客单价?</think>Yes.",
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look_up\n```json\n{"city": "巴黎"}\n```'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">',
    '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a":1}<|tool_call_end|>',
    "a<｜User｜>b",
    "",
    " \n",
    "x\u0000y",
]


def said(driver, tokenizer, request):
    """The text without its end token, which must be there."""
    (tokens,) = driver.run(request)
    assert tokens[-1] == EOS
    assert driver.last(request.id).finish_reason == "stop"
    return tokenizer.decode(tokens[:-1], clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.5, "seed": 3, "top_p": 0.5}])
def test_a_choice_is_said_word_for_word(driver, tokenizer, asks, choice, sampling):
    request = asks("r", "choice", [choice], **sampling)
    assert driver.run(request) == [[*tokenizer.encode(choice, add_special_tokens=False), EOS]]
    assert said(driver, tokenizer, request) == choice


def test_the_model_chooses(driver, tokenizer, asks):
    """By its own likings, and by a bias; also where one choice begins like another."""
    own = tokenizer.decode(driver.run(asks("r"))[0][:-1])
    assert own
    assert said(driver, tokenizer, asks("r", "choice", ["London", own, "Rome"])) == own
    bias = tuple((token, 100.0) for token in tokenizer.encode("Rome"))
    assert said(driver, tokenizer, asks("r", "choice", ["London", own, "Rome"], logit_bias=bias)) == "Rome"
    options = ["Rome", "Romeo", "Rom"]
    drawn = [asks("r", "choice", options, temperature=5.0, seed=seed) for seed in range(60)]
    assert {said(driver, tokenizer, each) for each in drawn} == set(options)


@pytest.mark.parametrize("seed", range(4))
def test_a_regular_expression_is_matched(driver, tokenizer, asks, seed):
    for expression in (r"[0-9]{3}-客单价-(a|b)+c", r"<think>x</think>", r"(yes|no)!{1,3}", r"\d+\.\d\d EUR"):
        text = said(driver, tokenizer, asks("r", "regex", expression, temperature=1.0, seed=seed))
        assert re.fullmatch(expression, text)


def test_any_json_object(driver, tokenizer, asks):
    """Whatever comes to its end is an object, and not all are empty: what JSON is made of is made likely."""
    likings = {'"': 24.0, "}]": 22.0, "01": 21.0, "[{,": 20.0}
    bias = tuple((token, value) for text, value in likings.items() for token in tokenizer.encode(text))
    sampling = {"temperature": 2.0, "max_tokens": 80, "logit_bias": bias}
    asked = [asks(f"r{seed}", "json_object", seed=seed, **sampling) for seed in range(80)]
    texts = dict(zip((each.id for each in asked), map(tokenizer.decode, driver.run(*asked)), strict=True))
    assert all(text.startswith("{") for text in texts.values())
    whole = [text for name, text in texts.items() if driver.last(name).finish_reason == "stop"]
    objects = [json.loads(text.removesuffix("<｜end▁of▁sentence｜>")) for text in whole]
    assert all(isinstance(each, dict) for each in objects)
    assert sum(each != {} for each in objects) >= 2


SCHEMA = {
    "$defs": {"unit": {"enum": ["C", "F"]}},
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 9},
        "unit": {"$ref": "#/$defs/unit"},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 31}, "minItems": 1, "maxItems": 3},
        "sure": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    },
    "required": ["city", "days", "sure", "unit"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(6))
def test_a_schema_is_followed(driver, tokenizer, asks, seed):
    value = json.loads(said(driver, tokenizer, asks("r", "json_schema", SCHEMA, temperature=1.0, seed=seed, max_tokens=400)))
    assert value.keys() == {"city", "unit", "days", "sure"}
    assert len(value["city"]) <= 9
    assert value["unit"] in ("C", "F")
    assert 1 <= len(value["days"]) <= 3
    assert all(type(day) is int and 1 <= day <= 31 for day in value["days"])
    assert value["sure"] in (True, False, None)


def test_an_array_that_says_nothing_of_its_items_may_hold_any(driver, tokenizer, asks):
    whole = asks("r", "json_schema", {"type": "array", "minItems": 2, "maxItems": 2}, temperature=1.0, seed=1, max_tokens=3000)
    (tokens,) = driver.run(whole)
    if driver.last("r").finish_reason == "stop":
        assert len(json.loads(tokenizer.decode(tokens[:-1]))) == 2


def test_special_tokens_are_text_nowhere_but_in_a_choice(driver, tokenizer, asks):
    """However much the model wants to say one: what it says is spelled with ordinary tokens."""
    bias = ((THINK, 100.0),)
    for kind, value in (("regex", r"(.|\n){1,30}"), ("json_schema", {"type": "string", "maxLength": 30})):
        (tokens,) = driver.run(asks("r", kind, value, logit_bias=bias))
        assert tokens[:-1]
        assert min(tokens[:-1]) > 6
    (tokens,) = driver.run(asks("r", logit_bias=bias, max_tokens=3))
    assert tokens == [THINK] * 3


def test_min_tokens_and_ignore_eos_give_way_to_the_end_of_a_grammar(driver, tokenizer, asks):
    assert said(driver, tokenizer, asks("r", "choice", ["ab"], min_tokens=50)) == "ab"
    assert said(driver, tokenizer, asks("r", "choice", ["ab"], ignore_eos=True)) == "ab"
    assert len(said(driver, tokenizer, asks("r", "regex", "a*", min_tokens=20))) >= 20
    (tokens,) = driver.run(asks("r", "regex", "a*", ignore_eos=True, max_tokens=30))
    assert driver.last("r").finish_reason in ("stop", "length")
    assert EOS not in tokens[:-1]


def test_a_model_without_a_tokenizer_says_so(settings):
    driver = Driver(EngineCore(settings()))
    structured = Structured("json_object")
    for _ in range(2):
        driver.run(Request("r", [5, 6], Sampling(max_tokens=3, structured=structured)))
        assert "needs the model's tokenizer, which cannot be loaded" in driver.refused["r"]


def test_a_request_does_not_depend_on_its_mates(driver, asks):
    mine = [
        asks("m1", "json_schema", SCHEMA, temperature=1.0, seed=5),
        asks("m2", "choice", CHOICES, temperature=2.0, seed=2**63),
        asks("m3", "regex", "[a-z ]{20}", temperature=1.0, seed=9, repetition_penalty=1.2, min_p=0.01),
    ]
    alone = [driver.run(each)[0] for each in mine]
    mates = [
        asks("x", "regex", "[0-9]{40}", temperature=1.0),
        asks("y", temperature=1.0),
        asks("z", "json_object", max_tokens=9),
    ]
    assert driver.run(*mates, *mine)[3:] == alone


def test_a_preempted_sequence_goes_on_where_its_grammar_stood(demo, driver, asks):
    asked = [asks(f"p{i}", "regex", WORDS, temperature=1.0, seed=i, frequency_penalty=0.2, max_tokens=100) for i in range(4)]
    tight = demo(num_pages=9, page_size=16, max_model_len=144)
    expected = driver.run(*asked)
    assert tight.run(*asked) == expected
    assert tight.core.stats().preemptions > 0
    assert len({tuple(tokens) for tokens in expected}) == 4


def test_fifty_mixed_requests_with_aborts_leave_nothing_behind(demo, asks):
    driver = demo(num_pages=40, max_requests=12, max_model_len=320)
    kinds = [
        {}, {"kind": "choice", "value": CHOICES}, {"kind": "regex", "value": "[a-z]{5,60}"}, {"kind": "json_object"},
        {"kind": "json_schema", "value": SCHEMA}, {"kind": "regex", "value": "("}, {"kind": "choice", "value": "[]"},
    ]  # fmt: skip
    extras = [
        {"logit_bias": ((40, 3.0),)}, {"frequency_penalty": 0.5, "min_tokens": 5}, {"prompt_logprobs": 2, "logprobs": 1},
        {"min_p": 0.1, "repetition_penalty": 1.1}, {},
    ]  # fmt: skip
    for i in range(50):
        asked = {"temperature": float(i % 3), "seed": i, "max_tokens": 20 + i} | kinds[i % 7] | extras[i % 5]
        driver.add(asks(f"r{i}", text=f"{i} " * (1 + i % 9), **asked))
        if i % 3 == 0:
            driver.turn()
        if i % 4 == 0:
            driver.abort(f"r{i // 2}")
    driver.run()  # asserts that every page is free
    refused = {name for name, steps in driver.steps.items() if not steps}
    assert refused == driver.refused.keys()
    ends = [driver.last(name).finish_reason for name in driver.steps if name not in refused]
    assert set(ends) <= {"stop", "length", "abort"}
    assert min(ends.count(reason) for reason in ("stop", "length", "abort")) >= 3
    assert len(refused) >= 8


def test_neither_triton_nor_a_gpu_is_needed_and_plain_requests_import_nothing(settings, tmp_path):
    script = f"""
import sys, time
sys.modules["triton"] = None
from mla_serve.engine.base import Request, Sampling, Structured
from mla_serve.engine.embedded.core import EngineConfig, EngineCore
core = EngineCore(EngineConfig(
    model={str(DEMO)!r}, policy="availability", decisions={str(tmp_path / "none.json")!r}, num_pages=64))
def run(structured):
    core.add(Request("r", [0, 3, 50, 4], Sampling(max_tokens=40, temperature=0.0, structured=structured)))
    while core.compiling or core.has_work:
        assert not core.take_compiled()
        steps = core.step() if core.has_work else []
    assert steps[0].finish_reason, steps
run(None)
assert not {{"xgrammar", "transformers"}} & sys.modules.keys()
run(Structured("regex", "a{{3}}"))
assert "xgrammar" in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=None, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("kind", "value"), [("regex", "ab"), ("choice", '["ab"]'), ("json_schema", '{"const": "ab"}')])
def test_a_model_without_end_tokens_ends_where_the_grammar_is_complete(tokenizer, kind, value):
    grammars = Grammars(str(DEMO), vocab_size=len(tokenizer), end_token_ids=[])
    job = grammars.compile(Structured(kind, value))
    while (matcher := grammars.finished(job)) is None:
        time.sleep(0.001)
    said = []
    while not matcher.terminated:
        words = torch.zeros(-(-len(tokenizer) // 32), dtype=torch.int32)
        matcher.fill(words)
        said.append(next(i for i in range(len(tokenizer)) if words[i // 32].item() >> (i % 32) & 1))
        assert matcher.accept(said[-1])
    assert tokenizer.decode(said).strip('"') == "ab"
