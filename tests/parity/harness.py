"""Our engine on the same prompts: EngineCore does the batching, and every logit that the runner computes is kept."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from mla_serve.engine.base import Request, Sampling
from mla_serve.engine.embedded.core import EngineCore
from mla_serve.engine.embedded.messages import EngineConfig
from mla_serve.engine.embedded.runner import Runner
from mla_serve.engine.embedded.sequence import Work
from tests.parity.reference import NEW_TOKENS, Expected, prompt


class Recorder:
    """Stands before a Runner, asks it for all positions and keeps them by request."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.logits: dict[str, list[Tensor]] = defaultdict(list)

    def run(self, works: Sequence[Work]) -> Tensor:
        rows = self.runner.run(works, all_positions=True)
        ends, end = [], 0
        for work in works:
            self.logits[work.seq.id].append(rows[end : end + work.count])
            end += work.count
            if work.samples:
                ends.append(end - 1)
        return rows[ends]

    def __getattr__(self, name: str) -> object:
        return getattr(self.runner, name)


class Ours:
    """One engine core; `run` gives what `reference.expect` gives for the same prompts, computed together."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.core = EngineCore(config)
        self.recorder = Recorder(self.core.runner)
        self.core.runner = self.recorder  # type: ignore[assignment]

    def run(self, lengths: Sequence[int]) -> dict[int, Expected]:
        tokens: dict[str, list[int]] = defaultdict(list)
        for length in lengths:
            sampling = Sampling(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
            self.core.add(Request(str(length), prompt(length), sampling))
        while self.core.has_work:
            for step in self.core.step():
                assert step.error is None
                tokens[step.id] += step.token_ids
        results = {n: Expected(tokens[str(n)], torch.cat(self.recorder.logits[str(n)]).cpu()) for n in lengths}
        self.recorder.logits.clear()
        return results


def difference(ours: Expected, theirs: Expected) -> float:
    """The largest logit difference at any position, as a multiple of max(1, max |logit|)."""
    assert ours.logits.shape == theirs.logits.shape
    assert ours.logits.isfinite().all()
    return ((ours.logits - theirs.logits).abs().max() / theirs.logits.abs().max().clamp_min(1)).item()
