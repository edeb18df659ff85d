"""The Selector: from a shape to the kernel that serves it, by table, by measurement, by class, or by a person's pin."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Literal

import torch

from mla_serve.backends.base import Backend, Limits
from mla_serve.backends.padded import Padded, Padding
from mla_serve.backends.registry import load_backends
from mla_serve.errors import UserError
from mla_serve.selection import availability, invariant, nearest, paddings
from mla_serve.selection.bound import BoundSelector
from mla_serve.selection.candidates import Candidate, candidates, check, native, padded_forms
from mla_serve.selection.claims import Claims
from mla_serve.selection.decision import CandidateResult, Decision, Policy
from mla_serve.selection.fingerprint import Fingerprint
from mla_serve.selection.isolated import Isolated
from mla_serve.selection.measure import InProcess, Measurer, NotMeasured
from mla_serve.selection.pins import Pin, PinError, by_phase
from mla_serve.selection.ranking import Form, rank
from mla_serve.selection.shipped import shipped_decisions
from mla_serve.selection.table import DecisionTable
from mla_serve.selection.timing import Effort, Measure
from mla_serve.shapes import AttentionShape, Bucket, DType, MLADims

logger = logging.getLogger(__name__)

POLICIES = ("measured", "availability", "batch-invariant")

LAST_RESORT = {True: "torch-mla", False: "torch-math"}
"""By `shape.absorbed`: what serves where no candidate can."""


class Selector:
    """Decides for one device. `table` None keeps decisions in memory; `backends` None takes all that are installed.

    `policy` "batch-invariant" gives each phase one kernel, in its invariant mode, for all buckets (see `invariant`).
    "measured" serves what the table holds and, off the table, the nearest measured bucket's kernel or the
    availability policy's; it measures in `decide` only with `on_demand`. `layers` weighs a plan against its runs. `measurer`
    says how kernels are measured; None: in a process of their own, or in this one where `backends` are given or `measure`
    replaces the clock. `effort` is that clock's patience. `host_lens` False: batches come without exact host lengths.
    `clean_pool`: the cache never holds NaN, so a kernel that lets it through may serve. `shipped` is asked after `table` and
    never written; None: what came with the package for this host, or nothing where `backends` are given. Raises PinError for
    pins that name nobody.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        policy: Literal["measured", "availability", "batch-invariant"] = "measured",
        pins: Mapping[str, str] | None = None,
        table: DecisionTable | None = None,
        backends: Sequence[Backend] | None = None,
        on_demand: bool = False,
        layers: int = 1,
        host_lens: bool = True,
        clean_pool: bool = False,
        measure: Measure | None = None,
        effort: Effort | None = None,
        measurer: Measurer | None = None,
        shipped: DecisionTable | None = None,
    ) -> None:
        if policy not in POLICIES:
            raise UserError(f"there is no policy {policy!r}; use {', '.join(POLICIES[:-1])} or {POLICIES[-1]}")
        self.device, self.policy, self.on_demand, self.layers = device, policy, on_demand, layers
        self.host_lens, self.clean_pool = host_lens, clean_pool
        self.table = DecisionTable() if table is None else table
        self.backends = list(load_backends(device) if backends is None else backends)
        self._by_name = {backend.name: backend for backend in self.backends}
        self._pins = by_phase(pins or {}, self._by_name)
        self._fingerprint = Fingerprint.here(device, {name for backend in self.backends for name in backend.libraries})
        if measurer is None and measure is None and backends is None:
            measurer = Isolated(device, effort=effort, clean_pool=clean_pool)
        self.measurer = measurer or InProcess(device, measure=measure, effort=effort, clean_pool=clean_pool)
        if shipped is None:
            shipped = shipped_decisions(self._fingerprint) if backends is None else DecisionTable()
        self.shipped = shipped
        self._unknown: set[str] = set()
        self._one_per_phase = invariant.OnePerPhase(self) if policy == "batch-invariant" else None

    @property
    def fingerprint(self) -> Fingerprint:
        """Of this process now: a CPU's thread count may change after the Selector was made."""
        if self._fingerprint.threads not in (None, torch.get_num_threads()):
            self._fingerprint = replace(self._fingerprint, threads=torch.get_num_threads())
        return self._fingerprint

    def decide(self, shape: AttentionShape) -> Decision:
        """The decision for the bucket of `shape`. Raises PinError if a pinned kernel cannot run it, AttentionError if none can.

        In order: the phase's pin, the table, then as the policy says. Only a miss asks a backend anything.
        """
        if self._one_per_phase is not None:
            return self._one_per_phase.decide(Bucket.of(invariant.mode(shape)))
        bucket = Bucket.of(shape)
        pin = self._pins.get(shape.phase)
        if pin is not None:
            return self._pinned(bucket, pin)
        hit = self._hit(bucket)
        if hit is not None:
            return hit
        if self.policy == "availability":
            decision = self._by_class(bucket)
            self.table.put(decision, save=False)
            return decision
        if self.on_demand:
            try:
                return self._measure_once(bucket)
            except NotMeasured as error:
                logger.warning("%s", error)
        return self._nearest(bucket) or self._by_class(
            bucket, note="not measured, nor is any bucket like it; chosen by kernel class until `mla-serve probe` has run"
        )

    def measure(self, shape: AttentionShape) -> Decision:
        """Measures the bucket of `shape` now, whatever the table holds, and puts the decision into the table.

        Takes seconds. Raises UserError if not even the last resort is right, and of those NotMeasured (inputs that do not fit
        into memory, no process to measure in) and BudgetSpent.
        """
        bucket = Bucket.of(shape if self._one_per_phase is None else invariant.mode(shape))
        began = time.monotonic()
        found = candidates(bucket.shape, self.backends, host_lens=self.host_lens)
        rows = rank(self.measurer(bucket.shape, found), self.layers, self._neighbour(bucket))
        chosen = next((row for row in rows if row.verdict == "chosen"), None)
        if chosen is None:
            return self.last_resort(bucket, rows)
        decision = replace(
            self.decision(bucket, "measured", chosen.backend, chosen.padding, rows),
            floor_ms=self.measurer.floor_ms(bucket.shape),
            measured_at=datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
            probe_seconds=round(time.monotonic() - began, 3),
        )
        self.table.put(decision)
        return decision

    def measured(self, shape: AttentionShape) -> Decision | None:
        """What was measured for the very bucket of `shape` on this host, if anything was."""
        return self.table.get(Bucket.of(shape), "measured", self.fingerprint)

    def adopt(self, decisions: Sequence[Decision]) -> bool:
        """Takes decisions that were measured elsewhere into the table in memory. Whether any of them was news."""
        news = [decision for decision in decisions if self.measured(decision.bucket.shape) != decision]
        for decision in news:
            self.table.put(decision, save=False)
        return bool(news)

    def claim(self, bucket: Bucket, *, wait: bool) -> AbstractContextManager[bool]:
        """Says to other processes that share the table's file that `bucket` is being measured here. See `Claims.claim`."""
        claims = Claims(self.table.path)
        claims.waiting = self.measurer.waiting
        return claims.claim(bucket, wait=wait, until=self.measurer.until)

    def unmeasured(self, bucket: Bucket, why: str) -> Decision:
        """What serves `bucket` where measuring it had to be left out, by kernel class. It is no entry of the table."""
        return self._by_class(bucket, note=f"not measured: {why}")

    def close(self) -> None:
        """Ends the process that measures, where there is one."""
        self.measurer.close()

    def bind(
        self, dims: MLADims, *, dtype: DType, page_size: int, limits: Limits, cache_dtype: DType | None = None
    ) -> BoundSelector:
        """The look-up of one model on this device; kernels are decided and prepared when first asked for."""
        return BoundSelector(self, dims, dtype=dtype, page_size=page_size, limits=limits, cache_dtype=cache_dtype)

    def backend_of(self, decision: Decision) -> Backend:
        """The kernel of a decision, in its padded form where it has one."""
        return self.backend(decision.winner, decision.padding)

    def backend(self, name: str, padding: Padding | None) -> Backend:
        """A kernel by its name, in its padded form where it has one."""
        backend = self._by_name.get(name) or load_backends(self.device, only={name})[0]
        return backend if padding is None else Padded(backend, padding)

    def pinned(self, bucket: Bucket) -> Candidate | None:
        """The kernel that a pin names for the phase of `bucket`, if one does. Raises PinError if it cannot run it."""
        pin = self._pins.get(bucket.shape.phase)
        return None if pin is None else self._pinned_form(bucket, pin)

    def last_resort(self, bucket: Bucket, rows: Sequence[CandidateResult] = (), note: str | None = None) -> Decision:
        """torch's own math for `bucket`, with the rows of those that cannot. Raises UserError if it cannot either."""
        name = LAST_RESORT[bucket.shape.absorbed]
        wrong = next((row for row in rows if row.backend == name and row.verdict == "disqualified" and not row.padding), None)
        if wrong is not None:
            raise UserError(f"no kernel can serve {bucket}: even {name}, the last resort, is wrong here ({wrong.reason})")
        backend = self._by_name.get(name) or load_backends(self.device, only={name})[0]
        backend.require(bucket.shape)
        rows = [row for row in rows if (row.backend, row.padding) != (name, None)]
        rows.append(CandidateResult(name, None, "chosen", "last resort: no other kernel can serve this"))
        logger.warning("%s is served by %s, the last resort: no other kernel can", bucket, name)
        return self.decision(bucket, "availability", name, None, rows, note)

    def page_size(self, dims: MLADims, *, dtype: DType, batch: int = 8, kv_len: int = 2048) -> int:
        """For a deployment that leaves it open: the page size whose decode is the fastest, or of the best kernel class.

        The device's usual size wins among equals (16 on a CPU, 64 on a GPU). Raises PinError if a pin allows none.
        """
        usual = 64 if self.device.type == "cuda" else 16
        refused: PinError | None = None
        offers: list[tuple[tuple[bool, float], int]] = []
        for size in dict.fromkeys((usual, 16, 32, 64, 128)):
            shape = AttentionShape.decode(dims, batch=batch, kv_len=kv_len, dtype=dtype, page_size=size)
            try:
                decision = self.decide(shape)
            except PinError as error:
                refused = refused or error  # the one about the usual size
                continue
            row = decision.chosen
            cost = row.cost(self.layers) if row else None
            rank_here = float(self.backend_of(decision).kind(shape)) if cost is None else cost
            offers.append(((cost is None, rank_here), size))
        if not offers:
            assert refused is not None
            raise refused
        return min(offers, key=lambda offer: offer[0])[1]

    def _measure_once(self, bucket: Bucket) -> Decision:
        """Measures `bucket`, unless another process that shares the table does it first."""
        with self.claim(bucket, wait=True):
            self.table.refresh()
            return self._hit(bucket) or self.measure(bucket.shape)

    def _hit(self, bucket: Bucket) -> Decision | None:
        assert self.policy != "batch-invariant", "that one is not looked up by bucket"
        own = self.table.get(bucket, self.policy, self.fingerprint)
        decision = own or self.shipped.get(bucket, self.policy, self.fingerprint)
        return self._ranked_here(decision) if decision is not None and self._usable(decision) else None

    def _usable(self, decision: Decision) -> bool:
        """Whether this deployment is at least as kind to the winner as the one that measured it. Asks no backend."""
        backend, row = self._by_name.get(decision.winner), decision.chosen
        if backend is None:
            self._tell_unknown(decision.winner)
            return False
        if backend.needs_host_lens and not self.host_lens:
            return False
        return self.clean_pool or row is None or not row.leaks_nan

    def _tell_unknown(self, winner: str) -> None:
        """Once per name: a table may hold many decisions for a kernel that was here once."""
        if winner not in self._unknown:
            self._unknown.add(winner)
            logger.warning(
                "ignoring decisions for %s: no kernel has that name here; install what offers it, or measure again with "
                "`mla-serve probe`", winner,
            )  # fmt: skip

    def _ranked_here(self, decision: Decision) -> Decision:
        """The same figures ranked for this model's number of layers: a plan is shared by all of them."""
        if decision.layers == self.layers or decision.policy != "measured":
            return decision
        rows = rank(decision.candidates, self.layers, self._neighbour(decision.bucket))
        chosen = next((row for row in rows if row.verdict == "chosen"), None)
        if chosen is None or (backend := self._by_name.get(chosen.backend)) is None:
            return decision
        again = replace(
            decision,
            winner=chosen.backend,
            padding=chosen.padding,
            candidates=tuple(rows),
            layers=self.layers,
            library=native(backend).library,
        )
        holds = self._usable(again) and again.fingerprint.mismatch(self.fingerprint, again.library) is None
        return again if holds else decision

    def _neighbour(self, bucket: Bucket) -> Form | None:
        """What the nearest other measured bucket chose: ties go to it."""
        near = self.table.near(bucket, "measured", self.fingerprint)
        return next(((found.winner, found.padding) for found in near if found.bucket != bucket), None)

    def _nearest(self, bucket: Bucket) -> Decision | None:
        """The kernel of the nearest measured bucket whose winner takes this one, recorded as borrowed."""

        def allowed(decision: Decision) -> bool:
            if not self._usable(decision):
                return False
            return check(self.backend_of(decision), bucket.shape, host_lens=self.host_lens).verdict is None

        tables = (table.near(bucket, "measured", self.fingerprint) for table in (self.table, self.shipped))
        near = [self._ranked_here(decision) for decision in next(filter(None, tables), [])]
        found = nearest.borrowed(bucket, near, self.layers, allowed)
        return None if found is None else replace(found[0], bucket=bucket, note=found[1])

    def _by_class(self, bucket: Bucket, note: str | None = None) -> Decision:
        winner, rows = availability.choose(bucket.shape, self.backends, host_lens=self.host_lens)
        if winner is None:
            return self.last_resort(bucket, rows, note)
        return self.decision(bucket, "availability", winner.native.name, winner.padding, rows, note)

    def _pinned(self, bucket: Bucket, pin: Pin) -> Decision:
        candidate, reason = self._pinned_form(bucket, pin), f"pinned by {bucket.shape.phase.value}={pin}"
        if candidate.padding is not None:
            reason += f"; {paddings.describe(bucket.shape, candidate.padding)}"
        rows = [candidate.result("chosen", reason)]
        rows += [CandidateResult(b.name, None, "not-measured", "not asked") for b in self.backends if b.name != pin.kernel]
        return self.decision(bucket, "pinned", pin.kernel, candidate.padding, rows)

    def _pinned_form(self, bucket: Bucket, pin: Pin) -> Candidate:
        candidate = self._form(bucket, pin)
        if candidate.verdict is not None:
            raise PinError(
                f"pinned by {bucket.shape.phase.value}={pin}, but it cannot run {bucket}: {candidate.reason}; "
                "remove the pin or choose another kernel"
            )
        return candidate

    def _form(self, bucket: Bucket, pin: Pin) -> Candidate:
        """The pinned kernel in the pinned form, or in the one that was measured faster, or that the kernel's class favours."""
        backend, shape = self._by_name[pin.kernel], bucket.shape
        plain = check(backend, shape, host_lens=self.host_lens)
        if pin.form == "native" or plain.verdict == "unavailable":
            return plain
        if pin.form == "pad":
            usual = (form for form in padded_forms(backend, shape, host_lens=self.host_lens) if form.verdict is None)
            forced = Padded(backend, paddings.forced(shape, backend.head_counts))
            return next(usual, None) or check(forced, shape, host_lens=self.host_lens)
        measured = self.table.get(bucket, "measured", self.fingerprint)
        own = [row for row in measured.candidates if row.backend == pin.kernel and row.ms] if measured else []
        if own:
            padding = min(own, key=lambda row: row.cost(self.layers) or 0.0).padding
            return check(Padded(backend, padding) if padding else backend, shape, host_lens=self.host_lens)
        return availability.choose(shape, [backend], host_lens=self.host_lens)[0] or plain

    def decision(
        self, bucket: Bucket, policy: Policy, winner: str, padding: Padding | None, rows: Sequence[CandidateResult],
        note: str | None = None,
    ) -> Decision:  # fmt: skip
        """A record of a choice made here and now, without figures."""
        backend = self._by_name.get(winner)
        decision = Decision(
            bucket, policy, winner, padding, tuple(rows), self.fingerprint,
            library=native(backend).library if backend else "torch", layers=self.layers, note=note,
        )  # fmt: skip
        logger.debug("%s: %s (%s)", bucket, decision.label, policy)
        return decision
