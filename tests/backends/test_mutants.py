"""The laws have teeth: every mutant is caught, by the law that is meant for it, under its name."""

from __future__ import annotations

import pytest
import torch

from mla_serve.backends import Padded, Padding, Reference
from mla_serve.shapes import AttentionShape
from tests.backends.contenders import SMALL
from tests.backends.laws import broken_laws
from tests.backends.mutants import MUTANTS, PADDED_MUTANTS

CPU = torch.device("cpu")
PREFILL = AttentionShape.prefill(SMALL, batch=3, q_len=16, dtype="float32", lse=True)
CONTEXT = AttentionShape.context(SMALL, batch=3, q_len=16, kv_len=64, dtype="float32")
DECODE = AttentionShape.decode(SMALL, batch=3, kv_len=64, dtype="float32", page_size=16, q_len=2, lse=True)

# Laws that a kernel can only break in some phases.
PHASES = {"causal": (PREFILL, DECODE), "unread": (DECODE,)}


@pytest.mark.parametrize("shape", [PREFILL, CONTEXT, DECODE], ids=lambda shape: shape.phase.value)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_is_caught_by_its_law(mutant: type, shape: AttentionShape) -> None:
    broken = broken_laws(mutant(CPU), shape)
    if shape in PHASES.get(mutant.law, (shape,)):
        assert mutant.law in broken
        assert broken[mutant.law].startswith(f"{mutant.name} breaks the law of {mutant.law}: ")
    else:
        assert broken == {}


# A padded form hands over copies, which a kernel may scribble on and which start at their base, and cuts its output itself.
HANDED_COPIES = ("inputs", "packed", "output")


@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.law not in HANDED_COPIES], ids=lambda mutant: mutant.name)
def test_padding_hides_no_mutant(mutant: type) -> None:
    for shape, padding in ((PREFILL, Padding.of(PREFILL, qk=64, v=64)), (DECODE, Padding.of(DECODE, heads=8))):
        if shape in PHASES.get(mutant.law, (shape,)):
            assert mutant.law in broken_laws(Padded(mutant(CPU), padding), shape)


@pytest.mark.parametrize("mutant", PADDED_MUTANTS, ids=lambda mutant: mutant.__name__)
def test_every_padded_mutant_is_caught(mutant: type[Padded]) -> None:
    for shape, padding in ((PREFILL, Padding.of(PREFILL, qk=64, v=64)), (DECODE, Padding.of(DECODE, heads=8))):
        assert "padding" in broken_laws(mutant(Reference(CPU), padding), shape)


def test_the_oracle_breaks_no_law() -> None:
    for shape in (PREFILL, CONTEXT, DECODE):
        assert broken_laws(Reference(CPU), shape) == {}
