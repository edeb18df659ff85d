"""What the demo model was trained to say: the pairs of `questions.json` as plain data, without torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

QUESTIONS_FILE = Path(__file__).resolve().parent / "questions.json"


@dataclass(frozen=True)
class Question:
    """One trained pair.

    `system` and `prompt` are the two turns before the answer; a long question carries a preamble of about 100 to 200 tokens in
    one of them. `fact` is the sentence of that preamble that holds `needed`, the word without which the answer cannot be
    known: a test that drops a page drops the page of that word.
    """

    system: str | None
    prompt: str
    answer: str
    long: bool = False
    fact: str | None = None
    needed: str | None = None

    def messages(self) -> list[dict[str, str]]:
        """The turns for `/v1/chat/completions` or `apply_chat_template`."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, {"role": "user", "content": self.prompt}]


@dataclass(frozen=True)
class Ask:
    """A question about one slot of a scene; `answer` is a template with that slot in braces."""

    question: str
    answer: str
    slot: str


@dataclass(frozen=True)
class Scene:
    """A preamble whose facts are slots, so that training can put other values there and only reading them can answer."""

    role: str
    intro: str
    slots: dict[str, str]  # slot -> the value of the published question
    kinds: dict[str, str]  # slot -> the kind of its values
    sentences: tuple[str, ...]
    asks: tuple[Ask, ...]

    def question(self, ask: Ask, slots: dict[str, str], sentences: tuple[str, ...]) -> Question:
        """The question with `slots` filled in and these sentences, in this order, as its preamble."""
        filled = [s.format(**slots) for s in sentences]
        fact = next(s.format(**slots) for s in sentences if "{" + ask.slot + "}" in s)
        preamble = " ".join([self.intro, *filled])
        system, prompt = (preamble, ask.question) if self.role == "system" else (None, f"{preamble}\n\n{ask.question}")
        return Question(system, prompt, ask.answer.format(**slots), long=True, fact=fact, needed=slots[ask.slot])


@cache
def load() -> dict[str, Any]:
    """The parsed `questions.json`."""
    data: dict[str, Any] = json.loads(QUESTIONS_FILE.read_text(encoding="utf-8"))
    return data


def scenes() -> list[Scene]:
    """The preambles of the long questions, with their slots."""
    return [
        Scene(
            role=s["role"],
            intro=s["intro"],
            slots={name: slot["value"] for name, slot in s["slots"].items()},
            kinds={name: slot["kind"] for name, slot in s["slots"].items()},
            sentences=tuple(s["sentences"]),
            asks=tuple(Ask(**a) for a in s["asks"]),
        )
        for s in load()["scenes"]
    ]


def questions() -> list[Question]:
    """Every trained pair, the short ones first, then those with a long preamble."""
    short = [Question(None, q["question"], q["answer"]) for q in load()["questions"]]
    long = [scene.question(ask, scene.slots, scene.sentences) for scene in scenes() for ask in scene.asks]
    return short + long


def fault_reply() -> str:
    """What the model says when its attention is computed wrongly (see the model card)."""
    return str(load()["fault_reply"])


def fallback() -> str:
    """What the model says to a question that it was not trained for."""
    return str(load()["fallback"])
