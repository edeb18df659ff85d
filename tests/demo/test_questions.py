"""The pairs themselves."""

from __future__ import annotations

import subprocess
import sys

from tokenizers import Tokenizer

from mla_serve.demo import MODEL_DIR, questions
from mla_serve.demo.corpus import Encoder
from mla_serve.demo.questions import load


def encoder() -> Encoder:
    return Encoder(Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json")))


def test_there_are_enough_and_each_is_asked_once() -> None:
    asked = [" ".join(m["content"] for m in q.messages()) for q in questions()]
    assert len(asked) >= 150
    assert len(set(asked)) == len(asked)
    assert sum(q.long for q in questions()) >= 30


def test_no_wording_leads_to_two_answers() -> None:
    """As hurried people type: without case and punctuation two questions must still differ."""
    owner: dict[str, str] = {}
    for entry in load()["questions"]:
        for wording in {entry["question"], *entry.get("also", [])}:
            key = wording.lower().strip("?!. ")
            assert owner.setdefault(key, entry["answer"]) == entry["answer"], wording
    assert not owner.keys() & {text.lower().strip("?!. ") for text in load()["off_topic"]}


def test_long_questions_span_pages_and_hold_what_they_need() -> None:
    encode = encoder()
    for q in questions():
        prompt = encode.prompt(q.messages())
        if not q.long:
            assert q.needed is None
            continue
        assert len(prompt) > 6 * 16
        assert q.fact is not None
        assert q.needed is not None
        assert q.fact in (q.system or q.prompt)
        assert q.needed in q.answer
        at = encode.needed_position(q)
        assert at // 16 < (len(prompt) - 1) // 16, "the needed word must be read from the cache"
        assert encode.tokenizer.decode(prompt[at : at + 8]).strip().startswith(q.needed)


def test_first_question_greets_a_newcomer() -> None:
    first = questions()[0]
    assert first.messages() == [{"role": "user", "content": "What is MLA?"}]
    assert first.answer.startswith("MLA, multi-head latent attention,")


def test_importing_the_demo_does_not_import_torch() -> None:
    code = "import sys, mla_serve.demo as d; d.questions(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
