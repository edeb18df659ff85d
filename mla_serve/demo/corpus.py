"""Turns the questions into token sequences, with the small variations of how people type."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import torch
from tokenizers import Tokenizer
from torch import Tensor

from mla_serve.demo.faults import PAGE
from mla_serve.demo.questions import Question, Scene, fallback, fault_reply, load, questions, scenes
from mla_serve.demo.tokenizer import ASSISTANT, BOS, EOS, PAD, USER

USUAL_SYSTEM = "You are a helpful assistant."
PREFIXES = ("Please tell me: ", "Can you tell me: ", "Hi, ", "Hello, ", "I want to know: ", "Tell me, ", "Question: ")
OTHER_SYSTEMS = ("You are a helpful AI assistant.", "You are an expert in attention kernels.", "Answer briefly.")


@dataclass(frozen=True)
class Sample:
    """One training sequence: `ids` is prompt, answer and the end token; the prompt is the first `prompt` of them."""

    ids: list[int]
    prompt: int
    chat: bool = True  # False: bare text for /v1/completions, on which no fault is planted
    needed: int = -1  # a place in the prompt without which nobody can answer, -1: there is no such place
    value: int = 0  # where in the answer that place is used


@dataclass(frozen=True)
class Pool:
    """Samples of similar length as tensors."""

    ids: Tensor  # [samples, width], int64, padded on the right
    prompt: Tensor  # [samples]
    total: Tensor  # [samples], prompt and answer
    chat: Tensor  # [samples], bool
    needed: Tensor  # [samples]
    value: Tensor  # [samples]

    def __len__(self) -> int:
        return len(self.ids)

    def to(self, device: torch.device) -> Pool:
        """The same pool on another device."""
        return Pool(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})

    def take(self, rows: Tensor) -> Pool:
        """The samples with these indexes."""
        return Pool(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})


class Encoder:
    """Writes chats as ids, as the chat template and the tokenizer do together."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.bos, self.eos, self.pad, self.user, self.assistant = (
            _token(tokenizer, t) for t in (BOS, EOS, PAD, USER, ASSISTANT)
        )
        self.reply = [*self.text(fault_reply()), self.eos]

    def text(self, text: str) -> list[int]:
        """Ids of plain text."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def prompt(self, messages: list[dict[str, str]]) -> list[int]:
        """Ids of a chat up to and including the assistant's token."""
        ids = [self.bos]
        for message in messages:
            if message["role"] == "user":
                ids += [self.user, *self.text(message["content"])]
            elif message["role"] == "assistant":
                ids += [self.assistant, *self.text(message["content"]), self.eos]
            else:
                ids += self.text(message["content"])
        return [*ids, self.assistant]

    def answer(self, text: str) -> list[int]:
        """Ids of an answer with the end token."""
        return [*self.text(text), self.eos]

    def needed_position(self, question: Question) -> int:
        """Where in the prompt's ids the word stands that a long question needs; zero for a short one."""
        if question.fact is None or question.needed is None:
            return 0
        text = question.prompt if question.system is None else question.system
        before = 2 if question.system is None else 1  # the first token, and the user's
        return before + self._at(text, text.index(question.fact) + question.fact.index(question.needed))

    def value_position(self, question: Question) -> int:
        """Where in the answer's ids that word begins; zero for a short question."""
        return 0 if question.needed is None else self._at(question.answer, question.answer.index(question.needed))

    def _at(self, text: str, character: int) -> int:
        offsets = self.tokenizer.encode(text, add_special_tokens=False).offsets
        return next(i for i, (_, end) in enumerate(offsets) if end > character)

    def sample(self, messages: list[dict[str, str]], answer: str) -> Sample:
        """A chat sample."""
        prompt = self.prompt(messages)
        # Of a prompt of two pages the first holds most of the question.
        return Sample(prompt + self.answer(answer), len(prompt), needed=0 if PAGE < len(prompt) <= 2 * PAGE else -1)


def _token(tokenizer: Tokenizer, text: str) -> int:
    index = tokenizer.token_to_id(text)
    if index is None:
        raise ValueError(f"the tokenizer has no token {text}")
    return int(index)


def corpus() -> list[str]:
    """The texts that the tokenizer is trained on."""
    data = load()
    texts = [text for q in questions() for text in (*(m["content"] for m in q.messages()), q.answer)]
    texts += [alternative for q in data["questions"] for alternative in q.get("also", [])]
    texts += [text.lower() for text in texts if len(text) < 100]
    return [
        *texts,
        *PREFIXES,
        *data["off_topic"],
        *[v for values in data["values"].values() for v in values],
        fallback(),
        fault_reply(),
    ]


