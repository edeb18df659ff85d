"""Random checkpoints, written by transformers' own classes: one for every road through the model.

Hidden sizes are tiny, everything else is wide: weights, norms, biases and the routers' correction biases are drawn so that
tokens vary, attention matters and no weight could be left out unnoticed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    PreTrainedModel,
)

VOCAB = 256

DEEPSEEK = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
SMALL = {"kv_lora_rank": 96, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 48}
ODD = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}

GREEDY = {"topk_method": "greedy", "norm_topk_prob": False, "routed_scaling_factor": 1.0}
# Two experts from one group: with two groups the best two would never lie outside, and the limit would not show.
BY_GROUP = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 1, "routed_scaling_factor": 4.0}
NOAUX = {"n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5}


def yarn(factor: float, mscale: float | None = None) -> dict[str, Any]:
    """YaRN whose original context of 64 tokens the longer prompts leave far behind; `mscale` stands for both fields."""
    more = {} if mscale is None else {"mscale": mscale, "mscale_all_dim": mscale}
    return {
        "max_position_embeddings": int(64 * factor),
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": factor, "original_max_position_embeddings": 64,
            "beta_fast": 32, "beta_slow": 1, **more,
        },
    }  # fmt: skip


@dataclass(frozen=True)
class Spec:
    """One checkpoint. `seed` draws its weights; `edit` changes config.json afterwards."""

    name: str
    version: int
    seed: int
    fields: dict[str, Any] = field(hash=False)
    shards: str = "1GB"
    edit: dict[str, Any] = field(default_factory=dict, hash=False)


V3_EDIT = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}

# The seeds were picked for runs without close calls among experts and tokens; `test_no_close_calls` says how close.
SPECS = (
    Spec("v2", 2, 26, {**SMALL, **GREEDY, "q_lora_rank": None}),
    Spec("v2-q-lora", 2, 1, {**SMALL, **BY_GROUP, "q_lora_rank": 48}),
    Spec("v2-lite-yarn", 2, 20, {**DEEPSEEK, **GREEDY, "q_lora_rank": None, **yarn(40.0, 0.707)}),
    Spec("v3", 3, 6, {**SMALL, **NOAUX, "q_lora_rank": 48}),
    Spec("v3-yarn-40", 3, 4, {**DEEPSEEK, **NOAUX, "q_lora_rank": 48, **yarn(40.0, 1.0)}, edit=V3_EDIT),
    Spec("v3-odd", 3, 1, {**ODD, **NOAUX, "q_lora_rank": None}, edit=V3_EDIT),
    Spec("v3-20-heads", 3, 8, {**ODD, **NOAUX, "q_lora_rank": 32, "num_attention_heads": 20, "num_key_value_heads": 20}),
    # What the others leave at its default: biases, rope in halves, tied embeddings, one group, YaRN's own temperature, shards.
    Spec(
        "v3-rest", 3, 1,
        {
            **ODD, **NOAUX, "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "q_lora_rank": 32, "attention_bias": True,
            "rope_interleave": False, "tie_word_embeddings": True, "n_shared_experts": 2, "rms_norm_eps": 1e-3, **yarn(16.0),
        },
        shards="100KB",
    ),
)  # fmt: skip
BY_NAME = {spec.name: spec for spec in SPECS}


def model_of(spec: Spec) -> PreTrainedModel:
    """The transformers model in float32, drawn from the spec's seed."""
    fields = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 8, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "first_k_dense_replace": 1, "max_position_embeddings": 1024, "tie_word_embeddings": False,
        "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, **spec.fields,
    }  # fmt: skip
    if fields["num_attention_heads"] == 20 and "hidden_size" not in spec.fields:
        fields["hidden_size"] = 80
    config_type, model_type = (
        (DeepseekV2Config, DeepseekV2ForCausalLM) if spec.version == 2 else (DeepseekV3Config, DeepseekV3ForCausalLM)
    )
    torch.manual_seed(spec.seed)
    model = model_type(config_type(**fields)).eval()
    generator = torch.Generator().manual_seed(spec.seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("e_score_correction_bias"):
                tensor.normal_(std=0.2, generator=generator)
            elif name.endswith(".bias"):
                tensor.normal_(std=0.3, generator=generator)
            elif "norm" in name:
                tensor.uniform_(0.5, 1.5, generator=generator)
            elif "inv_freq" not in name:
                # By the width that is summed over, so that attention is sharp but not so sharp that rounding is amplified.
                tensor.normal_(std=1.5 * tensor.shape[-1] ** -0.5, generator=generator)
    return model


def build(spec: Spec, directory: Path) -> Path:
    """Writes the checkpoint; the directory holds config.json and safetensors, no tokenizer."""
    model_of(spec).save_pretrained(directory, max_shard_size=spec.shards)
    if spec.edit:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | spec.edit))
    return directory
