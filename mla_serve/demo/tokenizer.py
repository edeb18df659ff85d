"""Trains the demo's byte-level BPE and writes the tokenizer files with the chat template."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from tokenizers.trainers import BpeTrainer

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
PAD = "<｜▁pad▁｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
# Their ids are their places in this list: bos 0, eos 1, pad 2, as config.json says.
SPECIAL = (BOS, EOS, PAD, USER, ASSISTANT, "<think>", "</think>")
VOCAB_SIZE = 1280

# DeepSeek's form: the system text stands bare after the first token, before all turns.
CHAT_TEMPLATE = """\
{%- set ns = namespace(system='') -%}
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}
{%- set ns.system = ns.system + ('\\n\\n' if ns.system else '') + message['content'] -%}
{%- endif -%}
{%- endfor -%}
{{- '<｜begin▁of▁sentence｜>' + ns.system -}}
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}
{{- '<｜User｜>' + message['content'] -}}
{%- elif message['role'] == 'assistant' -%}
{{- '<｜Assistant｜>' + (message['content'] or '') + '<｜end▁of▁sentence｜>' -}}
{%- elif message['role'] != 'system' -%}
{{- raise_exception('Unknown role ' + message['role'] + ': this chat template takes system, user and assistant.') -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<｜Assistant｜>' -}}
{%- endif -%}
"""


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """A BPE over all 256 bytes, so that any UTF-8 text can be read and written; digits are single tokens."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the corpus gave {tokenizer.get_vocab_size()} tokens, {vocab_size} were asked for")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja into `path`.

    No post-processor adds a first token: the chat template writes it, and nobody writes it twice.
    """
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 20480,
    }
    text = json.dumps(config, ensure_ascii=False, indent=2) + "\n"
    (path / "tokenizer_config.json").write_text(text, encoding="utf-8")
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
