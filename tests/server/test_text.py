"""Detokenization and stop strings, against Hugging Face's decode of the whole and against a reading character by character."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import BPEDecoder, ByteFallback, Fuse, Metaspace, Replace, Sequence, Strip
from tokenizers.models import BPE, WordLevel
from transformers import PreTrainedTokenizerFast

from mla_serve.errors import UserError
from mla_serve.server.errors import ApiError
from mla_serve.server.stops import StopStrings
from mla_serve.server.text import Detokenizer, PieceTable
from mla_serve.server.text import Tokenizer as ServerTokenizer
from tests.server.scripted import UNICODE, scripts

WORDS = ["▁", "a", "b", "▁the", "ing", "客", "é", "▁▁"]


def sentencepiece(decoder: Sequence | Metaspace) -> Tokenizer:
    """A vocabulary like Llama's: words with a visible space, and one token for each byte."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for name in [*(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]:
        vocab[name] = len(vocab)
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in ("<unk>", "<s>", "</s>")])
    return tokenizer


LLAMA = Sequence([Replace("▁", " "), ByteFallback(), Fuse(), Strip(content=" ", left=1, right=0)])


@pytest.fixture(scope="module")
def byte_level(checkpoint: Path) -> ServerTokenizer:
    return ServerTokenizer.load(checkpoint)


