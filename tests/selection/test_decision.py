from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from mla_serve.backends.padded import Padding
from mla_serve.selection.decision import CandidateResult, Decision
from mla_serve.selection.fingerprint import Fingerprint
from tests.selection.fakes import a_decision, prefill

EXAMPLE = json.loads(
    """
{"bucket": {"phase": "prefill", "batch": 1, "q_len": 2048, "kv_len": 2048, "heads": 16, "qk": 192, "v": 128,
            "dtype": "float32", "causal": true, "lse": false},
 "policy": "measured", "winner": "torch-flash", "padding": {"qk": 192, "v": 192, "heads": 16},
 "candidates": [{"backend": "torch-math", "padding": null, "ms": 1056.1, "plan_ms": 0.0, "spread": 0.03, "error": 1.7e-7,
                 "lse_error": 4e-7, "verdict": "slower", "reason": null},
                {"backend": "torch-flash", "padding": null, "ms": null, "error": null, "verdict": "unsupported",
                 "reason": "needs equal QK and V widths (192, 128)"}],
 "floor_ms": 9.8, "layers": 3, "measured_at": "2026-12-01T10:00:00Z",
 "fingerprint": {"device": "a CPU", "torch": "2.13.0"}}
"""
)


def _holds(part: object, whole: object) -> bool:
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(key in whole and _holds(value, whole[key]) for key, value in part.items())
    if isinstance(part, list):
        return isinstance(whole, list) and len(part) == len(whole) and all(map(_holds, part, whole))
    return part == whole


def test_the_documented_example_reads_and_writes() -> None:
    decision = Decision.from_json(EXAMPLE)
    assert (decision.label, decision.layers, decision.padding) == ("torch-flash+pad", 3, Padding(192, 192, 16))
    assert _holds(EXAMPLE, decision.to_json())
    assert Decision.from_json(json.loads(json.dumps(decision.to_json()))) == decision


def test_every_field_survives_the_round_trip() -> None:
    rows = (
        CandidateResult("a", Padding(192, 192, 4), "chosen", None, 1.5, 0.25, 0.01, 2e-6, 3e-6),
        CandidateResult("b", None, "disqualified", "LSE off by 44%", error=1e-6, lse_error=0.7, leaks_nan=True),
        CandidateResult("c", None, "timed-out", "took longer than 60 s"),
    )
    here = Fingerprint("H200", "2.13.0", None, 132, "9.0", "580.65", "13.0", "abc", {"flashinfer-python": "0.6.14"})
    decision = replace(
        a_decision(
            prefill(),
            here,
            winner="a",
            rows=rows,
            layers=27,
            floor_ms=0.5,
            library="flashinfer-python",
            note="why",
            probe_seconds=2.5,
        ),
        padding=Padding(192, 192, 4),
    )
    again = Decision.from_json(json.loads(json.dumps(decision.to_json(), allow_nan=False)))
    assert again == decision
    assert again.chosen == rows[0]


def test_figures_that_are_no_numbers_are_null_in_json() -> None:
    row = CandidateResult("a", None, "disqualified", "output holds NaN", ms=math.inf, error=math.nan)
    assert row.to_json()["ms"] is None
    assert row.to_json()["error"] is None


@pytest.mark.parametrize(
    "change",
    [
        {"policy": "guessed"},
        {"bucket": {**EXAMPLE["bucket"], "phase": "dream"}},
        {"bucket": {**EXAMPLE["bucket"], "batch": "one"}},
        {"bucket": {**EXAMPLE["bucket"], "kv_len": 700}},
        {"bucket": {**EXAMPLE["bucket"], "heads": [16]}},
        {"bucket": {**EXAMPLE["bucket"], "colour": "red"}},
        {"candidates": [{**EXAMPLE["candidates"][0], "verdict": "fine"}]},
        {"candidates": [{**EXAMPLE["candidates"][0], "ms": "fast"}]},
        {"padding": {"qk": 192}},
        {"layers": 0},
        {"fingerprint": []},
    ],
)
def test_anything_else_is_refused(change: dict[str, object]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
        Decision.from_json({**EXAMPLE, **change})


def test_cost_shares_the_plan_among_the_layers() -> None:
    row = CandidateResult("a", None, "slower", ms=1.0, plan_ms=0.5)
    assert row.cost(1) == 1.5
    assert row.cost(25) == 1.02
    assert CandidateResult("a", None, "unsupported").cost(1) is None
