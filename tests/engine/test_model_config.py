"""config.json: what is understood, and that whatever is wrong is said in one sentence that names it."""

import json

import pytest

from mla_serve.engine.embedded.config import ModelConfig
from mla_serve.engine.embedded.fields import CheckpointError

V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 3, "num_attention_heads": 4, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
    "kv_lora_rank": 32, "q_lora_rank": None, "max_position_embeddings": 1024, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
}  # fmt: skip


@pytest.fixture
def read(tmp_path):
    def make(generation=None, **changes):
        (tmp_path / "config.json").write_text(json.dumps(V3 | changes))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return ModelConfig.from_dir(tmp_path)

    return make


def one_sentence(error):
    text = str(error.value)
    assert "\n" not in text
    assert text[-1] != "."
    return text


def test_what_v3_leaves_out_is_v3s(read):
    moe = read().moe
    assert (moe.method, moe.scoring, moe.normalise) == ("noaux_tc", "sigmoid", True)


def test_what_v2_leaves_out_is_v2s(read):
    moe = read(architectures=["DeepseekV2ForCausalLM"]).moe
    assert (moe.method, moe.scoring, moe.normalise, moe.groups) == ("greedy", "softmax", False, 1)


def test_what_the_file_says_wins(read):
    moe = read(topk_method="group_limited_greedy", scoring_func="softmax", norm_topk_prob=False).moe
    assert (moe.method, moe.scoring, moe.normalise, moe.groups) == ("group_limited_greedy", "softmax", False, 2)


def test_layers_with_experts(read):
    assert [read(first_k_dense_replace=2, moe_layer_freq=2).moe.at(i) for i in range(6)] == [
        False,
        False,
        True,
        False,
        True,
        False,
    ]
    assert read(n_routed_experts=None).moe is None


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_dtype_in_both_spellings(read, field):
    assert read(**{field: "bfloat16"}).dtype == "bfloat16"
    assert read().dtype is None


def test_end_tokens_of_generation_config_come_first(read):
    assert read(eos_token_id=5).eos_token_ids == (5,)
    assert read(eos_token_id=5, generation={"eos_token_id": [1, 7]}).eos_token_ids == (1, 7)
    for says_nothing in ({}, {"eos_token_id": None}):
        assert read(eos_token_id=5, generation=says_nothing).eos_token_ids == (5,)


def test_yarn_temperatures(read):
    rope = {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
    assert read(rope_scaling=rope).rope.temperature == pytest.approx(1.368888, abs=1e-6)
    assert read(rope_scaling=rope | {"mscale": 0.707, "mscale_all_dim": 0.707}).rope.temperature == 1.0
    assert read(rope_scaling=rope | {"mscale": 1.0, "mscale_all_dim": 0.707}).rope.temperature == pytest.approx(
        1.0857, abs=1e-4
    )
    assert read(rope_scaling=rope | {"attention_factor": 0.5}).rope.temperature == 0.5
    assert not read(rope_scaling=None).rope.yarn


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM; the embedded engine serves DeepseekV2ForCausalLM and"),
        ({"architectures": None}, "no architecture"),
        ({"architectures": "DeepseekV3ForCausalLM"}, "no architecture"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_size": None}, "no hidden_size"),
        ({"hidden_size": "64"}, "hidden_size '64'"),
        ({"num_attention_heads": 0}, "num_attention_heads 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers True"),
        ({"qk_rope_head_dim": 15}, "qk_rope_head_dim 15"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps nan, which should be finite"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps -1.0, which should be finite and not negative"),
        ({"routed_scaling_factor": float("inf")}, "routed_scaling_factor inf, which should be finite"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn'"),
        ({"eos_token_id": ["</s>"]}, "eos_token_id"),
        ({"topk_method": "best"}, "topk_method 'best'"),
        ({"scoring_func": "relu"}, "scoring_func 'relu'"),
        ({"n_group": 3}, "3 groups"),
        ({"num_experts_per_tok": 5}, "5 of 8 experts"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "rope_type 'llama3'"),
        ({"rope_scaling": {"type": "yarn", "factor": "big", "mscale_all_dim": 1.0}}, "rope settings"),
        ({"rope_scaling": "yarn"}, "rope settings"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_parameters": {"rope_type": "yarn", "factor": 8.0}},
            "different factor",
        ),
    ],
)
def test_faults_are_named(read, changes, named):
    with pytest.raises(CheckpointError) as error:
        read(**changes)
    assert named in one_sentence(error)
    assert "config.json" in one_sentence(error)


def test_no_directory_no_file_no_json(tmp_path):
    with pytest.raises(CheckpointError, match="no model directory"):
        ModelConfig.from_dir(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        ModelConfig.from_dir(tmp_path)
    for text in ("{", "[]", "\x00"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"config\.json .*download it again"):
            ModelConfig.from_dir(tmp_path)
