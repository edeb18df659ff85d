"""The engine computes what transformers computes: logits at every position and greedy tokens, however the work is cut."""

from __future__ import annotations

import pytest

from tests.parity.cases import BATCHES, CHOICES, CHUNKS, PRODUCT, QUICK, Case
from tests.parity.checkpoints import SPECS
from tests.parity.harness import difference
from tests.parity.reference import PROMPTS

TOLERANCE = 1e-4

each_checkpoint = pytest.mark.parametrize("name", [spec.name for spec in SPECS])


def check(case: Case, ours, theirs) -> float:
    """The largest difference of a logit, as `harness.difference` counts it."""
    core = ours(case.checkpoint, CHUNKS[case.chunk], **CHOICES[case.choice])
    expected = theirs(case.checkpoint).expected
    worst = 0.0
    for length, got in core.run(BATCHES[case.batch]).items():
        worst = max(worst, off := difference(got, expected[length]))
        assert off <= TOLERANCE, f"prompt of {length}"
        assert got.tokens == expected[length].tokens, f"prompt of {length}"
    return worst


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_quick(case, ours, theirs):
    check(case, ours, theirs)


@pytest.mark.slow("parity")
@pytest.mark.parametrize("case", PRODUCT, ids=str)
def test_product(case, ours, theirs, record_property):
    record_property("row", {"case": str(case), "difference": float(f"{check(case, ours, theirs):.2g}")})


@each_checkpoint
def test_no_close_calls(name, theirs):
    """Logits 1e-3 apart and scores 5e-5 apart cannot change places by rounding, so that a difference is a fault."""
    margins = theirs(name).margins
    assert margins.token > 4e-3
    assert margins.expert > 5e-5


@each_checkpoint
def test_tokens_vary(name, theirs):
    expected = theirs(name).expected
    assert set(expected) == set(PROMPTS)
    assert len({token for each in expected.values() for token in each.tokens}) > 8
    assert all(each.logits.std() > 0.5 for each in expected.values())


@pytest.mark.parametrize("choice", [name for name in CHOICES if name not in ("availability", "measured")])
def test_pins_are_what_ran(choice, ours):
    core = ours("v3-odd", 64, **CHOICES[choice])
    core.run((2, 300))
    forms = {decision["bucket"]["phase"]: decision for decision in core.core.decisions()}
    assert set(forms) == {"prefill", "context", "decode"}
    for phase, decision in forms.items():
        kernel, _, form = CHOICES[choice]["decode" if phase == "decode" else "prefill"].partition("+")
        assert decision["winner"] == kernel
        assert (decision["padding"] is not None) == (form == "pad")


def test_measured_is_what_ran(ours):
    core = ours("v3-odd", 64, policy="measured")
    core.run((2, 300))
    assert {decision["policy"] for decision in core.core.decisions()} == {"measured"}
