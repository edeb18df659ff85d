"""K07: YaRN in both spellings, beyond position 0. E01: chunk sizes and the prefix cache must not show."""

from __future__ import annotations

import json
import math
import shutil

import msgspec
import pytest

from mla_serve.engine.base import Request, Sampling
from mla_serve.engine.embedded.config import ModelConfig
from mla_serve.engine.embedded.core import EngineCore
from tests.parity.checkpoints import DEEPSEEK
from tests.parity.harness import Ours
from tests.parity.reference import prompt
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


def answer(core, name):
    """Tokens and their logprobs for the longest prompt."""
    core.add(Request(name, prompt(700), Sampling(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=1)))
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
