"""Any batch, any widths, any layout: every kernel of this host, native and padded, against the reference.

60 examples a form in `make test`; 2,000 in `make soak`, whose counts are in benchmarks/results/soak-properties.json.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, Phase, event, given, seed, settings
from hypothesis import strategies as st

from mla_serve.backends import Backend, Padded, Padding, load_backends
from mla_serve.shapes import AttentionShape
from mla_serve.shapes import Phase as AttentionPhase
from tests.backends.drawing import FEATURES, Drawn, cases
from tests.backends.judging import LawBroken, agree, relative_l2
from tests.backends.mutants import BasePointer, NotEmpty, TopLeftCausal, WrongScale
from tests.conftest import SEED

CPU = torch.device("cpu")
UNABSORBED = (AttentionPhase.PREFILL, AttentionPhase.CONTEXT)
FORMS = [(backend, padded) for backend in load_backends(CPU) if backend.available() is None for padded in (False, True)]


@dataclass
class Count:
    """What one form of a kernel was shown, and its worst errors: relative L2 by dtype."""

    kernel: str
    examples: int = 0
    features: Counter[str] = field(default_factory=Counter)
    worst: dict[str, float] = field(default_factory=dict)

    def add(self, drawn: Drawn, error: float) -> None:
        self.examples += 1
        self.features.update(drawn.features)
        dtype = drawn.case.shape.dtype
        self.worst[dtype] = max(error, self.worst.get(dtype, 0.0))

    def share(self, feature: str) -> float:
        return self.features[feature] / self.examples


def wider(shape: AttentionShape, more: int) -> Padding:
    """Widths made equal and `more` columns wider, or `more` heads."""
    width = max(shape.qk, shape.v) + more
    return Padding.of(shape, heads=shape.heads + more) if shape.absorbed else Padding.of(shape, qk=width, v=width)


def soak(backend: Backend, *, padded: bool, examples: int, shrink: bool = True) -> Count:
    """Runs `examples` drawn calls, as many for each feature; raises what hypothesis raises, with the smallest call it found."""
    absorbed = backend.supports(AttentionShape(AttentionPhase.DECODE, 1, 1, 4, 3, 48, 32, 16, "float32", page_size=4)) is None
    phases = (AttentionPhase.DECODE,) if absorbed else UNABSORBED
    count = Count(backend.name + ("+pad" if padded else ""))
    for feature in FEATURES:
        _soak(feature, backend, phases, count, padded=padded, examples=examples // len(FEATURES), shrink=shrink)
    return count


def _soak(
    asked: str, backend: Backend, phases: tuple[AttentionPhase, ...], count: Count, *, padded: bool, examples: int, shrink: bool
) -> None:
    @seed(SEED)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
    )
    @given(cases(phases, asked, equal_widths=backend.name == "torch-flash" and not padded), st.integers(1, 9))
    def right(drawn: Drawn, more: int) -> None:
        case = drawn.case
        kernel = Padded(backend, wider(case.shape, more)) if padded else backend
        for feature in drawn.features:
            event(feature)
        got, want = case.answer(kernel, out=case.blank()), case.expected()
        agree("property", kernel, case, got, want, f"({case.shape}, {case.batch.q_lens_host} on {case.batch.kv_lens_host})")
        count.add(drawn, relative_l2(got[0], want[0]))

    right()


@pytest.mark.parametrize(("backend", "padded"), FORMS, ids=lambda part: getattr(part, "name", "padded" if part else "native"))
def test_any_call_is_as_the_reference_says(backend: Backend, padded: bool) -> None:
    count = soak(backend, padded=padded, examples=60)
    assert count.examples >= 60
    assert {feature: count.share(feature) >= 0.15 for feature in FEATURES} == dict.fromkeys(FEATURES, True), count


@pytest.mark.parametrize("mutant", [BasePointer, NotEmpty, TopLeftCausal, WrongScale], ids=lambda mutant: mutant.name)
def test_what_is_wrong_is_found(mutant: type[Backend]) -> None:
    with pytest.raises(LawBroken, match=f"{mutant.name} breaks the law of property"):
        soak(mutant(CPU), padded=False, examples=60, shrink=False)


@pytest.mark.slow("properties")
@pytest.mark.parametrize(("backend", "padded"), FORMS, ids=lambda part: getattr(part, "name", "padded" if part else "native"))
def test_soak(backend: Backend, padded: bool, record_property: Callable[[str, object], None]) -> None:
    count = soak(backend, padded=padded, examples=2000)
    shares = {feature: round(count.share(feature), 3) for feature in FEATURES}
    row = {"kernel": count.kernel, "examples": count.examples, "differences": 0, "shares": shares}
    record_property("row", row | {"worst_relative_l2": count.worst})
    assert count.examples >= 2000
    assert min(count.share(feature) for feature in FEATURES) >= 0.2, count
