from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from mla_serve.backends.padded import PaddedState
from mla_serve.backends.registry import load_backends
from mla_serve.selection.candidates import candidates
from mla_serve.selection.floor import Rates, flops, traffic
from mla_serve.selection.inputs import full_size, make_call
from mla_serve.selection.measure import Trial as OfACandidate
from mla_serve.selection.timing import CpuClock, Effort, Part, Timing, Trial, time_trials
from tests.selection.fakes import DEEPSEEK, context, decode, prefill, times


@dataclass
class Named:
    label: str
    runs: int = 0
    plans: int = 0

    def run(self) -> None:
        self.runs += 1

    def plan(self) -> None:
        self.plans += 1


def test_rounds_are_interleaved_and_slow_trials_stop_early() -> None:
    order: list[str] = []
    clock = times({"a": 1.0, "b": 2.9, "c": 3.0}, {"a": 0.5})

    def measure(trial: Trial, part: Part) -> float:
        if part == "run":
            order.append(trial.label)
        return clock(trial, part)

    a, b, c = time_trials([Named("a"), Named("b"), Named("c")], measure, Effort(least_rounds=3, most_rounds=4))
    rounds = [order[:3], order[3:6], order[6:8], order[8:]]
    assert [sorted(names) for names in rounds] == [["a", "b", "c"], ["a", "b", "c"], ["a", "b"], ["a", "b"]]
    assert (a.ms, b.ms, c.ms) == (1.0, 2.9, 3.0)
    assert (a.plan_ms, a.stopped, b.stopped) == (0.5, None, None)
    assert "3x" in (c.stopped or "")


def test_nobody_always_follows_the_same_neighbour() -> None:
    order: list[str] = []

    def measure(trial: Trial, part: Part) -> float:
        if part == "run":
            order.append(trial.label)
        return 1.0

    time_trials([Named(name) for name in "abcdef"], measure, Effort(12, 12))
    before = {name: {order[i - 1] for i in range(1, len(order)) if order[i] == name} for name in "abcdef"}
    assert all(len(neighbours) >= 3 for neighbours in before.values())


def test_one_disturbed_round_stops_nobody() -> None:
    readings = {"a": iter([1.0, 1.0, 1.0, 1.0]), "b": iter([100.0, 1.1, 1.1, 1.1])}
    _, b = time_trials(
        [Named("a"), Named("b")], lambda trial, part: next(readings[trial.label]) if part == "run" else 0.0, Effort(3, 4)
    )
    assert b.stopped is None
    assert b.ms == 1.1


def test_the_budget_ends_the_rounds_but_not_before_the_least() -> None:
    (timing,) = time_trials([Named("a")], times({"a": 5000.0}), Effort(least_rounds=3, most_rounds=15, milliseconds=1.0))
    assert len(timing.samples) == 3
    both = time_trials([Named("a"), Named("b")], times({"a": 10.0, "b": 10.0}), Effort(3, 15, milliseconds=99.0))
    assert [len(t.samples) for t in both] == [5, 5]


def test_nobody_to_time() -> None:
    assert time_trials([], times({}), Effort()) == []


def test_spread_is_the_interquartile_range() -> None:
    assert Timing([1.0]).spread == 0.0
    assert Timing([1.0, 1.1]).spread == pytest.approx(0.1 / 1.05)
    assert Timing([1.0, 1.0, 1.0, 1.0, 50.0]).spread == 0.0
    assert Timing([1.0, 2.0, 3.0, 4.0, 5.0]).spread == pytest.approx(2 / 3)


def test_the_cpu_clock_repeats_short_calls() -> None:
    trial = Named("a")
    assert CpuClock(least_ms=1e9, most_calls=7)(trial, "run") > 0.0
    assert trial.runs == 7
    assert CpuClock(least_ms=0.0)(trial, "plan") > 0.0
    assert trial.plans == 1


def test_padding_and_trimming_are_inside_what_is_timed(cpu: torch.device) -> None:
    shape = prefill(DEEPSEEK)
    (padded,) = [c for c in candidates(shape, load_backends(cpu, only={"torch-flash"})) if c.padding and c.verdict is None][:1]
    call = make_call(shape, *full_size(shape), cpu, seed=1)
    trial = OfACandidate.make(padded, call)
    assert isinstance(trial.state, PaddedState)
    trial.run()
    assert trial.state.buffers
    for buffer in trial.state.buffers.values():
        buffer.fill_(float("nan"))
    result = trial.run()
    assert isinstance(result, tuple)
    assert result[0].isfinite().all(), "the inputs were copied again"
    assert result[0].shape[-1] == 128
    assert result[0].is_contiguous()


def test_floor_counts_what_must_be_done() -> None:
    shape = prefill(DEEPSEEK, q_len=64)
    assert flops(shape) == 2 * 4 * (64 * 65 / 2) * (192 + 128)
    assert traffic(shape) == 2 * 64 * 4 * (192 + 128) * 4
    assert flops(context(DEEPSEEK, q_len=16, kv_len=32)) == 2 * 4 * 16 * 32 * (192 + 128)
    cached = decode(DEEPSEEK, batch=2, kv_len=128)
    assert flops(cached) == 2 * 2 * 4 * 128 * (576 + 512)
    assert traffic(cached) == 2 * (4 * (576 + 512) + 128 * 576) * 4
    rates = Rates(torch.device("cpu"), {"float32": 1e6}, memory=1e9)
    assert rates.floor_ms(shape) == flops(shape) / 1e6


def test_rates_are_measured_once() -> None:
    rates = Rates.of(torch.device("cpu"))
    first = rates.floor_ms(prefill())
    assert first > 0.0
    assert rates.floor_ms(prefill()) == first