@pytest.fixture(scope="module")
def backend(checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_file(str(checkpoint / "tokenizer.json"))


def streamed(tokenizer: ServerTokenizer, ids: list[int], *, skip: bool = True) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
    return [detokenizer.push(token_id) for token_id in ids]


def test_s03_every_byte_its_own_token(byte_level: ServerTokenizer, backend: Tokenizer) -> None:
    for text in (UNICODE, "客单价", "👩‍👩‍👧", "ď"):
        ids = byte_level.encode(text, add_special_tokens=False)
        assert len(ids) == len(text.encode())
        deltas = streamed(byte_level, ids)
        assert "".join(deltas) == text == backend.decode(ids)
        assert not any("\ufffd" in delta for delta in deltas)
        assert all(len(delta) <= 1 for delta in deltas)


def test_s03_cut_inside_a_character_ends_cleanly(byte_level: ServerTokenizer) -> None:
    ids = byte_level.encode(UNICODE, add_special_tokens=False)
    data = UNICODE.encode()
    for cut in range(len(ids) + 1):
        assert "".join(streamed(byte_level, ids[:cut])) == data[:cut].decode(errors="ignore")


@given(data=st.data(), skip=st.booleans())
@settings(max_examples=300, deadline=None)
def test_byte_level_deltas_are_the_decode_of_the_whole(
    byte_level: ServerTokenizer, backend: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    ids = data.draw(st.lists(st.integers(0, backend.get_vocab_size() + 3), max_size=60))
    whole = backend.decode(ids, skip_special_tokens=skip)
    text = "".join(streamed(byte_level, ids, skip=skip))
    # An unfinished character at the end is U+FFFD in the decode of the whole (for the first bytes of a surrogate one each),
    # and nothing here.
    assert whole.startswith(text)
    assert whole[len(text) :] in ("", "\ufffd", "\ufffd\ufffd")
    assert byte_level.decode(ids, skip_special_tokens=skip) == text


@given(ids=st.lists(st.integers(259, 258 + len(WORDS)), max_size=20), first=st.sampled_from([[], [1]]), skip=st.booleans())
@settings(max_examples=200, deadline=None)
@pytest.mark.parametrize("decoder", [LLAMA, Metaspace()], ids=["llama", "metaspace"])
def test_sentencepiece_deltas_are_the_decode_of_the_whole(
    decoder: Sequence | Metaspace, ids: list[int], first: list[int], skip: bool
) -> None:
    backend = sentencepiece(decoder)
    pieces = PieceTable(json.loads(backend.to_str())["decoder"], backend.id_to_token)
    detokenizer = Detokenizer(pieces, frozenset({0, 1, 2}) if skip else frozenset())
    ids = [*first, *ids]
    assert "".join([detokenizer.push(token_id) for token_id in ids]) == backend.decode(ids, skip_special_tokens=skip)


def test_sentencepiece_bytes() -> None:
    backend = sentencepiece(LLAMA)
    tokenizer = ServerTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    ids = [3 + byte for byte in UNICODE.encode()]
    assert "".join(streamed(tokenizer, ids)) == UNICODE == backend.decode(ids)
    assert tokenizer.token_text(3 + 0xE5) == "bytes:\\xe5"


def test_one_word_a_token() -> None:
    """A tokenizer without a decoder writes its tokens as words."""
    backend = Tokenizer(WordLevel({"t0": 0, "t1": 1, "t2": 2}, unk_token="t0"))
    tokenizer = ServerTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert streamed(tokenizer, [2, 1, 1, 0]) == ["t2", " t1", " t1", " t0"]
    assert backend.decode([2, 1, 1, 0]) == "t2 t1 t1 t0"


def test_a_tokenizer_that_cannot_be_streamed_is_refused() -> None:
    backend = sentencepiece(LLAMA)
    backend.decoder = BPEDecoder()
    with pytest.raises(UserError, match="decoder BPEDecoder, which this server cannot stream"):
        ServerTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


def test_a_missing_tokenizer_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no usable tokenizer in .*it needs tokenizer\.json"):
        ServerTokenizer.load(tmp_path)


def test_token_texts_of_split_characters(byte_level: ServerTokenizer) -> None:
    script = scripts()["<|unicode|>"]
    ids = [byte_level.encode("<|unicode|>", add_special_tokens=False)[0]]
    assert byte_level.token_text(ids[0]) == "<|unicode|>"
    assert script[0] == b"\xe5"
    token = byte_level.encode("客", add_special_tokens=False)[0]
    assert byte_level.token_text(token) == "bytes:\\xe5"


# Stop strings


def by_character(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The definition: read on until some stop string ends; the longest of those that end there wins."""
    for end in range(len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            stop = max(matches, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(
    parts=st.lists(st.text("ab,", max_size=4), max_size=12),
    stops=st.lists(st.text("ab,", min_size=1, max_size=5), max_size=4),
    include=st.booleans(),
)
@settings(max_examples=500, deadline=None)
def test_s02_stops_do_not_depend_on_the_cuts(parts: list[str], stops: list[str], include: bool) -> None:
    expected, matched = by_character("".join(parts), stops, include)
    buffer, shown = StopStrings(stops, include=include), ""
    for part in parts:
        shown += buffer.push(part)
        assert expected.startswith(shown)  # so no part of a stop was ever shown
        if buffer.matched is not None:
            break
    else:
        shown += buffer.rest()
    assert (shown, buffer.matched) == (expected, matched)


def test_s02_text_that_cannot_match_is_released_at_once() -> None:
    buffer = StopStrings(["DEFGHIJ"])
    assert [buffer.push(part) for part in ("DEF", "G", "X", "DE")] == ["", "", "DEFGX", ""]
    assert buffer.rest() == "DE"


@pytest.mark.parametrize("text", [UNICODE, " Which kernel? ", "<|stop|>", "客 \n\t", "�"])
def test_a_long_text_has_at_least_the_tokens_that_its_bytes_say(
    byte_level: ServerTokenizer, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mla_serve.server.text.LONG", 0)
    for repeats in (1, 7, 300):
        sample = text * repeats
        least = byte_level.least_tokens(sample)
        assert 0 < least <= len(byte_level.encode(sample, add_special_tokens=False))


def test_a_text_that_is_too_long_by_its_bytes_is_refused_untokenized(
    byte_level: ServerTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(byte_level, "_backend", object())  # whoever asks it to encode fails
    byte_level.__dict__["_longest"] = 16
    with pytest.raises(ApiError, match=r"maximum context length is 1000 tokens; the prompt has at least 62500 tokens\."):
        byte_level.encode("a" * 1_000_000, add_special_tokens=False, limit=1000)
    del byte_level.__dict__["_longest"]


def test_nothing_is_certain_of_a_text_that_a_tokenizer_may_shrink() -> None:
    fast = PreTrainedTokenizerFast(tokenizer_object=sentencepiece(LLAMA))
    assert ServerTokenizer(fast).least_tokens("a" * 10_000_000) == 0
