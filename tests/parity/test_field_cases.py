"""K07: YaRN in both spellings, beyond position 0. E01, E02: chunk sizes and the prefix cache must not show."""

from __future__ import annotations

import json
import math
import shutil

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from mla_serve.engine.base import Request, Sampling
from mla_serve.engine.embedded.config import ModelConfig
from mla_serve.engine.embedded.core import EngineCore
from tests.parity.checkpoints import DEEPSEEK
from tests.parity.harness import Ours
from tests.parity.reference import expect, prompt
from tests.parity.test_parity import TOLERANCE


@pytest.fixture
def respelled(directory, tmp_path):
    """A checkpoint whose config.json has the rope settings as before transformers 5; `rope` replaces them."""

    def make(name, **edit):
        copy = shutil.copytree(directory(name), tmp_path / name)
        fields = json.loads((copy / "config.json").read_text())
        rope = fields.pop("rope_parameters")
        fields["rope_theta"] = rope.pop("rope_theta")
        fields["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
        (copy / "config.json").write_text(json.dumps(fields | edit))
        return copy

    return make


@pytest.mark.parametrize(
    ("name", "edit", "scale"),
    [("v3-yarn-40", {}, 0.135234), ("v2-lite-yarn", {}, 0.114721), ("v3-yarn-40", {"rope_scaling": None}, 0.0721688)],
)
def test_k07_softmax_scale(name, edit, scale, directory, respelled):
    assert ModelConfig.from_dir(respelled(name, **edit)).softmax_scale == pytest.approx(scale, abs=5e-7)
    if not edit:
        assert ModelConfig.from_dir(directory(name)).softmax_scale == pytest.approx(scale, abs=5e-7)
    assert DEEPSEEK["qk_nope_head_dim"] + DEEPSEEK["qk_rope_head_dim"] == 192


@pytest.mark.parametrize("name", ["v3-yarn-40", "v2-lite-yarn", "v3-rest"])
def test_k07_logits_from_position_64_on_in_both_spellings(name, ours, theirs, respelled):
    old = Ours(msgspec.structs.replace(ours(name, None).config, model=str(respelled(name))))
    expected = theirs(name).expected[300].logits[64:]
    for core in (ours(name, None), old):
        logits = core.run((300,))[300].logits[64:]
        assert ((logits - expected).abs().amax(1) <= TOLERANCE * expected.abs().amax(1).clamp_min(1)).all()


def answer(core, name, tokens=None):
    """Tokens and their logprobs for the longest prompt, or for this one."""
    sampling = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=1)
    core.add(Request(name, prompt(700) if tokens is None else tokens, sampling))
    tokens, logprobs = [], []
    while core.has_work:
        for step in core.step():
            tokens += step.token_ids
            logprobs += [entry.logprob for entry in step.logprobs or []]
    assert len(tokens) == len(logprobs) == 12
    return tokens, logprobs


def test_e01_chunk_sizes_and_prefix_cache_change_nothing(ours, theirs):
    settings = ours("v3-odd", None).config
    whole = theirs("v3-odd").expected[700]
    logprobs = whole.logits[699:].log_softmax(-1).amax(-1).tolist()
    for size in (4096, 64, 16):
        changed = msgspec.structs.replace(settings, max_tokens=size, context_chunk=size, prefix_cache=True)
        core = EngineCore(changed)
        for run in ("computed", "cached"):
            tokens, got = answer(core, run)
            assert tokens == whole.tokens, f"{size} tokens a step, {run}"
            assert all(math.isclose(a, b, abs_tol=1e-3) for a, b in zip(got, logprobs, strict=True)), f"{size}, {run}"
        assert core.scheduler.prefix_hits == 688


@pytest.fixture
def long(directory, ours, tmp_path):
    """An engine whose model may be asked thousands of tokens, and transformers' model from the same directory."""
    copy = shutil.copytree(directory("v3-odd"), tmp_path / "long")
    fields = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(fields | {"max_position_embeddings": 8192}))
    settings = msgspec.structs.replace(
        ours("v3-odd", None).config, model=str(copy), max_model_len=8192, num_pages=512, context_chunk=4096, prefix_cache=True
    )
    peer = AutoModelForCausalLM.from_pretrained(copy, attn_implementation="eager", dtype=torch.float32).eval()
    return lambda **edit: EngineCore(msgspec.structs.replace(settings, **edit)), peer


@pytest.mark.slow("field-cases")
def test_e01_at_full_length(long, record_property):
    make, peer = long
    asked = prompt(5560)
    whole = expect(peer, (5560,))[0][5560]
    logprobs = whole.logits[5559:].log_softmax(-1).amax(-1).tolist()
    for size in (8192, 3072, 512, 128):
        core = make(max_tokens=size)
        for run in ("computed", "cached"):
            tokens, got = answer(core, run, asked)
            off = max(abs(a - b) for a, b in zip(got, logprobs, strict=True))
            row = {
                "case": "E01",
                "prompt": len(asked),
                "tokens_a_step": size,
                "run": run,
                "tokens_equal": tokens == whole.tokens,
            }
            record_property("row", row | {"logprob_off": float(f"{off:.2g}"), "asked": 0.05})
            assert tokens == whole.tokens, f"{size} tokens a step, {run}"
            assert off <= 0.05
        assert core.scheduler.prefix_hits == 5552


@pytest.mark.slow("field-cases")
def test_e02_with_a_prefix_of_2048_tokens(long, record_property):
    make, _ = long
    prefix = prompt(2048)
    first, second = [*prefix, *prompt(17)], [*prefix, *prompt(300)]
    asked = {"first": first, "second": second, "all cached": first, "all cached, whole pages": prefix}
    cached, plain = make(max_tokens=8192), make(max_tokens=8192, prefix_cache=False)
    for name, tokens in asked.items():
        before = cached.scheduler.prefix_hits
        (mine, got), (other, want) = answer(cached, name, tokens), answer(plain, name, tokens)
        hits, off = cached.scheduler.prefix_hits - before, max(abs(a - b) for a, b in zip(got, want, strict=True))
        row = {"case": "E02", "request": name, "prompt": len(tokens), "cached": hits, "tokens_equal": mine == other}
        record_property("row", row | {"logprob_off": float(f"{off:.2g}"), "asked": 0.05})
        assert mine == other
        assert off <= 0.05
        assert hits == {"first": 0, "second": 2048, "all cached": 2064, "all cached, whole pages": 2032}[name]
