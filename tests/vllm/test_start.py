"""How vLLM starts with the plugin: E03, and settings that cannot be had."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.conftest import LAYERS, Case, calls

pytestmark = pytest.mark.vllm


def test_e03_registered_three_times(case: Case) -> None:
    found = case("twice", "yarn")
    ours = {name for name, path in found["decode"].items() if "mla_serve" in path}
    assert ours == {"CUSTOM", "CPU_MLA", "AMX_MLA"}
    assert {name for name, path in found["prefill"].items() if "mla_serve" in path} == {"CUSTOM", "CPU", "ZEN_CPU"}
    assert calls(found, "decode") == dict.fromkeys(LAYERS, 46)


def test_e03_without_being_asked_nothing_is_replaced(case: Case) -> None:
    found = case("run", "yarn", compare=False, env={"MLA_SERVE_DEFAULT": None})
    assert {name for name, path in found["decode"].items() if "mla_serve" in path} == {"CUSTOM"}
    assert {name for name, path in found["prefill"].items() if "mla_serve" in path} == {"CUSTOM"}
    assert found["counts"] == {}
    assert "Using CPU_MLA backend" in found["log"]


def test_e03_a_model_without_latents_never_notices(case: Case) -> None:
    ours = case("run", "llama")
    theirs = case("run", "llama", compare=False, env={"VLLM_PLUGINS": "none"})
    assert ours["first"] == ours["expected"] == theirs["first"]
    assert ours["counts"] == {}
    assert theirs["decode"]["CUSTOM"] == ""


WRONG = {
    "an unknown pin": ({"MLA_SERVE_PINS": "decode=nobody"}, "no kernel is called 'nobody'"),
    "a pin that cannot": ({"MLA_SERVE_PINS": "prefill=torch-flash+native"}, "torch-flash"),
    "an unknown policy": ({"MLA_SERVE_POLICY": "fastest"}, "use measured, availability, batch-invariant"),
    "a missing file": ({"MLA_SERVE_DECISIONS": "/nowhere/table.json"}, "there is no such file"),
    "a setting that is none": ({"MLA_SERVE_CONFIG": "wrong.toml"}, "polcy, which is no setting"),
    "a float8 cache": ({"MLA_SERVE_TEST_ENGINE": '{"kv_cache_dtype": "fp8"}'}, "fp8"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_had_is_said_at_start(case: Case, tmp_path: Any, what: str) -> None:
    variables, words = WRONG[what]
    env: dict[str, str | None] = dict(variables)
    if "MLA_SERVE_CONFIG" in variables:
        (tmp_path / "wrong.toml").write_text('polcy = "measured"\n')
        env["MLA_SERVE_CONFIG"] = str(tmp_path / "wrong.toml")
    found = case("refused", "yarn", env=env)
    assert found["error"] is not None, found["log"][-3000:]
    assert words in found["error"]
    assert "\n" not in found["error"]
