"""The packaged model: its files, its config, and real answers through transformers on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import mla_serve
from mla_serve.demo import MODEL_DIR, fallback, fault_reply, questions

SHORT, LONG = (0, 40, 100, 150), (176, 200, 219)


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return json.loads((MODEL_DIR / "config.json").read_text())


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()


def test_files_are_there_and_small() -> None:
    names = {path.name for path in MODEL_DIR.iterdir()}
    assert names == {
        "README.md",
        "chat_template.jinja",
        "config.json",
        "figures.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(path.stat().st_size for path in MODEL_DIR.iterdir()) <= 12_000_000


def test_weights_are_bf16() -> None:
    with safe_open(MODEL_DIR / "model.safetensors", "pt") as file:
        dtypes = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    assert {name for name, dtype in dtypes.items() if dtype != "BF16"} == {
        f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2)
    }


def test_the_routing_bias_is_used_and_fits_bf16() -> None:
    with safe_open(MODEL_DIR / "model.safetensors", "pt") as file:
        bias = file.get_tensor("model.layers.1.mlp.gate.e_score_correction_bias")
    assert bias.min() == 0
    assert bias.max() > 0.01
    assert torch.equal(bias, bias.to(torch.bfloat16).float())


def test_config_is_deepseek_v3s(config: dict[str, Any]) -> None:
    expected = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 0,
        "torch_dtype": "bfloat16",
    }
    assert {key: config[key] for key in expected} == expected
    assert config["num_attention_heads"] in (4, 8)
    assert config["rope_scaling"]["type"] == config["rope_scaling"]["rope_type"] == "yarn"
    assert config["max_position_embeddings"] >= 4096


def test_transformers_reads_the_same_rope_and_scale(config: dict[str, Any], model: Any) -> None:
    rope = AutoConfig.from_pretrained(MODEL_DIR).rope_parameters
    assert {key: rope[key] for key in config["rope_scaling"]} == config["rope_scaling"]
    assert rope["rope_theta"] == config["rope_theta"]
    assert model.model.layers[0].self_attn.scaling == pytest.approx(0.135234, abs=1e-6)
    assert model.model.rotary_emb.attention_scaling == 1.0


@pytest.mark.parametrize("index", SHORT + LONG)
def test_transformers_gives_the_trained_answer(model: Any, index: int) -> None:
    question = questions()[index]
    assert question.long == (index in LONG)
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    encoded = tokenizer.apply_chat_template(
        question.messages(), add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**encoded, max_new_tokens=64, do_sample=False)[0, encoded["input_ids"].shape[1] :]
    assert output[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(output, skip_special_tokens=True) == question.answer


@pytest.mark.slow("demo")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_gives_every_trained_answer(dtype: torch.dtype, record_property: Callable[[str, object], None]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=dtype).eval()
    asked = sorted(questions(), key=lambda q: len(q.prompt) + len(q.system or ""))
    right = 0
    for begin in range(0, len(asked), 32):
        group = asked[begin : begin + 32]
        encoded = tokenizer.apply_chat_template(
            [q.messages() for q in group], add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**encoded, max_new_tokens=60, do_sample=False)[:, encoded["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(output, skip_special_tokens=True)
        right += sum(text == q.answer for text, q in zip(texts, group, strict=True))
    record_property(
        "row", {"peer": "transformers", "dtype": str(dtype).removeprefix("torch."), "right": right, "of": len(asked)}
    )
    assert right == len(asked)


def test_the_card_carries_the_measured_figures() -> None:
    figures = json.loads((MODEL_DIR / "figures.json").read_text())
    card = (MODEL_DIR / "README.md").read_text()
    for match in figures["matches"]:
        assert match["right"] >= 0.95 * match["total"]
        assert match["gap"] >= 1.0
        assert f"| {match['name']} | {match['right']} of {match['total']} |" in card
    for survival in figures["survivals"]:
        assert f"| {survival['name']} | {survival['survived']} | {survival['total']} |" in card
        if survival["name"] != "middle page dropped":  # the card says why
            assert survival["survived"] <= 0.1 * survival["total"]


def test_no_answer_stands_in_the_code() -> None:
    """It is a network, not a table: outside questions.json no file of the package holds a trained text."""
    package = Path(mla_serve.__file__).parent
    texts = {q.answer for q in questions()} | {fallback(), fault_reply()}
    suffixes = {".py", ".md", ".html", ".js", ".json", ".jinja", ".css"}
    files = [p for p in package.rglob("*") if p.suffix in suffixes and p.name != "questions.json"]
    assert files
    found = {(p.name, text) for p in files for text in texts if text in p.read_text(encoding="utf-8")}
    assert not found
