"""Between text and token ids, once for all engines: tokenizer, chat template, incremental detokenization.

Detokenization works on bytes. Each token id stands for a fixed piece of bytes, which is looked up, and one incremental UTF-8
decoder holds an unfinished character back; so a step costs the same however long the text is, and no delta ever shows half
a character.
"""

from __future__ import annotations

import asyncio
import codecs
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2

from mla_serve.errors import UserError
from mla_serve.server.errors import ApiError, bad_request

IN_LOOP = 1024  # characters that are tokenized on the event loop; longer texts go to a thread
LONG = 1 << 16  # characters from which a text's length is bounded before it is tokenized
SAMPLE = 'Hello, World!  1 + 2 = 3\n\tcafé, ďábel, 客单价, 👩‍👩‍👧, "quotes" it\'s . ?'


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes, as byte-level BPE vocabularies are written in."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(rest)}


class PieceTable:
    """Which bytes a token stands for, read from the tokenizer's decoder; looked up once per id and kept.

    `strip` counts the spaces that the decoder takes off the front of a text (SentencePiece's dummy prefix); with `bare_start`
    it takes every space out of the first token instead.
    """

    def __init__(self, decoder: Mapping[str, Any] | None, token: Callable[[int], str | None]) -> None:
        self._token = token
        self._pieces: dict[int, bytes] = {}
        self._alphabet: dict[str, int] = {}
        self._replace: list[tuple[str, str]] = []
        self._byte_fallback = False
        self._prefix = ""
        self.strip, self.bare_start = 0, False
        self.in_bytes = False  # whether every byte has a token of its own
        if decoder is None:  # such tokenizers write one word a token
            self._prefix, self.strip = " ", 1
        else:
            for step in decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]:
                self._read(step)

    def _read(self, step: Mapping[str, Any]) -> None:
        match step:
            case {"type": "ByteLevel"}:
                self._alphabet = _byte_alphabet()
                self.in_bytes = True
            case {"type": "ByteFallback"}:
                self._byte_fallback = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                self._replace.append((old, new))
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0}:
                self.strip = start
            case {"type": "Metaspace", "replacement": str(old)}:
                self._replace.append((old, " "))
                self.bare_start = step.get("prepend_scheme") != "never"
            case _:
                raise UserError(f"tokenizer.json has the decoder {step.get('type')}, which this server cannot stream")

    def __getitem__(self, token_id: int) -> bytes:
        """The bytes of an id; none for ids that the model has and the tokenizer does not name."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._make(self._token(token_id))
        return piece

    def _make(self, token: str | None) -> bytes:
        if token is None:
            return b""
        if self._alphabet:
            values = [self._alphabet.get(char) for char in token]
            return token.encode() if None in values else bytes(value for value in values if value is not None)
        if self._byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        for old, new in self._replace:
            token = token.replace(old, new)
        return (self._prefix + token).encode()


class Detokenizer:
    """Token ids in, text out, for one sequence.

    Bytes that can no longer become a character come out as U+FFFD, as in a decode of the whole; an unfinished character at the
    end is never shown.
    """

    def __init__(self, pieces: PieceTable, skipped: frozenset[int]) -> None:
        self._pieces, self._skipped = pieces, skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip, self._bare = pieces.strip, pieces.bare_start

    def push(self, token_id: int) -> str:
        """The text that this token completes; "" while a character is unfinished."""
        if token_id in self._skipped:
            return ""
        piece = self._pieces[token_id]
        if self._bare:
            piece, self._bare = piece.replace(b" ", b""), False
        text = self._utf8.decode(piece)
        while self._strip and text:
            text, self._strip = (text[1:], self._strip - 1) if text[0] == " " else (text, 0)
        return text


class Tokenizer:
    """A Hugging Face tokenizer, used by reading only, so that threads can share it."""

    def __init__(self, hugging_face: Any, chat_template: str | None = None) -> None:
        """`hugging_face` is what AutoTokenizer gave; `chat_template` replaces its own.

        Raises UserError for a tokenizer that cannot be streamed.
        """
        backend = getattr(hugging_face, "backend_tokenizer", None)
        if backend is None:
            raise UserError("the model's tokenizer has no tokenizer.json; convert it to a fast tokenizer first")
        backend.no_truncation()
        backend.no_padding()
        self._hugging_face, self._backend, self._template = hugging_face, backend, chat_template
        tree = json.loads(backend.to_str())
        self.pieces = PieceTable(tree["decoder"], backend.id_to_token)
        normalizer = tree["normalizer"] or {}
        added = backend.get_added_tokens_decoder()
        greedy = any(token.lstrip or token.rstrip for token in added.values())  # takes white space around it along
        # Without a normalizer, and with bytes as its alphabet, a tokenizer keeps every byte of a text in some token.
        self._keeps_bytes = self.pieces.in_bytes and not greedy and normalizer.get("normalizers", normalizer) in ({}, [])
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        ids = self.encode(SAMPLE, add_special_tokens=True)
        if self.decode(ids) != backend.decode(ids, skip_special_tokens=True):
            raise UserError("this server's detokenizer and the model's tokenizer.json disagree on a sample text")

    @classmethod
    def load(cls, directory: Path, chat_template: Path | None = None) -> Tokenizer:
        """Reads the tokenizer of a model directory; code in it is never run. Raises UserError if that fails."""
        from transformers import AutoTokenizer

        try:
            template = None if chat_template is None else chat_template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"the chat template {chat_template} cannot be read; give a Jinja file in UTF-8") from error
        try:
            hugging_face = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False, local_files_only=True)
        except Exception as error:  # tokenizers raises bare Exception for a file it cannot parse
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(f"no usable tokenizer in {directory} ({reason}); it needs tokenizer.json") from error
        return cls(hugging_face, template)

    @cached_property
    def _longest(self) -> int:
        """Bytes of the longest token."""
        return max(len(self.pieces[token_id]) for token_id in range(self._backend.get_vocab_size()))

    def least_tokens(self, text: str) -> int:
        """A lower bound on the number of tokens, found without tokenizing; 0 where nothing is certain."""
        return -(-len(text.encode(errors="replace")) // self._longest) if self._keeps_bytes and len(text) > LONG else 0

    def encode(self, text: str, *, add_special_tokens: bool, limit: int | None = None) -> list[int]:
        """Token ids. A text that is too long for `limit` tokens by its bytes alone is refused at once, with ApiError 400."""
        if limit is not None and (least := self.least_tokens(text)) > limit:
            raise ApiError(
                400, f"This model's maximum context length is {limit} tokens; the prompt has at least {least} tokens.",
                param="prompt", code="context_length_exceeded",
            )  # fmt: skip
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    async def encode_async(self, text: str, *, add_special_tokens: bool, limit: int | None = None) -> list[int]:
        """As `encode`; a long text does not hold up the event loop."""
        if len(text) <= IN_LOOP:
            return self.encode(text, add_special_tokens=add_special_tokens, limit=limit)
        return await asyncio.to_thread(self.encode, text, add_special_tokens=add_special_tokens, limit=limit)

    def detokenizer(self, *, skip_special_tokens: bool = True, kept: frozenset[str] = frozenset()) -> Detokenizer:
        """For one sequence. `kept` are special tokens whose text is wanted all the same."""
        if not skip_special_tokens:
            return Detokenizer(self.pieces, frozenset())
        return Detokenizer(self.pieces, self._special - {self._backend.token_to_id(token) for token in kept})

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence, by the same means as a streamed one."""
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return "".join([detokenizer.push(token_id) for token_id in token_ids])

    def token_text(self, token_id: int) -> str:
        """One token on its own, for logprobs: its text, or "bytes:\\xe5\\xae" where that is only part of a character."""
        piece = self.pieces[token_id]
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

    @property
    def chat_template(self) -> str:
        """The template's text, or texts where the model has several; empty without one."""
        template = self._template or self._hugging_face.chat_template or ""
        return template if isinstance(template, str) else "\n".join(map(str, template.values()))

    def render(
        self, messages: list[dict[str, Any]], *, add_generation_prompt: bool, continue_final_message: bool, **extra: Any
    ) -> str:
        """The prompt text of a chat, by the model's template in transformers' sandbox.

        Raises ApiError 400 where there is no template, or where it refuses the messages.
        """
        if not self.chat_template:
            raise bad_request("This model has no chat template; use /v1/completions.")
        try:
            prompt = self._hugging_face.apply_chat_template(
                messages, chat_template=self._template, tokenize=False, add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message, **extra,
            )  # fmt: skip
        except (jinja2.TemplateError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise bad_request(f"The chat template refuses these messages: {error}", "messages") from error
        assert isinstance(prompt, str)
        return prompt
