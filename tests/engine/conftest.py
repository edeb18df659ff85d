"""One tiny random DeepSeek-V3 for all engine tests, and the settings to serve it with."""

import json
from pathlib import Path

import pytest
import torch

import mla_serve
from mla_serve.engine.base import Request, Sampling, Structured
from mla_serve.engine.embedded.core import EngineCore
from mla_serve.engine.embedded.messages import EngineConfig
from tests.engine.driver import Driver

DEMO = Path(mla_serve.__file__).parent / "demo" / "model"
VOCAB, EOS, MAX_LEN = 160, 1, 1024


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A directory as transformers saves it. Odd widths and a wide initialisation, so that tokens vary and small errors show."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    yarn = {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": MAX_LEN // 4,
        "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
    }  # fmt: skip
    config = DeepseekV3Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2,
        n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=1.0, first_k_dense_replace=1,
        kv_lora_rank=32, q_lora_rank=None, qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=32,
        max_position_embeddings=MAX_LEN, initializer_range=0.3, tie_word_embeddings=False,
        bos_token_id=0, eos_token_id=EOS, pad_token_id=2, rope_parameters=yarn,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("engine") / "tiny"
    torch.manual_seed(0)
    DeepseekV3ForCausalLM(config).eval().save_pretrained(path)
    saved = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(saved | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}))
    return path


@pytest.fixture(scope="session")
def settings(checkpoint, tmp_path_factory):
    """EngineConfig for the tiny model. Its decision table is its own: a developer's measurements must not matter here."""
    decisions = tmp_path_factory.mktemp("decisions") / "decisions.json"

    def make(**changes):
        return EngineConfig(
            **{
                "model": str(checkpoint),
                "policy": "availability",
                "decisions": str(decisions),
                "num_pages": 256,
                "threads": 1,
            }
            | changes
        )

    return make


@pytest.fixture(scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture(scope="module")
def demo(settings, one_thread):
    """Makes a driver of a new core that serves the demo model."""

    def make(**changes):
        return Driver(EngineCore(settings(**{"model": str(DEMO), "dtype": "float32", "num_pages": 512} | changes)))

    return make


@pytest.fixture(scope="module")
def driver(demo):
    return demo()


@pytest.fixture(scope="module")
def asks(tokenizer):
    """A request of the demo model: what it is asked, and the grammar it must follow."""

    def make(name, kind=None, value="", text="What is the capital of France?", **sampling):
        prompt = tokenizer.encode(f"<｜begin▁of▁sentence｜><｜User｜>{text}<｜Assistant｜>", add_special_tokens=False)
        grammar = None if kind is None else Structured(kind, value if isinstance(value, str) else json.dumps(value))
        return Request(name, prompt, Sampling(**{"max_tokens": 200, "temperature": 0.0, "structured": grammar} | sampling))

    return make
