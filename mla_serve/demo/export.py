"""Writes the model directory as Hugging Face and vLLM read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from mla_serve.demo.network import DemoConfig, DemoNetwork
from mla_serve.demo.tokenizer import save_tokenizer

BOS_ID, EOS_ID, PAD_ID = 0, 1, 2


def hf_config(c: DemoConfig) -> dict[str, Any]:
    """The content of config.json, in the form of DeepSeek-V3's own."""
    # `rope_scaling` beside `rope_theta` is the published form; transformers 5 and vLLM turn it into `rope_parameters`.
    rope_scaling = {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": c.yarn_factor,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": c.yarn_fast,
        "beta_slow": c.yarn_slow,
        "original_max_position_embeddings": c.yarn_original,
    }
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "first_k_dense_replace": c.dense_layers,
        "hidden_act": "silu",
        "hidden_size": c.hidden,
        "initializer_range": 0.02,
        "intermediate_size": c.intermediate,
        "kv_lora_rank": c.kv_rank,
        "max_position_embeddings": int(c.yarn_original * c.yarn_factor),
        "moe_intermediate_size": c.expert,
        "moe_layer_freq": 1,
        "n_group": c.groups,
        "n_routed_experts": c.experts,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": c.heads,
        "num_experts_per_tok": c.experts_per_token,
        "num_hidden_layers": c.layers,
        "num_key_value_heads": c.heads,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": c.q_rank,
        "qk_nope_head_dim": c.nope,
        "qk_rope_head_dim": c.rope,
        "rms_norm_eps": c.eps,
        "rope_interleave": True,
        "rope_scaling": rope_scaling,
        "rope_theta": c.theta,
        "routed_scaling_factor": c.routed_scaling,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": c.groups_per_token,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "v_head_dim": c.v,
        "vocab_size": c.vocab,
    }


def hf_weights(network: DemoNetwork) -> dict[str, Tensor]:
    """The parameters under Hugging Face's names, bf16; the routers' biases are float32 as in DeepSeek-V3's checkpoint."""
    weights: dict[str, Tensor] = {}
    for name, tensor in network.state_dict().items():
        value = tensor.detach().cpu()
        if name.endswith("experts.gate_up"):
            for expert, (gate, up) in enumerate(value.unbind(0)):
                prefix = name.removesuffix("gate_up") + str(expert)
                weights[f"{prefix}.gate_proj.weight"], weights[f"{prefix}.up_proj.weight"] = gate, up
        elif name.endswith("experts.down"):
            for expert, down in enumerate(value.unbind(0)):
                weights[f"{name.removesuffix('down')}{expert}.down_proj.weight"] = down
        else:
            weights[name] = value
    return {
        name: value.clone().contiguous().to(torch.float32 if name.endswith("correction_bias") else torch.bfloat16)
        for name, value in weights.items()
    }


def export(network: DemoNetwork, tokenizer: Tokenizer, path: Path) -> None:
    """Weights, both configs and the tokenizer into `path`."""
    path.mkdir(parents=True, exist_ok=True)
    save_file(hf_weights(network), path / "model.safetensors", metadata={"format": "pt"})
    _write(path / "config.json", hf_config(network.config))
    generation = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID, "do_sample": False}
    _write(path / "generation_config.json", generation)
    save_tokenizer(tokenizer, path)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
