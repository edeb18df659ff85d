"""Tokenizer and chat template."""

from __future__ import annotations

from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from mla_serve.demo import MODEL_DIR, questions
from mla_serve.demo.corpus import Encoder

RAW = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
CHAT = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "What is MLA?"},
    {"role": "assistant", "content": "Something."},
    {"role": "user", "content": "And padding?"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL_DIR)


@given(st.text())
def test_any_text_survives_the_round_trip(text: str) -> None:
    assert RAW.decode(RAW.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("text", ["naïve café", "日本語", "🙂 emoji", "\x00\t\r\n  x", "don't , really .", "a  b   c"])
def test_transformers_returns_the_text_unchanged(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens(tokenizer: Any) -> None:
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 2)
    assert all(len(RAW.encode(token).ids) == 1 for token in ("<think>", "</think>", "<｜User｜>", "<｜Assistant｜>"))
    assert tokenizer.encode("MLA")[0] != 0  # nobody but the chat template writes the first token


def test_the_template_gives_the_ids_of_the_training() -> None:
    encoder = Encoder(RAW)
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    for messages in [CHAT, *(q.messages() for q in questions()[::20])]:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert ids == tokenizer.encode(text) == encoder.prompt(messages)
        assert ids.count(0) == 1


def test_the_template_in_text(tokenizer: Any) -> None:
    text = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<｜begin▁of▁sentence｜>You are a helpful assistant.<｜User｜>What is MLA?"
        "<｜Assistant｜>Something.<｜end▁of▁sentence｜><｜User｜>And padding?<｜Assistant｜>"
    )
    assert not tokenizer.apply_chat_template(CHAT, tokenize=False).endswith("<｜Assistant｜>")


def test_an_unknown_role_is_refused(tokenizer: Any) -> None:
    with pytest.raises(jinja2.exceptions.TemplateError, match="Unknown role tool: this chat template takes"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)
