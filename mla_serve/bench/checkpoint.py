"""The random checkpoint that `bench serve` measures with: DeepSeek-V3 with YaRN, real attention widths, one word a token."""

from __future__ import annotations

import json
from pathlib import Path

import torch

LAYERS, HIDDEN, HEADS, EXPERTS, VOCAB = 8, 512, 8, 16, 2048


def make_checkpoint(directory: Path, *, seed: int = 0) -> None:
    """Writes an 8-layer, hidden 512, 8-head, 16-expert `DeepseekV3ForCausalLM` in float32 to `directory`.

    Each token id is one word ("t17"), so that text and token ids say the same and a server that answers in text can be
    compared id by id. The directory loads in transformers, in vLLM and here.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedTokenizerFast

    config = DeepseekV3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        moe_intermediate_size=HIDDEN // 2,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        n_routed_experts=EXPERTS,
        n_shared_experts=1,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
        first_k_dense_replace=1,
        q_lora_rank=256,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        max_position_embeddings=4096,
        initializer_range=0.05,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 40.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 4096,
        },
    )
    torch.manual_seed(seed)
    model = DeepseekV3ForCausalLM(config).eval()
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias.data.normal_(std=0.02)
    model.save_pretrained(directory)
    fields = json.loads((directory / "config.json").read_text())
    # transformers leaves these out, and vLLM then routes without the correction bias.
    fields |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    (directory / "config.json").write_text(json.dumps(fields, indent=2))

    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="t0", eos_token="t1", pad_token="t2", unk_token="t2")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    fast.save_pretrained(directory)
