"""Backends that answer right (by the reference) and can be told what to refuse, what class they are and to count questions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from mla_serve.backends.base import Backend, BatchLayout, Kind, Limits, Plan, State
from mla_serve.backends.reference import Reference
from mla_serve.selection.decision import CandidateResult, Decision
from mla_serve.selection.fingerprint import Fingerprint
from mla_serve.selection.timing import Measure, Part, Trial
from mla_serve.shapes import AttentionShape, Bucket, MLADims

DEEPSEEK = MLADims(heads=4, nope=128, rope=64, v=128, latent=512)
EQUAL = MLADims(heads=4, nope=64, rope=64, v=128, latent=512)
SMALL = MLADims(heads=3, nope=16, rope=8, v=16, latent=32)

Refuse = Callable[[AttentionShape], str | None]


class Fake(Backend):
    """Right everywhere; `refuse` gives its `supports`, `kinds` its class, other keywords its flags. Counts what it is asked."""

    def __init__(
        self,
        name: str = "fake",
        *,
        kinds: Callable[[AttentionShape], Kind] = lambda _: Kind.FUSED,
        refuse: Refuse = lambda _: None,
        missing: str | None = None,
        **flags: object,
    ) -> None:
        super().__init__(torch.device("cpu"))
        self.name, self.calls = name, Counter[str]()
        self._kinds, self._refuse, self._missing = kinds, refuse, missing
        self._oracle = Reference(self.device)
        for flag, value in flags.items():
            setattr(self, flag, value)

    def kind(self, shape: AttentionShape) -> Kind:
        self.calls["kind"] += 1
        return self._kinds(shape)

    def available(self) -> str | None:
        self.calls["available"] += 1
        return self._missing

    def supports(self, shape: AttentionShape) -> str | None:
        self.calls["supports"] += 1
        return self._refuse(shape)

    def prepare(self, shape: AttentionShape, limits: Limits) -> State:
        self.calls["prepare"] += 1
        return super().prepare(shape, limits)

    def plan(self, state: State, batch: BatchLayout, *, scale: float, reuse: Plan | None = None) -> Plan:
        self.calls["plan"] += 1
        return super().plan(state, batch, scale=scale, reuse=reuse)

    def run_prefill(
        self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, need_lse: bool, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        self.calls["run"] += 1
        return self._oracle.run_prefill(q, k, v, plan, need_lse=need_lse, out=out)

    def run_decode(
        self,
        q_nope: Tensor,
        q_pe: Tensor,
        cache: Tensor,
        plan: Plan,
        *,
        cache_scale: float = 1.0,
        need_lse: bool,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        self.calls["run"] += 1
        return self._oracle.run_decode(q_nope, q_pe, cache, plan, cache_scale=cache_scale, need_lse=need_lse, out=out)


class FakeTransformerEngine(Fake):
    """Answers as Transformer Engine does: one question gives (flash, fused, unfused), and the last answer is remembered."""

    def __init__(self, native: Kind, padded: Kind | None = None, name: str = "fake-te") -> None:
        super().__init__(name, gives_lse=False)
        self.native, self.padded, self.probes = native, native if padded is None else padded, 0
        self._last: tuple[AttentionShape, tuple[bool, bool, bool]] | None = None

    def get_attention_backend(self, shape: AttentionShape) -> tuple[bool, bool, bool]:
        self.probes += 1
        kind = self.padded if shape.qk == shape.v else self.native
        return kind is Kind.FLASH, kind is Kind.FUSED, True

    def _ask(self, shape: AttentionShape) -> tuple[bool, bool, bool]:
        if self._last is None or self._last[0] != shape:
            self._last = shape, self.get_attention_backend(shape)
        return self._last[1]

    def kind(self, shape: AttentionShape) -> Kind:
        flash, fused, _ = self._ask(shape)
        return Kind.FLASH if flash else Kind.FUSED if fused else Kind.UNFUSED

    def supports(self, shape: AttentionShape) -> str | None:
        return None if any(self._ask(shape)) else "no backend of Transformer Engine takes this"


def times(run_ms: Mapping[str, float], plan_ms: Mapping[str, float] | None = None) -> Measure:
    """A clock that reads these milliseconds, by label."""

    def measure(trial: Trial, part: Part) -> float:
        return run_ms[trial.label] if part == "run" else (plan_ms or {}).get(trial.label, 0.0)

    return measure


def a_decision(
    shape: AttentionShape,
    fingerprint: Fingerprint,
    *,
    winner: str = "fake",
    rows: tuple[CandidateResult, ...] | None = None,
    **other: object,
) -> Decision:
    """A measured decision for the bucket of `shape`."""
    rows = rows or (CandidateResult(winner, None, "chosen", ms=1.0, plan_ms=0.0, spread=0.01, error=1e-6, lse_error=1e-6),)
    at = {"measured_at": "2026-12-01T10:00:00Z", **other}
    return Decision(Bucket.of(shape), "measured", winner, None, rows, fingerprint, **at)  # type: ignore[arg-type]


def prefill(dims: MLADims = DEEPSEEK, *, batch: int = 1, q_len: int = 16, lse: bool = False) -> AttentionShape:
    return AttentionShape.prefill(dims, batch=batch, q_len=q_len, dtype="float32", lse=lse)


def context(dims: MLADims = DEEPSEEK, *, batch: int = 1, q_len: int = 16, kv_len: int = 32) -> AttentionShape:
    return AttentionShape.context(dims, batch=batch, q_len=q_len, kv_len=kv_len, dtype="float32")


def decode(dims: MLADims = SMALL, *, batch: int = 2, kv_len: int = 32, page_size: int = 16, **other: object) -> AttentionShape:
    return AttentionShape.decode(dims, batch=batch, kv_len=kv_len, dtype="float32", page_size=page_size, **other)  # type: ignore[arg-type]
