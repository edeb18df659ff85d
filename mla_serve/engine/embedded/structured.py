"""Structured output: grammars compiled on a thread, and the tokens that fit next found beside the forward pass.

A JSON schema, "any JSON object" and a regular expression are xgrammar's work, over the bytes of ordinary tokens: special tokens
never match there, since a detokenizer may drop them. A choice is a trie of token ids instead, each string cut as the tokenizer
cuts it, special tokens included ("<think>" is one token where the model has one).

xgrammar and transformers are imported by the first such request, not before.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mla_serve.engine.base import Structured
from mla_serve.engine.embedded.choices import Trie, TrieMatcher
from mla_serve.engine.embedded.schemas import checked_schema
from mla_serve.engine.embedded.sequence import Matcher, Sequence
from mla_serve.engine.embedded.side_thread import Job, SideThread, TooBusy

__all__ = ["Fill", "Grammars"]

logger = logging.getLogger(__name__)

COMPILE_SECONDS = 20.0  # per grammar; a schema of 100 KiB takes under one
FILL_SECONDS = 5.0  # per token, by the clock
FILL_CPU_SECONDS = 0.5  # per token, of a core; an ordinary grammar takes a thousandth of that
MAX_TEXT = 128 * 1024  # bytes of a schema, an expression or a list of choices
MAX_COMPILED = 256 * 2**20  # bytes of one compiled grammar
CACHE = 256 * 2**20  # bytes of compiled grammars kept
SPARE_THREADS = 2  # that may be lost to grammars which never end
WHITESPACE = 16  # characters between two parts of a JSON text at most: a model may write blanks for ever

TOO_SLOW = "finding the tokens that fit this request's grammar takes too long, so it was ended; use a simpler grammar"
DEAD_END = "no token of the model fits this request's grammar here, so it was ended; use another grammar"

NewMatcher = Callable[[], Matcher]


class Grammars:
    """Compiles what requests ask for and fills masks, for one model's tokenizer, each on a thread of its own."""

    def __init__(self, model: str, *, vocab_size: int, end_token_ids: Iterable[int]) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._end_token_ids = sorted(end_token_ids)
        self._tokenizer: Any = None
        self._compiler: Any = None
        self._compiling = SideThread("grammars", spare=SPARE_THREADS)
        self._filling = SideThread("masks", spare=SPARE_THREADS)

    def compile(self, structured: Structured) -> Job[NewMatcher]:
        """Begins to compile. Raises ValueError at once for what is too long; see `finished` for the rest."""
        size = len(structured.value.encode())
        if size > MAX_TEXT:
            raise ValueError(f"the {_NAMES[structured.kind]} has {size} bytes, and the limit is {MAX_TEXT}")
        if self._tokenizer is None:
            self._compiling.submit(self._load)  # a job of its own, so that no grammar's time is spent on it
        return self._compiling.submit(partial(self._compile, structured), COMPILE_SECONDS)

    def finished(self, job: Job[NewMatcher]) -> Matcher | None:
        """A matcher at its start once the job is done, None before that. Raises ValueError, one sentence, if it failed."""
        self._compiling.give_up_late()
        if job.lost:
            raise ValueError(f"the grammar was not compiled within {COMPILE_SECONDS:g} seconds; use a simpler one")
        if not job.done:
            return None
        try:
            return job.result()()
        except TooBusy:
            raise ValueError("the engine is busy with grammars that take too long to compile; try again later") from None
        except ValueError:
            raise
        except Exception as error:  # whatever a tokenizer or compiler raises, it is this request's alone
            logger.exception("a grammar could not be compiled")
            raise ValueError(f"the grammar cannot be compiled: {_plain(error)}") from None

    def fill(self, seqs: Iterable[Sequence]) -> Fill:
        """Begins to find which tokens fit next for those of `seqs` that have a grammar.

        The thread is started before the model is called. On a GPU it works while the host waits; on a CPU the model has the
        cores, and the thread gets its share of them from the system: what it computes (in C++, without Python's lock) is the
        same work either way, microseconds for most grammars.
        """
        return Fill(self._filling, {seq: seq.matcher for seq in seqs if seq.matcher is not None}, self._vocab_size)

    def _load(self) -> None:
        """Loads tokenizer and compiler once; whatever fails is told by the grammars behind it, which try again."""
        try:
            self._ensure_tokenizer()
            self._ensure_compiler()
        except ValueError as error:
            logger.warning("%s", error)

    def _compile(self, structured: Structured) -> NewMatcher:
        tokenizer = self._ensure_tokenizer()
        if structured.kind == "choice":
            trie = _trie(tokenizer, structured.value, self._end_token_ids)
            return lambda: TrieMatcher(trie, self._end_token_ids)
        compiler = self._ensure_compiler()
        schema = checked_schema(structured.value) if structured.kind == "json_schema" else '{"type": "object"}'
        try:
            match structured.kind:
                case "json_schema" | "json_object":
                    compiled = compiler.compile_json_schema(schema, max_whitespace_cnt=WHITESPACE)
                case "regex":
                    compiled = compiler.compile_regex(structured.value)
        except RuntimeError as error:
            raise ValueError(f"the {_NAMES[structured.kind]} cannot be followed: {_plain(error)}") from None
        if compiled.memory_size_bytes > MAX_COMPILED:
            raise ValueError(f"the {_NAMES[structured.kind]} is too large once it is compiled; use a simpler one")
        return lambda: _XGrammarMatcher(compiled, ends=bool(self._end_token_ids))

    def _ensure_tokenizer(self) -> Any:
        if self._tokenizer is None:
            try:
                from transformers import AutoTokenizer

                self._tokenizer = AutoTokenizer.from_pretrained(self._model, local_files_only=True, trust_remote_code=False)
            except Exception as error:  # noqa: BLE001 - a tokenizer's file may be wrong in any way
                raise ValueError(
                    f"structured output needs the model's tokenizer, which cannot be loaded: {_plain(error)}"
                ) from None
        return self._tokenizer

    def _ensure_compiler(self) -> Any:
        if self._compiler is None:
            try:
                import xgrammar
            except ImportError as error:
                raise ValueError(f"this kind of structured output needs xgrammar, which cannot be imported: {error}") from None

            tokenizer = self._ensure_tokenizer()
            found = xgrammar.TokenizerInfo.from_huggingface(tokenizer, stop_token_ids=self._end_token_ids or None)
            spelled = [bytes(token) for token in found.decoded_vocab][: self._vocab_size]
            for token in _special_ids(tokenizer):
                if token < len(spelled):
                    spelled[token] = b""  # xgrammar lets no empty token match
            info = xgrammar.TokenizerInfo(
                spelled, xgrammar.VocabType.RAW, vocab_size=self._vocab_size, stop_token_ids=self._end_token_ids,
                add_prefix_space=found.add_prefix_space,
            )  # fmt: skip
            self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=CACHE)
        return self._compiler


