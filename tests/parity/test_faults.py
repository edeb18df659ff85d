"""The parity check can fail: each fault, planted into a running engine, moves logits far out of bounds and changes tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mla_serve.backends.merge import merge
from mla_serve.engine.embedded import attention, model
from mla_serve.engine.embedded.moe import MoE
from tests.parity.harness import Ours, difference
from tests.parity.test_parity import TOLERANCE

LENGTHS = (17, 300)


def scale_times(factor):
    def plant(runner, _):
        runner.config = replace(runner.config, softmax_scale=runner.config.softmax_scale * factor)

    return plant


def scale_of_the_latent_width(runner, _):
    dims = runner.config.dims
    scale_times((dims.qk / dims.latent_row) ** 0.5)(runner, _)


def no_rope(runner, _):
    runner._turns = torch.ones_like(runner._turns)


def no_temperature(runner, _):
    runner._turns = runner._turns / runner._turns.abs()


def each_moe(change):
    def plant(runner, _):
        layers = [replace(x, mlp=change(x.mlp)) if isinstance(x.mlp, MoE) else x for x in runner._model.layers]
        runner._model = replace(runner._model, layers=tuple(layers))

    return plant


def no_biases(runner, _):
    for layer in runner._model.layers:
        layer.attention.down.bias.zero_()
        layer.attention.out.bias.zero_()


def patched_merge(fake):
    def plant(_, monkeypatch):
        monkeypatch.setattr(attention, "merge", fake)

    return plant


def log2_merge(a, lse_a, b, lse_b, *, out=None):
    return merge(a, lse_a, b, lse_b * 1.4427, out=out)


def rope_rows_as_they_lie(monkeypatch):
    monkeypatch.setattr(model, "pair_order", lambda *_: None)


FAULTS = {
    "scale-times-0.7": ("v3-odd", scale_times(0.7)),
    "scale-of-latent": ("v3-odd", scale_of_the_latent_width),
    "no-rope": ("v3-odd", no_rope),
    "no-yarn-mscale": ("v3-yarn-40", scale_times(0.0721688 / 0.135234)),
    "no-temperature": ("v3-rest", no_temperature),
    "no-biases": ("v3-rest", no_biases),
    "no-correction-bias": ("v3-odd", each_moe(lambda m: replace(m, router=replace(m.router, bias=None)))),
    "no-scaling-factor": (
        "v3-odd",
        each_moe(lambda m: replace(m, router=replace(m.router, config=replace(m.router.config, scaling=1.0)))),
    ),
    "no-groups": (
        "v2-q-lora",
        each_moe(lambda m: replace(m, router=replace(m.router, config=replace(m.router.config, top_groups=4)))),
    ),
    "no-shared-experts": ("v3-odd", each_moe(lambda m: replace(m, shared=None))),
    "context-lost": ("v3-odd", patched_merge(lambda a, lse_a, b, lse_b, *, out=None: (a, lse_a))),
    "log2-lse": ("v3-odd", patched_merge(log2_merge)),
}


@pytest.fixture
def settings(ours):
    return lambda name: ours(name, 64).config


def seen(name, core, theirs):
    """How far off, and whether tokens differ."""
    expected = theirs(name).expected
    got = core.run(LENGTHS)
    return max(difference(got[n], expected[n]) for n in LENGTHS), any(got[n].tokens != expected[n].tokens for n in LENGTHS)


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_seen(fault, settings, theirs, monkeypatch):
    name, plant = FAULTS[fault]
    core = Ours(settings(name))
    plant(core.recorder.runner, monkeypatch)
    off, other_tokens = seen(name, core, theirs)
    assert off > 100 * TOLERANCE
    assert other_tokens


def test_rope_in_halves_taken_for_pairs_is_seen(settings, theirs, monkeypatch):
    rope_rows_as_they_lie(monkeypatch)
    off, other_tokens = seen("v3-rest", Ours(settings("v3-rest")), theirs)
    assert off > 100 * TOLERANCE
    assert other_tokens
