"""Checkpoints that vLLM's CPU build takes: its mixture of experts wants wider hidden sizes than the parity suite's."""

from __future__ import annotations

import json
from pathlib import Path

from tests.parity.checkpoints import DEEPSEEK, GREEDY, NOAUX, ODD, V3_EDIT, Spec, build, yarn

SPECS = {
    spec.name: spec
    for spec in (
        Spec("yarn", 3, 4, {**DEEPSEEK, **NOAUX, "q_lora_rank": 48, **yarn(40.0, 1.0)}, edit=V3_EDIT),
        Spec("odd", 2, 26, {**ODD, **GREEDY, "n_group": 1, "topk_group": 1, "q_lora_rank": None}),
        Spec(
            "20-heads", 3, 8,
            {**ODD, **NOAUX, "q_lora_rank": 32, "num_attention_heads": 20, "num_key_value_heads": 20, "hidden_size": 320},
            edit=V3_EDIT,
        ),
    )
}  # fmt: skip


def make(name: str, directory: Path) -> Path:
    """Writes one of the above, or "llama", which has no latents."""
    path = directory / name
    if path.exists():
        return path
    path.mkdir(parents=True)
    if name == "llama":
        _llama(path)
    else:
        build(SPECS[name], path)
    return path


def _llama(path: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64, max_position_embeddings=512, initializer_range=0.08, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).eval().save_pretrained(path)
    data = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(data | {"dtype": "float32"}))
