"""Kernels change while nobody's request runs, and greedy tokens are the same before and after."""

from dataclasses import replace

import torch

from mla_serve.engine.base import Request, Sampling
from mla_serve.engine.embedded import messages as m
from mla_serve.engine.embedded.core import EngineCore
from mla_serve.engine.embedded.process import serve
from mla_serve.selection.candidates import candidates
from mla_serve.selection.decision import CandidateResult
from mla_serve.selection.measure import InProcess
from mla_serve.shapes import Phase


class Finished:
    """An idle probe that has measured something already."""

    done = False

    def __init__(self, decisions):
        self.decisions, self.pauses = decisions, 0

    def pause(self):
        self.pauses += 1

    def rest(self):
        found, self.decisions = self.decisions, []
        return found

    def stop(self):
        self.decisions = []


def measured(core, decision, winner):
    """`decision` as if `winner`, the first form of it that runs, had been measured the fastest."""
    forms = candidates(decision.bucket.shape, core.selector.backends)
    form = next(c for c in forms if c.verdict is None and c.native.name == winner)
    row = CandidateResult(winner, form.padding, "chosen", ms=1.0, plan_ms=0.0, spread=0.0)
    return replace(
        decision, policy="measured", winner=winner, padding=form.padding, candidates=(row,), note=None,
        measured_at="2026-12-01T10:00:00Z", layers=core.selector.layers,
    )  # fmt: skip


def answer(core, name, at=None, then=None):
    """The tokens of one greedy request; `then` is called after `at` steps."""
    core.add(Request(name, list(range(3, 40)), Sampling(max_tokens=24, temperature=0.0, ignore_eos=True)))
    tokens, steps = [], 0
    while core.has_work:
        steps += 1
        if steps == at:
            then()
        tokens += [token for step in core.step() for token in step.token_ids]
    return tokens


def prefill_kernels(core):
    return {d.label for d in core.runner.bound.decisions() if d.bucket.shape.phase is Phase.PREFILL}


def test_greedy_streams_across_a_change_of_table_are_equal(settings, tmp_path):
    core = EngineCore(settings(policy="measured", decisions=str(tmp_path / "t.json"), prefix_cache=False))
    first = answer(core, "before")
    old = prefill_kernels(core)
    winner = "torch-math" if old == {"torch-flash+pad"} else "torch-flash"
    prefills = [d for d in core.runner.bound.decisions() if d.bucket.shape.phase is Phase.PREFILL]
    core.prober = Finished([measured(core, d, winner) for d in prefills])

    def in_the_midst():
        assert prefill_kernels(core) == old, "nobody's kernels change midway"

    assert answer(core, "during", at=10, then=in_the_midst) == first
    assert core.prober.pauses == 1
    assert prefill_kernels(core) == old
    core.rest()
    (new,) = prefill_kernels(core)
    assert new.removesuffix("+pad") == winner
    assert {d.policy for d in core.runner.bound.decisions() if d.bucket.shape.phase is Phase.PREFILL} == {"measured"}
    assert answer(core, "after") == first
    core.close()


def test_what_is_measured_is_not_probed_again(settings, tmp_path):
    config = settings(policy="measured", probe="idle", decisions=str(tmp_path / "t.json"), pins={"decode": "torch-mla"})
    core = EngineCore(config)
    assert core.prober is not None
    shapes = core.prober._shapes
    assert {shape.phase for shape in shapes} == {Phase.PREFILL, Phase.CONTEXT}, "a pin leaves nothing to measure"
    for shape in shapes:
        core.selector.table.put(measured(core, core.selector.decide(shape), "torch-math"), save=False)
    core.selector.table.save()
    core.close()
    assert EngineCore(config).prober is None


class Slow(InProcess):
    """Takes its time over every bucket, as a kernel that hangs does."""

    def __call__(self, shape, candidates):
        for _ in range(3):
            self.waiting()
        return super().__call__(shape, candidates)


class OneRequest:
    """The socket of a server that sends one request, and Stop once it is answered."""

    full = False

    def __init__(self, core):
        self.core, self.turns = core, []
        self.messages = [m.Add(Request("r", [5, 6, 7], Sampling(max_tokens=3, temperature=0.0, ignore_eos=True)))]

    def receive(self, seconds):
        if self.messages:
            return [self.messages.pop()]
        return [] if self.core.has_work else [m.Stop()]

    def turn(self, steps, stats):
        self.turns.append([step.id for step in steps])

    def flush(self):
        """Nothing is kept."""


def test_the_heart_beats_while_a_kernel_is_measured_on_demand(settings, tmp_path):
    core = EngineCore(settings(policy="measured", probe="on-demand", decisions=str(tmp_path / "t.json")))
    core.measurer = core.selector.measurer = Slow(torch.device("cpu"), measure=lambda trial, part: 1.0)
    link = OneRequest(core)
    serve(core, link)
    assert link.turns.count(["r"]) == 3
    assert link.turns[:3] == [[], [], []], "the prefill's measurement, before its token"
    assert {decision.policy for decision in core.runner.bound.decisions()} == {"measured"}