class Fill:
    """The masks of one step, under way. Their memory is the step's own: a thread left behind disturbs no later one."""

    def __init__(self, thread: SideThread, matchers: Mapping[Sequence, Matcher], vocab_size: int) -> None:
        self._thread = thread
        self._masks = torch.zeros(len(matchers), -(-vocab_size // 32), dtype=torch.int32)
        self._jobs = {
            seq: thread.submit(partial(_fill, matcher, row), FILL_SECONDS)
            for row, (seq, matcher) in zip(self._masks, matchers.items(), strict=True)
        }

    def take(self) -> tuple[dict[Sequence, Tensor], dict[Sequence, str]]:
        """Waits; the masks, as `penalties.adjust` has them, and why the other sequences cannot go on."""
        masks: dict[Sequence, Tensor] = {}
        faults: dict[Sequence, str] = {}
        for row, (seq, job) in zip(self._masks, self._jobs.items(), strict=True):
            if not self._thread.finish(job):
                faults[seq] = TOO_SLOW
                continue
            try:
                fits = job.result()
            except Exception as error:  # noqa: BLE001 - ends this request alone
                faults[seq] = TOO_SLOW if isinstance(error, TooBusy) else f"this request's grammar failed: {_plain(error)}"
                continue
            if job.seconds > FILL_CPU_SECONDS:
                faults[seq] = TOO_SLOW
            elif not fits:
                faults[seq] = DEAD_END
            else:
                masks[seq] = row
        return masks, faults


class _XGrammarMatcher:
    """xgrammar's matcher as a Matcher. `ends`: whether the model has end tokens, one of which completes the output."""

    def __init__(self, compiled: Any, *, ends: bool) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=not ends)

    @property
    def terminated(self) -> bool:
        return bool(self._matcher.is_terminated())

    def fill(self, words: Tensor) -> None:
        self._matcher.fill_next_token_bitmask(words[None])

    def accept(self, token: int) -> bool:
        try:
            return bool(self._matcher.accept_token(token))
        except RuntimeError:
            logger.exception("a grammar could not take a token")
            return False


def _fill(matcher: Matcher, words: Tensor) -> bool:
    """Whether any token fits."""
    matcher.fill(words)
    return bool(words.any())


def _trie(tokenizer: Any, value: str, end_token_ids: Iterable[int]) -> Trie:
    """Raises ValueError for what is no list of strings, or a string that the tokenizer cannot spell to the letter."""
    try:
        choices = json.loads(value)
    except (ValueError, RecursionError):
        choices = None
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise ValueError("the list of choices should be a JSON list of strings, at least one")
    ends = set(end_token_ids)
    sequences = []
    for choice in choices:
        tokens = tokenizer.encode(choice, add_special_tokens=False)
        if tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False) != choice:
            raise ValueError(f"the model's tokenizer cannot spell the choice {_short(choice)} to the letter")
        if ends & set(tokens):
            raise ValueError(f"the choice {_short(choice)} holds the model's end token, which would end the answer there")
        sequences.append(tokens)
    return Trie.of(sequences)


def _special_ids(tokenizer: Any) -> set[int]:
    added = {token for token, entry in tokenizer.added_tokens_decoder.items() if entry.special}
    return added | set(tokenizer.all_special_ids)


def _plain(error: Exception) -> str:
    """The first line of a message, without a clock, a source file or the check that failed."""
    text = re.sub(r"^\[[\d:]+\] \S+?:\d+: ", "", str(error).strip())
    text = re.sub(r"^Check failed: .*? is false: ", "", text)
    return _short(text.splitlines()[0].rstrip(". ") if text else type(error).__name__, quote=False)


def _short(text: str, *, quote: bool = True) -> str:
    text = text if len(text) <= 200 else f"{text[:200]}..."
    return repr(text) if quote else text


_NAMES = {
    "json_object": "JSON object",
    "json_schema": "JSON schema",
    "regex": "regular expression",
    "choice": "list of choices",
}
