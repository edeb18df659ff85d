"""Real vLLM on a CPU with the plugin inside: tokens of transformers, kernels of ours, step by step and layer by layer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.vllm.conftest import DIRECTORY

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

Case = Callable[..., dict[str, Any]]
LAYERS = [f"decode model.layers.{number}.self_attn.attn" for number in range(3)]
OURS = {"mla_serve.vllm_plugin.decode.Impl", "mla_serve.vllm_plugin.prefill.PrefillBackend"}
SHARED = {"MLACommonImpl", "MLACommonBaseImpl", "MLAAttentionImpl", "AttentionImplBase", "MLAPrefillBackend"}
"""What a class of ours may inherit of vLLM's: what is there for every backend, and no kernel."""


def check_counts(counts: dict[str, dict[str, int]], decodes: int | None = None) -> None:
    """Each planned step ran in every layer: a layer that fell back to another kernel would be missing."""
    steps, runs = counts["steps"], counts["runs"]
    assert {runs[layer] for layer in LAYERS} == {steps["decode"]}
    assert runs["prefill"] == len(LAYERS) * steps["prefill"]
    assert runs.get("context", 0) == len(LAYERS) * steps.get("context", 0)
    assert decodes is None or steps["decode"] == decodes


def check_bases(bases: list[list[str]]) -> None:
    assert len(bases) == len(LAYERS)
    for layer in bases:
        assert set(layer) >= OURS
        assert {name.rpartition(".")[2] for name in layer if name.startswith("vllm.")} <= SHARED


@pytest.mark.parametrize("name", ["v3-yarn-40", pytest.param("v3-20-heads", marks=pytest.mark.slow("vllm"))])
def test_each_greedy_token_is_transformers(case: Case, name: str) -> None:
    """V3 with YaRN and DeepSeek's widths, and 20 heads of odd widths that vLLM itself refuses."""
    found = case("parity", name, DIRECTORY)
    assert found["ours"] == found["theirs"]
    check_counts(found["counts"])
    check_bases(found["bases"])
    assert "Using CUSTOM MLA prefill backend" in found["log"]
    assert "attention kernels of mla_serve:" in found["log"]


def check_chunked(found: dict[str, Any]) -> None:
    """Every budget and the cached second pass: transformers' tokens, and log-probabilities within 0.05 of each other."""
    usual = [logprobs for _, logprobs, _ in found["runs"][0]["first"]]
    for run in found["runs"]:
        for given in (run["first"], run["again"]):
            assert [tokens for tokens, _, _ in given] == found["theirs"]
            gaps = [
                abs(a - b) for (_, ours, _), theirs in zip(given, usual, strict=True) for a, b in zip(ours, theirs, strict=True)
            ]
            assert max(gaps) < 0.05
        cached = [count for _, _, count in run["again"]]
        assert cached[0] > 0
        assert cached[1] > 0
        assert [count for _, _, count in run["first"]] == [0, 0, 0]
        check_counts(run["counts"])
    assert found["runs"][-1]["counts"]["steps"]["context"] > len(found["runs"])


def test_odd_widths_chunked_and_cached(case: Case) -> None:
    """A step budget of 64 tokens: new tokens, their context and decodes share steps."""
    check_chunked(case("chunked", DIRECTORY, 700, 1, 64))


@pytest.mark.slow("vllm")
def test_short_extensions_go_absorbed(case: Case) -> None:
    """With up to 16 new tokens absorbed, what is left of a cached prompt is a decode of several query tokens."""
    found = case("chunked", DIRECTORY, 700, 16, 66, 256)
    check_chunked(found)
    most = case("chunked", DIRECTORY, 700, 1, 66, 256)
    for few, many in zip(found["runs"], most["runs"], strict=True):
        assert few["counts"]["steps"]["prefill"] < many["counts"]["steps"]["prefill"]


@pytest.mark.slow("vllm")
def test_e01_long_prompt_in_chunks_of_any_size(case: Case) -> None:
    """E01: one prompt of 5,560 tokens, greedy, with step budgets of 8192, 3072, 512 and 128; then again with it cached."""
    check_chunked(case("chunked", DIRECTORY, 5560, 1, 8192, 3072, 512, 128))


@pytest.mark.slow("vllm")
def test_e02_prefix_cache_without_chunked_prefill(case: Case) -> None:
    """E02: two requests share 2,000 tokens, then one that is wholly cached: the answers of an engine without the cache."""
    found = case("prefix", DIRECTORY)
    for (ours, logprobs, cached), (theirs, plain, none), least in zip(
        found["cached"], found["plain"], (0, 2000, 2000), strict=True
    ):
        assert ours == theirs
        assert logprobs == pytest.approx(plain, abs=0.05)
        assert (cached, none) == (least, 0)
    check_counts(found["cached counts"])
    assert found["cached counts"]["steps"]["context"] == 2


