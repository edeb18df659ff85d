"""Real vLLM on a CPU with the plugin: tokens equal to transformers', every layer of every step on our kernels."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.vllm.conftest import Case

pytestmark = pytest.mark.vllm

LAYERS = [f"model.layers.{n}.self_attn.attn" for n in range(3)]


def calls(found: dict[str, Any], phase: str) -> Counter[str]:
    """Calls by layer (by "" for prefill, which one object serves) of one phase, whatever the kernel."""
    total: Counter[str] = Counter()
    for key, number in found["counts"].items():
        of, _, layer = key.split(" ")
        if of == phase:
            total[layer] += number
    return total


def test_deepseek_dims_with_yarn(case: Case) -> None:
    found = case("run", "yarn")
    assert found["first"] == found["expected"]
    assert found["again"] == found["expected"]
    # Two passes of 24 tokens each: the first of a pass comes from its prefill, 23 from decodes, in every layer.
    assert calls(found, "decode") == dict.fromkeys(LAYERS, 46)
    assert calls(found, "prefill") == {"": 6}
    assert {key.split(" ")[1] for key in found["counts"]} == {"torch-flash+pad", "torch-mla"}
    assert "mla_serve: torch-flash+pad (widths 192/128 to 192/192, 1.2x) serves prefill" in found["log"]


def test_odd_dims_in_chunks_with_the_prefix_cache(case: Case) -> None:
    """vLLM's own CPU backend refuses these widths; 64 tokens a step make its context chunks ours to attend."""
    found = case("run", "odd", chunk=64)
    assert found["first"] == found["expected"]
    assert found["again"] == found["expected"]
    assert found["cached"] == [0, 0, 16, 112]
    assert calls(found, "context")[""] >= 6
    decodes = calls(found, "decode")
    assert set(decodes) == set(LAYERS)
    assert len(set(decodes.values())) == 1


def test_twenty_heads(case: Case) -> None:
    found = case("run", "20-heads", env={"MLA_SERVE_PINS": "prefill=torch-flash+pad,decode=torch-mla+pad"})
    assert found["first"] == found["expected"]
    assert calls(found, "decode") == dict.fromkeys(LAYERS, 46)
    assert {key.split(" ")[1] for key in found["counts"]} == {"torch-flash+pad", "torch-mla+pad"}


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


def test_nothing_of_vllms_own_mla_kernels_is_inherited(case: Case) -> None:
    found = case("lineage", "yarn")
    for name in ("Backend", "Builder", "Impl", "Prefill"):
        kernels = [module for module in found[name] if module.startswith("vllm.v1.attention.backends.mla.")]
        assert kernels == (["vllm.v1.attention.backends.mla.prefill.base"] if name == "Prefill" else []), name


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
