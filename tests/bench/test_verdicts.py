"""The targets of the kernel work, computed from results files."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mla_serve.bench.grids import Case
from mla_serve.shapes import Phase
from tests.bench import synthetic

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


verdicts = script("verdicts")


def times(**ratios: float) -> synthetic.Times:
    """Each name's time over the choice's, which takes 10 us; "_" in a name stands for "-", a final "_pad" for "+pad"."""
    named = {name.replace("_pad", "+pad").replace("_", "-"): 10.0 * ratio for name, ratio in ratios.items()}
    return lambda case: {"chosen": 10.0, **named}


def by_target(found: list[Any], part: str) -> Any:
    return next(verdict for verdict in found if part in verdict.target)


def test_all_met() -> None:
    main = synthetic.result(times(fa3=1.05, flashinfer_fa3=0.99, transformer_engine=2.0, transformer_engine_pad=1.5))
    for row in main["rows"]:
        if row["name"] == "transformer-engine":
            row["settings"] = "fused (cuDNN)" if row["padding"] or row["v"] != 100 else "unfused"
    found = verdicts.verdicts(
        main,
        synthetic.result(lambda case: torch_alone(case, 10.0, 11.0), "small"),
        synthetic.result(times(vllm_triton_mla=3.2), emulated="sm80"),
        {"models": {"DeepSeek-V3 at TP 8": {"seconds": 61.2, "buckets": 60}}},
    )
    assert [verdict.met for verdict in found] == [True] * len(found), "\n".join(map(str, found))
    assert "1.050x over 11 shapes" in by_target(found, "decode against FA3").figure
    assert "3.200x over 11 shapes" in by_target(found, "EMULATED").figure


def torch_alone(case: Case, long: float, short: float) -> dict[str, float]:
    """Padding pays for long prompts and loses for short ones."""
    if case.shape.phase is not Phase.PREFILL:
        return {"chosen": 10.0, "torch-mla": 10.0}
    pays = case.shape.q_len > 1000
    return {"chosen": 10.0, "torch-cudnn": short if pays else long, "torch-flash+pad": long if pays else short}


def test_missed_ones_say_where() -> None:
    main = synthetic.result(times(fa3=0.97, transformer_engine=2.0))
    found = verdicts.verdicts(main, None, None, {"models": {"V3": {"seconds": 91.0, "buckets": 60}}})
    behind = by_target(found, "at most 2 % behind")
    assert behind.met is False
    assert "0 of 35 shapes" in behind.figure
    assert "fa3 at decode" in behind.figure
    assert by_target(found, "decode against FA3").met is False
    assert by_target(found, "prefill against FA3").met is False
    assert by_target(found, "probe of V3").met is False


def test_what_was_not_measured_is_not_met() -> None:
    main = synthetic.result(lambda case: {"chosen": 1.0})
    for verdict in verdicts.verdicts(main, None, None, None):
        if "every answer" not in verdict.target:
            assert verdict.met is None, verdict


def test_a_grid_that_is_not_whole_is_not_measured() -> None:
    main = synthetic.result(lambda case: {"chosen": 1.0, **({} if case.shape.kv_len == 131072 else {"fa3": 2.0})})
    verdict = by_target(verdicts.verdicts(main, None, None, None), "decode against FA3")
    assert verdict.met is None
    assert "1 of 11 shapes are missing" in verdict.figure


def test_an_emulation_is_only_taken_from_a_file_that_says_so() -> None:
    plain = synthetic.result(times(vllm_triton_mla=9.0))
    assert by_target(verdicts.verdicts(plain, None, plain, None), "EMULATED").met is None


def test_torch_alone_must_win_somewhere_and_lose_nowhere() -> None:
    never = synthetic.result(lambda case: {"chosen": 10.0, "torch-cudnn": 10.0, "torch-flash+pad": 20.0}, "small")
    native, padded = verdicts.torch_alone(never["rows"])
    assert native.met is False
    assert padded.met is True
    lost = synthetic.result(lambda case: {"chosen": 10.0, "torch-cudnn": 9.0, "torch-flash+pad": 20.0}, "small")
    assert "loses at prefill" in verdicts.torch_alone(lost["rows"])[0].figure


def test_a_wrong_answer_of_ours_is_a_miss() -> None:
    main = synthetic.result()
    main["rows"][0] |= {"us": None, "verdict": "disqualified", "reason": "output off by 3.00%"}
    verdict = verdicts.right(main["rows"])
    assert verdict.met is False
    assert "output off by 3.00%" in verdict.figure


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "main.json"
    path.write_text(json.dumps(synthetic.result()))
    monkeypatch.setattr(sys, "argv", ["verdicts.py", str(path)])
    assert verdicts.main() == 1
    assert "not measured  EMULATED sm_80" in capsys.readouterr().out
