"""Real vLLM on a CPU with the plugin: tokens equal to transformers', every layer of every step on our kernels."""

from __future__ import annotations

import pytest

from tests.vllm.conftest import LAYERS, Case, calls

pytestmark = pytest.mark.vllm


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


def test_nothing_of_vllms_own_mla_kernels_is_inherited(case: Case) -> None:
    found = case("lineage", "yarn")
    for name in ("Backend", "Builder", "Impl", "Prefill"):
        kernels = [module for module in found[name] if module.startswith("vllm.v1.attention.backends.mla.")]
        assert kernels == (["vllm.v1.attention.backends.mla.prefill.base"] if name == "Prefill" else []), name
