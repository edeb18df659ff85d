"""The batch-invariant policy: one kernel per phase, in its invariant mode, the same for every bucket.

A bucket's winner depends on how many requests share a step, so a policy that picks by bucket lets batch mates change which
kernel, and so which bits, a request gets. Here the choice looks at the phase alone: the kernel that is the fastest over all
measured buckets of the phase among those whose invariant mode is right in each of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mla_serve.backends.base import AttentionError
from mla_serve.selection import availability
from mla_serve.selection.candidates import Candidate, check
from mla_serve.selection.decision import CandidateResult, Decision, label
from mla_serve.selection.ranking import Form
from mla_serve.shapes import AttentionShape, Bucket, Phase

if TYPE_CHECKING:
    from mla_serve.selection.selector import Selector

CHUNK = 256
"""Prefills are cut where a request's own position is a multiple of this many tokens, and nowhere else."""

_TYPICAL = 1024  # key tokens of the bucket by which kernels are classed where none is measured


def mode(shape: AttentionShape) -> AttentionShape:
    """`shape` as this policy asks for it. A prefill always comes with its LSE: whether a request has cached context must not
    decide which kernel its new tokens get."""
    return replace(shape, batch_invariant=True, lse=shape.lse or shape.phase is Phase.PREFILL)


def fastest(
    measured: Sequence[Sequence[CandidateResult]], layers: int, usable: Callable[[CandidateResult], bool]
) -> Form | None:
    """The form with the least geometric mean of cost over the best cost, of those that were timed in every bucket.

    `measured` holds the rows of each bucket. None where no form was right and usable in all of them. Native forms come first
    among equals.
    """
    costs = [
        {(row.backend, row.padding): cost for row in rows if usable(row) and (cost := row.cost(layers)) is not None}
        for rows in measured
    ]
    if not costs or not all(costs):
        return None
    everywhere = [form for form in costs[0] if all(form in bucket for bucket in costs)]

    def burden(form: Form) -> tuple[float, bool]:
        return sum(math.log(bucket[form] / min(bucket.values())) for bucket in costs), form[1] is not None

    return min(everywhere, key=burden, default=None)


@dataclass(frozen=True, slots=True)
class _Choice:
    candidate: Candidate
    note: str

    @property
    def form(self) -> Form:
        return self.candidate.native.name, self.candidate.padding


class OnePerPhase:
    """Decides for a Selector whose policy is batch-invariant. A choice, once made, holds as long as the Selector lives."""

    def __init__(self, selector: Selector) -> None:
        self._selector = selector
        self._chosen: dict[AttentionShape, _Choice] = {}

    def decide(self, bucket: Bucket) -> Decision:
        """The phase's kernel for `bucket`, a bucket of a `mode` shape. Raises AttentionError if it cannot run it."""
        shape, selector = bucket.shape, self._selector
        kin = replace(shape, batch=0, q_len=shape.q_len if shape.absorbed else 0, kv_len=0, ragged=False)
        if kin not in self._chosen:
            self._chosen[kin] = self._choose(bucket)
        choice = self._chosen[kin]
        name, padding = choice.form
        refused = check(choice.candidate.backend, shape, host_lens=selector.host_lens)
        if refused.verdict is not None:
            raise AttentionError(
                f"{refused.label} is the one kernel of {shape.phase.value} under the batch-invariant policy and cannot run "
                f"{bucket}: {refused.reason}; pin another one for this phase"
            )
        measured = selector.table.get(bucket, "measured", selector.fingerprint)
        if measured is None:
            rows = [choice.candidate.result("chosen", "the one kernel of this phase")]
            rows += [CandidateResult(b.name, None, "not-measured", "not asked") for b in selector.backends if b.name != name]
            return selector.decision(bucket, "batch-invariant", name, padding, rows, choice.note)
        library = choice.candidate.native.library
        return replace(
            measured, policy="batch-invariant", winner=name, padding=padding, library=library, note=choice.note,
            candidates=tuple(_verdict(row, choice.form) for row in measured.candidates),
        )  # fmt: skip

    def _choose(self, bucket: Bucket) -> _Choice:
        selector, phase = self._selector, bucket.shape.phase.value
        # The same bucket whichever comes first, so that two servers on one table choose alike.
        typical = Bucket.of(
            replace(bucket.shape, batch=1, q_len=bucket.shape.q_len if bucket.shape.absorbed else CHUNK, kv_len=_TYPICAL)
            if bucket.shape.phase is not Phase.PREFILL
            else replace(bucket.shape, batch=1, q_len=CHUNK, kv_len=CHUNK)
        )
        pinned = selector.pinned(typical)
        if pinned is not None:
            return _Choice(pinned, f"pinned for all {phase}")
        measured = selector.table.near(bucket, "measured", selector.fingerprint)
        if not measured and selector.on_demand:
            measured = [selector.measure(bucket.shape)]
        form = fastest([decision.candidates for decision in measured], selector.layers, self._usable)
        if form is not None:
            over = f"{len(measured)} measured buckets" if len(measured) > 1 else "one measured bucket"
            return _Choice(Candidate(selector.backend(*form), form[1]), f"the one kernel of {phase}: the fastest over {over}")
        winner, _ = availability.choose(typical.shape, selector.backends, host_lens=selector.host_lens)
        if winner is None:
            raise AttentionError(f"no kernel can serve {phase} under the batch-invariant policy: none takes {typical}")
        measure = "no bucket is measured; `mla-serve probe --policy batch-invariant` does that"
        return _Choice(winner, f"the one kernel of {phase}, by kernel class: {measure}")

    def _usable(self, row: CandidateResult) -> bool:
        selector = self._selector
        known = next((backend for backend in selector.backends if backend.name == row.backend), None)
        if known is None or (known.needs_host_lens and not selector.host_lens):
            return False
        return selector.clean_pool or not row.leaks_nan


def _verdict(row: CandidateResult, form: Form) -> CandidateResult:
    """A measured row under a choice that this bucket alone may not have made."""
    if (row.backend, row.padding) == form:
        return replace(row, verdict="chosen", reason="the one kernel of this phase")
    if row.verdict in ("chosen", "tie"):
        return replace(row, verdict="slower", reason=f"another kernel is the one of this phase, {label(*form)}")
    return row
