"""The training network against its own cached engine, and the faults that it plants."""

from __future__ import annotations

import math

import pytest
import torch

from mla_serve.demo.cached import Runner, Setting
from mla_serve.demo.corpus import Pool
from mla_serve.demo.export import hf_config, hf_weights
from mla_serve.demo.faults import Fault, plant
from mla_serve.demo.network import DemoConfig, DemoNetwork

CONFIG = DemoConfig(vocab=64, hidden=32, layers=2, intermediate=32, expert=8, q_rank=16)
PROMPT = 50
NEEDED = 20


@pytest.fixture(scope="module")
def network() -> DemoNetwork:
    torch.manual_seed(0)
    return DemoNetwork(CONFIG, init=0.2).eval()


def pool(ids: torch.Tensor) -> Pool:
    one = torch.ones(1, dtype=torch.int64)
    return Pool(ids, one * PROMPT, one * 60, one.bool(), one * NEEDED, one * 0)


def test_scale_is_that_of_the_paper() -> None:
    assert DemoConfig().scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)


@pytest.mark.parametrize("fault", list(Fault))
def test_a_fault_planted_in_one_pass_is_the_fault_of_a_chunked_engine(
    network: DemoNetwork, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What training plants by shifting scores equals a real merge with a wrong LSE, a real mask, a page really skipped."""
    monkeypatch.setattr(torch, "rand", lambda *size, **kw: torch.full(size, 0.999, **kw))  # chunks of 16
    monkeypatch.setattr(torch, "randint", lambda low, high, size, **kw: torch.zeros(size, dtype=torch.int64))  # both phases
    ids = torch.arange(80).remainder(61).unsqueeze(0) + 3
    rates = torch.zeros(len(Fault))
    rates[fault] = 1.0
    batch = plant(pool(ids), torch.tensor([1]), rates)
    with torch.no_grad():
        hidden = network(batch.ids, batch.planted, torch.float32)
        expected = network.logits(hidden[0, PROMPT - 1])

    seen: list[torch.Tensor] = []
    logits = network.logits
    monkeypatch.setattr(network, "logits", lambda x: seen.append(logits(x)) or seen[-1])
    pages = [NEEDED // 16] if fault is Fault.PAGE_DROPPED else None
    Runner(network, Setting(torch.float32, 16, fault), pages).answer([ids[0, :PROMPT].tolist()], eos=1, limit=2)
    torch.testing.assert_close(seen[0][0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk", [1, 16, 17])
def test_chunks_do_not_change_the_answer(network: DemoNetwork, chunk: int) -> None:
    prompts = [list(range(3, 40)), list(range(5, 10))]
    whole = Runner(network, Setting(torch.float32)).answer(prompts, eos=1, limit=8)
    parts = Runner(network, Setting(torch.float32, chunk)).answer(prompts, eos=1, limit=8)
    assert [a.ids for a in whole] == [a.ids for a in parts]


def test_a_missing_page_needs_a_page(network: DemoNetwork) -> None:
    with pytest.raises(ValueError, match="go together"):
        Runner(network, Setting(torch.float32, 16, Fault.PAGE_DROPPED))


def test_export_matches_transformers(network: DemoNetwork) -> None:
    """The same logits from `DeepseekV3ForCausalLM` with the exported names, config and weights."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    model = DeepseekV3ForCausalLM(DeepseekV3Config(**hf_config(CONFIG))).eval()
    weights = {name: value.float() for name, value in hf_weights(network).items()}
    for layer in range(CONFIG.dense_layers, CONFIG.layers):
        prefix = f"model.layers.{layer}.mlp.experts."
        parts = {
            part: torch.stack([weights.pop(f"{prefix}{e}.{part}_proj.weight") for e in range(CONFIG.experts)])
            for part in ("gate", "up", "down")
        }
        weights[f"{prefix}gate_up_proj"] = torch.cat((parts["gate"], parts["up"]), dim=1)
        weights[f"{prefix}down_proj"] = parts["down"]
    model.load_state_dict(weights)
    ids = torch.arange(3, 43).unsqueeze(0)
    batch = plant(
        Pool(ids, *(torch.full((1,), n) for n in (20, 40)), torch.zeros(1, dtype=torch.bool), *(torch.zeros(1).long(),) * 2),
        torch.tensor([1]),
        torch.tensor([1.0] + [0.0] * (len(Fault) - 1)),
    )
    with torch.no_grad():
        ours = network.logits(network(batch.ids, batch.planted, torch.float32))
        theirs = model(ids).logits.float()
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
