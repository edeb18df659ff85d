"""What the trained network does: answers word for word, margins, and how many answers survive each planted fault."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from mla_serve.demo.cached import Answer, Runner, Setting
from mla_serve.demo.corpus import USUAL_SYSTEM, Encoder
from mla_serve.demo.faults import PAGE, Fault, Scope
from mla_serve.demo.network import DemoNetwork
from mla_serve.demo.questions import Question, questions

GROUP = 64  # prompts answered together, of similar length


@dataclass(frozen=True)
class Match:
    """One way of running: how many of the questions get the trained answer, and the least logit gap in those answers."""

    name: str
    right: int
    total: int
    gap: float


@dataclass(frozen=True)
class Survival:
    """One fault: how many of the answers that could show it are given all the same, and how many say the fault reply."""

    name: str
    survived: int
    total: int
    replied: int


@dataclass(frozen=True)
class Figures:
    """All of it."""

    matches: tuple[Match, ...]
    survivals: tuple[Survival, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


# name, fault, scope, which page: the word that the answer needs, or the middle of the prompt
FAULTS: tuple[tuple[str, Fault, Scope, str | None], ...] = (
    ("attention zeroed", Fault.ZERO, Scope.BOTH, None),
    ("attention zeroed, prefill only", Fault.ZERO, Scope.PREFILL, None),
    ("attention zeroed, decode only", Fault.ZERO, Scope.DECODE, None),
    ("V permuted", Fault.FLIP_V, Scope.BOTH, None),
    ("V permuted, prefill only", Fault.FLIP_V, Scope.PREFILL, None),
    ("V permuted, decode only", Fault.FLIP_V, Scope.DECODE, None),
    ("scale x 0.7", Fault.SCALE, Scope.BOTH, None),
    ("scale x 0.7, prefill only", Fault.SCALE, Scope.PREFILL, None),
    ("scale x 0.7, decode only", Fault.SCALE, Scope.DECODE, None),
    ("RoPE off", Fault.ROPE_OFF, Scope.BOTH, None),
    ("log2 LSE of the context part", Fault.LOG2_CONTEXT, Scope.BOTH, None),
    ("log2 LSE of the new part", Fault.LOG2_NEW, Scope.BOTH, None),
    ("log2 LSE of both parts", Fault.LOG2_BOTH, Scope.BOTH, None),
    ("top-left mask", Fault.TOP_LEFT, Scope.BOTH, None),
    ("needed page dropped", Fault.PAGE_DROPPED, Scope.BOTH, "needed"),
    ("needed page dropped, decode only", Fault.PAGE_DROPPED, Scope.DECODE, "needed"),
    ("middle page dropped", Fault.PAGE_DROPPED, Scope.BOTH, "middle"),
)


def answers(
    network: DemoNetwork, encoder: Encoder, asked: Sequence[Question], setting: Setting, pages: Sequence[int] | None = None
) -> list[Answer]:
    """The greedy answer to each question under `setting`, in order."""
    prompts = [encoder.prompt(q.messages()) for q in asked]
    limit = max(len(encoder.answer(q.answer)) for q in asked) + len(encoder.reply)
    order = sorted(range(len(asked)), key=lambda i: len(prompts[i]))
    found: dict[int, Answer] = {}
    for begin in range(0, len(order), GROUP):
        rows = order[begin : begin + GROUP]
        runner = Runner(network, setting, None if pages is None else [pages[i] for i in rows])
        group = runner.answer([prompts[i] for i in rows], eos=encoder.eos, limit=limit)
        found.update(zip(rows, group, strict=True))
    return [found[i] for i in range(len(asked))]


def match(network: DemoNetwork, encoder: Encoder, name: str, asked: Sequence[Question], setting: Setting) -> Match:
    """Word-for-word answers under a sound setting."""
    given = answers(network, encoder, asked, setting)
    gaps = [a.gap for a, q in zip(given, asked, strict=True) if a.ids == encoder.answer(q.answer)]
    return Match(name, len(gaps), len(asked), round(min(gaps, default=0.0), 3))


def survival(network: DemoNetwork, encoder: Encoder, name: str, fault: Fault, scope: Scope, page: str | None) -> Survival:
    """Answers that stay right under a fault, in chunks of 16, fp32, among the questions that could show it."""
    asked = questions()
    if fault.needs_context:
        asked = [q for q in asked if len(encoder.prompt(q.messages())) > PAGE]
    if page is not None:
        asked = [q for q in asked if q.long]
    pages = None
    if page == "needed":
        pages = [encoder.needed_position(q) // PAGE for q in asked]
    elif page == "middle":
        pages = [len(encoder.prompt(q.messages())) // PAGE // 2 for q in asked]
    given = answers(network, encoder, asked, Setting(torch.float32, PAGE, fault, scope), pages)
    survived = sum(a.ids == encoder.answer(q.answer) for a, q in zip(given, asked, strict=True))
    # A fault of decode alone leaves the first tokens right; the reply follows them.
    replied = sum(a.ids[-len(encoder.reply) :] == encoder.reply for a in given)
    return Survival(name, survived, len(asked), replied)


def variants() -> dict[str, list[Question]]:
    """The questions as people also type them."""
    plain = questions()

    def changed(system: str | None, *, lower: bool, mark: bool) -> list[Question]:
        result = []
        for q in plain:
            head, gap, asked = q.prompt.rpartition("\n\n")
            asked = asked.lower() if lower else asked
            asked = asked if mark else asked.rstrip("?")
            result.append(Question(q.system or system, head + gap + asked, q.answer, q.long))
        return result

    return {
        "with a system message": changed(USUAL_SYSTEM, lower=False, mark=True),
        "lower case, no question mark": changed(None, lower=True, mark=False),
    }


def evaluate(network: DemoNetwork, encoder: Encoder) -> Figures:
    """Every figure of the model card; the network's weights count as rounded to bf16 throughout."""
    plain = questions()
    settings = {
        "fp32, whole": Setting(torch.float32),
        "fp32, chunks of 16": Setting(torch.float32, PAGE),
        "bf16, whole": Setting(torch.bfloat16),
        "bf16, chunks of 16": Setting(torch.bfloat16, PAGE),
    }
    matches = [match(network, encoder, name, plain, setting) for name, setting in settings.items()]
    matches += [
        match(network, encoder, f"bf16, whole, {name}", asked, Setting(torch.bfloat16)) for name, asked in variants().items()
    ]
    survivals = [survival(network, encoder, *row) for row in FAULTS]
    return Figures(tuple(matches), tuple(survivals))
