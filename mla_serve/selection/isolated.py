"""Measures in a process of its own, so that a kernel that crashes, hangs, hoards or floods costs only itself."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points

import psutil
import torch

from mla_serve.backends.base import Backend
from mla_serve.backends.registry import GROUP
from mla_serve.selection import wire
from mla_serve.selection.candidates import Candidate
from mla_serve.selection.decision import CandidateResult
from mla_serve.selection.floor import Rates, traffic
from mla_serve.selection.measure import BudgetSpent, NotMeasured, TooLarge
from mla_serve.selection.timing import Effort
from mla_serve.selection.workshop import Lost, Workshop
from mla_serve.shapes import AttentionShape, Bucket, Phase

logger = logging.getLogger(__name__)

SECONDS = {"cpu": 60.0, "cuda": 300.0}  # a kernel's at one bucket; on a GPU it may have to be compiled first
STRIKES = 2  # of a backend in one phase; its other buckets are not tried then
MEMORY = {"cpu": 2 << 30, "cuda": 8 << 30}  # bytes of host memory for any candidate; CUDA's libraries take some too


class Isolated:
    """A `measure.Measurer` whose candidates run in a worker, each within its limits of time and memory.

    `seconds` is what one candidate gets at one bucket (None: by device). One that breaks the worker has the verdict "crashed"
    or "timed-out", and the others are measured in a fresh one. A backend that did so twice in a phase is not tried there again.
    Backends travel by name, or by the import path of their class, which is made as `cls(device)`. The worker stays warm until
    `close`, and ends with this process in any case. Raises WorkerError if there can be none.
    """

    def __init__(
        self, device: torch.device, *, effort: Effort | None = None, clean_pool: bool = False, seconds: float | None = None
    ) -> None:
        self.device = device
        self.until: float | None = None
        self.waiting: Callable[[], None] = lambda: None
        self.seconds = SECONDS["cuda" if device.type == "cuda" else "cpu"] if seconds is None else seconds
        self.shop = Workshop(device, effort=effort or Effort(), clean_pool=clean_pool)
        self.shop.waiting = lambda: self.waiting()
        self._rates = Rates.of(device)
        self._strikes: dict[tuple[str, Phase], list[Lost]] = {}
        self._held: set[int] = set()  # candidates of the open bucket that the child has ready

    def __call__(self, shape: AttentionShape, candidates: Sequence[Candidate]) -> list[CandidateResult]:
        """See `Measurer`."""
        self._held.clear()
        rows = [candidate.result() for candidate in candidates]
        live = [number for number, candidate in enumerate(candidates) if candidate.verdict is None]
        self._open(shape, rows)
        for number in live:
            rows[number] = self._qualify(shape, number, candidates[number], rows, gate=True)
        racing = [number for number in live if rows[number].verdict == "slower"]
        while racing:
            racing = [number for number in racing if self._holds(shape, number, candidates[number], rows)]
            try:
                for number, row in self._time(shape, {number: rows[number] for number in racing}, rows).items():
                    rows[number] = row
                break
            except _LostOne as lost:
                rows[lost.number] = self._strike(shape, candidates[lost.number], lost.cause)
                racing.remove(lost.number)
        return rows

    def floor_ms(self, shape: AttentionShape) -> float | None:
        """See `Measurer`. The device's rates are measured in the worker, once."""
        if shape.dtype not in self._rates.arithmetic:
            try:
                answer = self.shop.ask(wire.AskRates(shape), seconds=self.seconds)
            except Lost as lost:
                logger.warning("the rates of %s cannot be measured: %s", self.device, lost.reason)
                return None
            if not isinstance(answer, wire.Rates):
                return None
            self._rates.arithmetic[shape.dtype], self._rates.memory = answer.arithmetic, answer.memory
        return self._rates.floor_ms(shape)

    def close(self) -> None:
        """Ends the worker."""
        self.shop.close()

    def _open(self, shape: AttentionShape, rows: Sequence[CandidateResult]) -> None:
        """Has the inputs made, in a child that holds nothing yet of this bucket."""
        self._held.clear()
        request = wire.Open(shape, torch.get_num_threads(), self._memory(shape))
        for last in (False, True):
            try:
                answer = self.shop.ask(request, seconds=self._seconds(rows))
                break
            except Lost as lost:
                self._seconds(rows)  # perhaps it was the budget
                if last:
                    raise NotMeasured(f"{Bucket.of(shape)}: with no kernel at work, {lost.reason}") from lost
        if isinstance(answer, wire.Problem):
            raise TooLarge(answer.reason) if answer.too_large else NotMeasured(f"{Bucket.of(shape)}: {answer.reason}")

    def _qualify(
        self, shape: AttentionShape, number: int, candidate: Candidate, rows: Sequence[CandidateResult], *, gate: bool
    ) -> CandidateResult:
        name = candidate.native.name
        strikes = self._strikes.get((name, shape.phase), [])
        if len(strikes) >= STRIKES:
            return candidate.result(strikes[-1].verdict, f"not tried again: elsewhere it {strikes[-1].reason}")
        if not self.shop.alive:
            self._open(shape, rows)
        seconds = self._seconds(rows)
        request = wire.Qualify(number, name, _path(candidate.native), candidate.padding, gate)
        try:
            answer = self.shop.ask(request, seconds=seconds, memory=self._memory(shape))
        except Lost as lost:
            self._seconds(rows)
            return self._strike(shape, candidate, lost)
        assert isinstance(answer, wire.Qualified)
        if answer.ready:
            self._held.add(number)
        elif answer.row.verdict == "crashed":  # out of memory, or CUDA left in error: what comes next starts afresh
            self._strike(shape, candidate, Lost("crashed", answer.row.reason or ""))
            self.shop.replace()
        return answer.row

    def _holds(self, shape: AttentionShape, number: int, candidate: Candidate, rows: list[CandidateResult]) -> bool:
        """Whether a candidate that passed the gate is ready in this very child; makes it so where it was lost with another."""
        if self.shop.alive and number in self._held:
            return True
        row = self._qualify(shape, number, candidate, rows, gate=False)
        if number not in self._held:
            rows[number] = row
        return number in self._held

    def _time(
        self, shape: AttentionShape, racing: dict[int, CandidateResult], rows: Sequence[CandidateResult]
    ) -> dict[int, CandidateResult]:
        """Their rows with figures. A pause spoils the clock, so the race is run again after one."""
        while racing:
            self.shop.spoiled = False
            try:
                answer = self.shop.ask(wire.Time(racing), seconds=self._seconds(rows), memory=self._memory(shape))
            except Lost as lost:
                self._seconds(rows)
                number = self.shop.running
                raise _LostOne(number if number in racing else next(iter(racing)), lost) from lost
            assert isinstance(answer, wire.Timed)
            if not self.shop.spoiled:
                return answer.rows
        return {}

    def _strike(self, shape: AttentionShape, candidate: Candidate, lost: Lost) -> CandidateResult:
        name, reason = candidate.native.name, lost.reason
        self._strikes.setdefault((name, shape.phase), []).append(lost)
        logger.warning("%s at %s: %s", candidate.label, Bucket.of(shape), reason)
        return candidate.result(lost.verdict, reason)

    def _memory(self, shape: AttentionShape) -> int:
        """Bytes of host memory for one candidate: copies of the inputs, every logit in float32 thrice; half of what is free."""
        least = MEMORY["cuda" if self.device.type == "cuda" else "cpu"]
        logits = 4 * shape.batch * shape.heads * shape.q_len * shape.kv_len
        return min(least + int(4 * traffic(shape)) + 3 * logits, max(least, psutil.virtual_memory().available // 2))

    def _seconds(self, rows: Sequence[CandidateResult]) -> float:
        """What the next candidate gets. Raises BudgetSpent."""
        if self.until is None:
            return self.seconds
        left = self.until - time.monotonic()
        if left <= 0:
            raise BudgetSpent(rows)
        return min(left, self.seconds)


class _LostOne(Exception):
    """A candidate that broke the worker while it was timed."""

    def __init__(self, number: int, cause: Lost) -> None:
        super().__init__(number)
        self.number, self.cause = number, cause


def _path(backend: Backend) -> str | None:
    """Where a worker finds the class of `backend`; None if it knows it by name, as a built-in or an installed one."""
    module, name = type(backend).__module__, type(backend).__qualname__
    if module.startswith("mla_serve.backends.") or backend.name in {point.name for point in entry_points(group=GROUP)}:
        return None
    return f"{module}:{name}"
