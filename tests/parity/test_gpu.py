"""The same model code on a GPU: float32 as on a CPU, bfloat16 (experts grouped in one call) as near to it as transformers."""

from __future__ import annotations

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.parity.harness import Ours, difference
from tests.parity.reference import PROMPTS, prompt

pytestmark = pytest.mark.gpu

NAMES = ("v2-q-lora", "v3-yarn-40", "v3-odd", "v3-rest")


@pytest.fixture
def on_gpu(ours):
    return lambda name, chunk, **more: Ours(
        msgspec.structs.replace(ours(name, chunk).config, device="cuda", num_pages=256, **more)
    )


@pytest.mark.parametrize("chunk", [None, 16])
@pytest.mark.parametrize("name", NAMES)
def test_float32_equals_transformers(name, chunk, on_gpu, theirs):
    core = on_gpu(name, chunk)
    for batch in ((300,), PROMPTS):
        for length, got in core.run(batch).items():
            assert difference(got, theirs(name).expected[length]) <= 1e-4
            assert got.tokens == theirs(name).expected[length].tokens


@pytest.mark.parametrize("chunk", [None, 64])
@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_is_as_near_as_transformers(name, chunk, on_gpu, theirs):
    """Random weights amplify rounding, and an expert chosen otherwise moves a whole row: so transformers' own bfloat16 on this
    GPU is the yardstick of how far from float32 the prompts' logits may be."""
    core = on_gpu(name, chunk, dtype="bfloat16")
    peer = AutoModelForCausalLM.from_pretrained(core.config.model, dtype=torch.bfloat16).eval().cuda()
    ours_off, peer_off = [], []
    for length, got in core.run(PROMPTS).items():
        expected = theirs(name).expected[length].logits[:length]
        with torch.inference_mode():
            logits = peer(torch.tensor([prompt(length)], device="cuda")).logits[0].float().cpu()
        ours_off.append(got.logits[:length] - expected)
        peer_off.append(logits - expected)
    assert torch.cat(ours_off).norm() <= 1.25 * torch.cat(peer_off).norm()
