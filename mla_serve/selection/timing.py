"""The clock: candidates run in turn, round after round, so that whatever disturbs the machine disturbs them all alike.

A run includes the copies of a padded form; a plan is timed apart. What a round measures is injectable, so that the choice can
be tested with times of one's own.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Literal, Protocol, TypeVar

import torch

Part = Literal["run", "plan"]
T = TypeVar("T")


class Trial(Protocol):
    """A candidate that is ready to run: one call, or one plan."""

    @property
    def label(self) -> str: ...
    def run(self) -> object: ...
    def plan(self) -> object: ...


Measure = Callable[[Trial, Part], float]
"""Runs one part of a trial and returns milliseconds."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure one bucket: rounds, and milliseconds of runs after which no round starts beyond the least number.

    A candidate `stop_at` times slower than the best is timed no further.
    """

    least_rounds: int = 3
    most_rounds: int = 30
    milliseconds: float = 1000.0
    plans: int = 5
    stop_at: float = 3.0


@dataclass(slots=True)
class Timing:
    """Milliseconds of one trial. `ms` and `plan_ms` are medians, `spread` the interquartile range over the median."""

    samples: list[float] = field(default_factory=list)
    plan_ms: float = 0.0
    stopped: str | None = None

    @property
    def ms(self) -> float:
        return median(self.samples)

    @property
    def spread(self) -> float:
        if len(self.samples) < 3:
            return 0.0 if len(self.samples) < 2 else (max(self.samples) - min(self.samples)) / self.ms
        low, _, high = quantiles(self.samples, n=4, method="inclusive")
        return (high - low) / self.ms


def time_trials(trials: Sequence[Trial], measure: Measure, effort: Effort) -> list[Timing]:
    """Times all trials in interleaved rounds, each in an order of its own.

    A trial drops out once even its fastest round, of two at least, is `effort.stop_at` times the best trial's median. With one
    trial left the least number of rounds is enough. Trials must have run once, so that nothing is set up under the clock.
    """
    timings = [Timing() for _ in trials]
    spent = 0.0
    for number in range(effort.most_rounds):
        racing = sum(timing.stopped is None for timing in timings)
        if number >= effort.least_rounds and (racing < 2 or spent > effort.milliseconds):
            break
        # Shuffled, and repeatable: nobody always runs after the same neighbour, on the caches and buffers that it leaves.
        for at in random.Random(number).sample(range(len(trials)), len(trials)):
            if timings[at].stopped is None:
                timings[at].samples.append(measure(trials[at], "run"))
                spent += timings[at].samples[-1]
        if number == 0:
            continue
        best = min((t.ms for t in timings if t.stopped is None), default=0.0)
        for timing in timings:
            if timing.stopped is None and min(timing.samples) >= effort.stop_at * best > 0.0:
                timing.stopped = f"{timing.ms / best:.3g}x the time of the best, stopped after {number + 1} rounds"
    for trial, timing in zip(trials, timings, strict=True):
        timing.plan_ms = median(measure(trial, "plan") for _ in range(effort.plans if timing.stopped is None else 1))
    return timings


class CpuClock:
    """Wall-clock time. Short calls are repeated until `least_ms` have passed, and the mean of those counts."""

    def __init__(self, least_ms: float = 2.0, most_calls: int = 50) -> None:
        self.least_ms, self.most_calls = least_ms, most_calls

    def __call__(self, trial: Trial, part: Part) -> float:
        call = trial.run if part == "run" else trial.plan
        start, calls, elapsed = time.perf_counter(), 0, 0.0
        while calls == 0 or (elapsed < self.least_ms and calls < self.most_calls):
            call()
            calls += 1
            elapsed = (time.perf_counter() - start) * 1e3
        return elapsed / calls


_AHEAD = 400_000  # cycles, 0.2 ms: longer than any kernel's call takes on the host


class CudaClock:
    """CUDA events around one run, with the L2 cache flushed before it; wall-clock time with a synchronize for a plan.

    The device sleeps behind the flush while the host launches the call, so what launching costs stays out of the figure, as in
    a server whose host runs ahead of its device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.empty(max(size, 64 << 20), dtype=torch.int8, device=device)

    def __call__(self, trial: Trial, part: Part) -> float:
        with torch.cuda.device(self.device):
            if part == "plan":
                torch.cuda.synchronize()
                began = time.perf_counter()
                trial.plan()
                torch.cuda.synchronize()
                return (time.perf_counter() - began) * 1e3
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            self._flush.zero_()
            torch.cuda._sleep(_AHEAD)  # type: ignore[no-untyped-call]
            start.record()
            trial.run()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end))


class Replayed:
    """A trial whose run is captured in a CUDA graph once and then replayed, as a server replays a decode step.

    Plans are refreshed outside the graph. Raises what the capture raises.
    """

    def __init__(self, trial: Trial, device: torch.device) -> None:
        self.label, self.plan = trial.label, trial.plan
        self.run = capture(trial.run, device)


def capture(run: Callable[[], T], device: torch.device) -> Callable[[], T]:
    """`run`, captured in a CUDA graph: each call replays it and returns the result of the capture, written anew."""
    with torch.cuda.device(device):
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()  # whatever is set up on first use must not be captured
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = run()

    def replay() -> T:
        graph.replay()
        return result

    return replay


def clock(device: torch.device) -> Measure:
    """The clock for a device."""
    return CudaClock(device) if device.type == "cuda" else CpuClock()
