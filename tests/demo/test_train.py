"""The training loop, for two steps of a smaller network."""

from __future__ import annotations

import random

import torch
from tokenizers import Tokenizer

from mla_serve.demo import MODEL_DIR
from mla_serve.demo.corpus import Encoder, build_pool, long_sample, short_sample, vary
from mla_serve.demo.network import DemoConfig, DemoNetwork
from mla_serve.demo.questions import scenes
from mla_serve.demo.train import LONG_WIDTH, SHORT_WIDTH, Recipe, Trainer


def encoder() -> Encoder:
    return Encoder(Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json")))


def test_two_steps() -> None:
    torch.manual_seed(0)
    encode = encoder()
    pools = build_pool(short_sample, encode, 16, SHORT_WIDTH, 0), build_pool(long_sample, encode, 8, LONG_WIDTH, 1)
    network = DemoNetwork(DemoConfig(hidden=32, intermediate=32, expert=8, q_rank=16))
    before = network.lm_head.weight.detach().clone()
    recipe = Recipe(device="cpu", steps=2, short_batch=4, long_batch=2, lr=1e-3, seed=0, eager=True)
    trainer = Trainer(network, encode, pools, recipe)
    trainer.run()
    assert torch.isfinite(trainer.loss).all()
    assert not torch.equal(before, network.lm_head.weight)
    assert all((router.e_score_correction_bias >= 0).all() for router in network.routers())


def test_pools_depend_on_the_seed_alone() -> None:
    encode = encoder()
    first, again, other = (build_pool(long_sample, encode, 20, LONG_WIDTH, seed) for seed in (3, 3, 4))
    assert torch.equal(first.ids, again.ids)
    assert not torch.equal(first.ids, other.ids)


def test_varied_scenes_hold_the_answer() -> None:
    rng = random.Random(0)
    for scene in scenes():
        for _ in range(20):
            question = vary(scene, rng)
            assert question.fact is not None
            assert question.needed is not None
            assert question.needed in question.fact
            assert question.fact in (question.system or question.prompt)
            assert question.needed in question.answer