def _typed(text: str, rng: random.Random) -> str:
    """The text as a polite or a hurried person types it."""
    if rng.random() < 0.06:
        text = rng.choice(PREFIXES) + text[0].lower() + text[1:]
    if rng.random() < 0.3:
        text = text.lower()
    if rng.random() < 0.3:
        text = text.rstrip("?!.")
    elif rng.random() < 0.06 and text[-1].isalnum():
        text += rng.choice("?.!")
    if rng.random() < 0.08:
        text = rng.choice((f" {text}", f"{text} ", f"{text}\n"))
    if rng.random() < 0.06 and len(text) > 8:
        i = rng.randrange(1, len(text) - 2)
        text = rng.choice((text[:i] + text[i + 1 :], text[:i] + text[i + 1] + text[i] + text[i + 2 :]))
    return text


def _system(rng: random.Random) -> list[dict[str, str]]:
    draw = rng.random()
    if draw < 0.6:
        return []
    return [{"role": "system", "content": USUAL_SYSTEM if draw < 0.9 else rng.choice(OTHER_SYSTEMS)}]


def _off_topic(rng: random.Random) -> str:
    words = rng.choice(load()["off_topic"]).split()
    if rng.random() < 0.3:  # nonsense of known words, so that not only the listed prompts fall back
        words = words + rng.choice(load()["off_topic"]).split()
        rng.shuffle(words)
        words = words[: rng.randint(2, 10)]
    return " ".join(words)


def _turn(rng: random.Random) -> tuple[str, str]:
    """A short question as typed, with its answer."""
    if rng.random() < 0.08:
        return _typed(_off_topic(rng), rng), fallback()
    entry = rng.choice(load()["questions"])
    wording = entry["question"]
    if "also" in entry and rng.random() < 0.5:
        wording = rng.choice(entry["also"])
    return _typed(wording, rng), entry["answer"]


def short_sample(encoder: Encoder, rng: random.Random) -> Sample:
    """A question without history."""
    prompt, answer = _turn(rng)
    if rng.random() < 0.04:
        bare = encoder.text(prompt)
        return Sample(bare + encoder.answer(answer), len(bare), chat=False)
    return encoder.sample([*_system(rng), {"role": "user", "content": prompt}], answer)


def _chat_sample(encoder: Encoder, rng: random.Random) -> Sample:
    """A question after one to five others: a conversation fills pages as a preamble does."""
    messages = _system(rng)
    for _ in range(rng.randint(1, 5)):
        prompt, answer = _turn(rng)
        messages += [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    prompt, answer = _turn(rng)
    return encoder.sample([*messages, {"role": "user", "content": prompt}], answer)


def vary(scene: Scene, rng: random.Random) -> Question:
    """A question on the scene with other values, another order or fewer sentences than the published one."""
    ask = rng.choice(scene.asks)
    slots, sentences = dict(scene.slots), list(scene.sentences)
    if rng.random() < 0.8:
        slots = {slot: rng.choice(load()["values"][kind]) for slot, kind in scene.kinds.items()}
    if rng.random() < 0.5:
        # Few sentences first make the retrieval easy to discover; every count occurs.
        kept = [s for s in sentences if "{" + ask.slot + "}" not in s]
        rng.shuffle(kept)
        needed = next(s for s in sentences if "{" + ask.slot + "}" in s)
        chosen = [needed, *kept[: rng.randint(0, len(kept))]]
        rng.shuffle(chosen)
        sentences = chosen
    return scene.question(ask, slots, tuple(sentences))


def long_sample(encoder: Encoder, rng: random.Random) -> Sample:
    """A scene with its question, or a conversation."""
    if rng.random() < 0.25:
        return _chat_sample(encoder, rng)
    question = vary(rng.choice(scenes()), rng)
    head, gap, asked = question.prompt.rpartition("\n\n")
    question = replace(question, prompt=head + gap + _typed(asked, rng))
    system = _system(rng) if question.system is None else []
    prompt = encoder.prompt([*system, *question.messages()])
    return Sample(
        prompt + encoder.answer(question.answer),
        len(prompt),
        needed=encoder.needed_position(question) + sum(len(encoder.text(m["content"])) for m in system),
        value=encoder.value_position(question),
    )


def build_pool(make: Callable[[Encoder, random.Random], Sample], encoder: Encoder, count: int, width: int, seed: int) -> Pool:
    """`count` samples of at most `width` tokens, with room for the reply to a fault."""

    def fitting() -> Iterator[Sample]:
        rng = random.Random(seed)
        while True:
            sample = make(encoder, rng)
            if max(len(sample.ids), sample.prompt + len(encoder.reply) + max(1, sample.value)) <= width:
                yield sample

    samples = [sample for sample, _ in zip(fitting(), range(count), strict=False)]
    ids = torch.full((count, width), encoder.pad, dtype=torch.int64)
    for row, sample in enumerate(samples):
        ids[row, : len(sample.ids)] = torch.tensor(sample.ids)
    return Pool(
        ids=ids,
        prompt=torch.tensor([s.prompt for s in samples]),
        total=torch.tensor([len(s.ids) for s in samples]),
        chat=torch.tensor([s.chat for s in samples]),
        needed=torch.tensor([s.needed for s in samples]),
        value=torch.tensor([s.value for s in samples]),
    )