def test_e03_bystanders_and_registering_twice(case: Case) -> None:
    """E03: an MLA model that nobody sent to us, a Llama, registering twice; no other enum member is redirected."""
    found = case("bystanders", DIRECTORY)
    states = found["states"]
    customs = {
        "attention CUSTOM": "mla_serve.vllm_plugin.decode.AttentionBackend",
        "prefill CUSTOM": "mla_serve.vllm_plugin.prefill.PrefillBackend",
    }
    assert states["loaded"] == states["again"] == {**states["before"], **customs}
    taken = {name: path for name, path in states["default"].items() if path != states["again"][name]}
    assert taken == {
        "attention CPU_MLA": customs["attention CUSTOM"],
        "attention AMX_MLA": customs["attention CUSTOM"],
        "prefill CPU": customs["prefill CUSTOM"],
        "prefill ZEN_CPU": customs["prefill CUSTOM"],
    }
    assert found["light"] == ["mla_serve.vllm_plugin.compat", "mla_serve.vllm_plugin.config"], "loads more than it must"
    for run in (found["llama"], found["mla"]):
        assert run["ours"] == run["theirs"]
        assert not any(name.startswith("mla_serve") for layer in run["bases"] for name in layer)
    assert "vllm.v1.attention.backends.mla.cpu_mla.CPUMLAImpl" in found["mla"]["bases"][0]
    assert found["unused"]
    assert found["counts"] == {"steps": {}, "runs": {}}


@pytest.mark.parametrize("every", [12, pytest.param(1, marks=pytest.mark.slow("vllm"))])
def test_the_demo_model_answers_word_for_word(case: Case, every: int) -> None:
    """A handful of its questions in CI, all of them in soak."""
    found = case("demo", every, "float32")
    assert found["given"] == found["wanted"]
    check_counts(found["counts"])


@pytest.mark.slow("vllm")
def test_an_engine_in_its_own_process(case: Case) -> None:
    """vLLM's default: the plugin is loaded again where the engine runs, and its decisions are asked for from here."""
    found = case("spawned", DIRECTORY)
    assert found["ours"] == found["theirs"]
    assert not found["here"]
    (rank,) = found["ranks"]
    (counts,) = rank["counts"]
    winners = {(d["bucket"]["phase"], d["winner"] + ("+pad" if d["padding"] else "")) for d in rank["decisions"]}
    assert {(step["phase"], step["kernel"]) for step in counts["steps"]} == winners
    decode = sum(step["count"] for step in counts["steps"] if step["phase"] == "decode")
    assert {run["layer"]: run["count"] for run in counts["runs"] if run["phase"] == "decode"} == {
        layer.removeprefix("decode "): decode for layer in LAYERS
    }


@pytest.mark.slow("vllm")
def test_probing_at_start_fills_the_decision_file_once(case: Case) -> None:
    """A second deployment measures only what the first one's file does not hold, and both serve what was measured."""
    found = case("probing", DIRECTORY)
    buckets = [json.dumps(decision["bucket"], sort_keys=True) for decision in found["held"]]
    assert len(set(buckets)) == len(buckets)
    assert {decision["policy"] for decision in found["held"]} == {"measured"}
    told = re.findall(r"measured attention kernels for (\d+) shapes", found["log"])
    assert len(told) == 2
    assert sum(map(int, told)) == len(buckets)
    assert {decision["policy"] for decision in found["in_force"]} == {"measured"}
    check_counts(found["counts"])
    assert "runner-up" in found["log"]


@pytest.mark.slow("vllm")
def test_the_wrong_rope_kernel_is_told_of(case: Case) -> None:
    """vLLM's CPU kernel turns MLA queries wrongly: a warning names the flag, and there is none where it does not matter."""
    found = case("rope", DIRECTORY)
    assert found["faulty"]
    assert found["told"] == {"plain": True, "flag": False, "yarn": False}
    assert found["log"].count("this vLLM's CPU kernel of rotary embeddings is wrong") == 1


@pytest.mark.slow("vllm")
def test_bad_input_ends_the_start_with_one_sentence(case: Case) -> None:
    found = case("bad_input", DIRECTORY)
    assert found["good"] == "started"
    for name, words in {
        "unknown_pin": ("UserError", "no kernel is called 'flash-mla'", "torch-mla"),
        "missing_kernel": ("PinError", "pinned by decode=flashmla", "remove the pin"),
        "missing_prefill": ("PinError", "pinned by prefill=fa3", "remove the pin"),
        "unknown_setting": ("UserError", "MLA_SERVE_PIN ", "MLA_SERVE_PINS"),
        "foreign_table": ("UserError", "holds decisions for", "mla-serve probe"),
        "missing_table": ("UserError", "cannot be read", "mla-serve probe"),
        "float8": ("--kv-cache-dtype",),
        "probe": ("UserError", "MLA_SERVE_PROBE is 'always'; use off, missing or all"),
    }.items():
        for word in words:
            assert word in found[name], (name, found[name])
