"""What a case does inside its own process: real vLLM on a CPU with the plugin in it, and transformers on the same checkpoint.

Nothing here is imported by the tests themselves: vLLM's global state and its once-per-process plugins stay with the case.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

NEW_TOKENS = 24
PLUGIN = "mla_serve.vllm_plugin"


def plug_in(**settings: str) -> None:
    """Before vLLM is imported: its environment for tests, and the plugin's. The plugin is found by its entry point."""
    os.environ |= {
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "MLA_SERVE_DEFAULT": "1",
        **settings,
    }


def engine(model: Path, **settings: Any) -> Any:
    """An LLM in this process, small, in float32. RoPE's CPU kernel is left out unless asked for: it is wrong."""
    from vllm import LLM

    return LLM(
        str(model),
        **{
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 512,
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": 64 << 20,
            "skip_tokenizer_init": True,
            "seed": 0,
            "compilation_config": {"custom_ops": ["-rotary_embedding"]},
            **settings,
        },
    )


def greedy(llm: Any, prompts: Sequence[Sequence[int]], new_tokens: int = NEW_TOKENS) -> list[list[int]]:
    """The next tokens of each prompt, all prompts in one batch."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@torch.inference_mode()
def expected(model: Path, prompts: Sequence[Sequence[int]], new_tokens: int = NEW_TOKENS) -> list[list[int]]:
    """What transformers says, in float32, prompt by prompt."""
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    found = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        out = net.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False
        )
        found.append(out[0, ids.shape[1] :].tolist())
    return found


def counts() -> dict[str, Any]:
    """How often each kernel of the one deployment in this process was planned and run."""
    from mla_serve.vllm_plugin.deployment import deployments

    (deployment,) = deployments()
    return deployment.counts.to_json()


def classes(llm: Any) -> list[dict[str, Any]]:
    """Of each attention layer: its classes, and what they inherit from vLLM."""

    def look(model: torch.nn.Module) -> list[dict[str, Any]]:
        return [
            {
                "layer": layer.layer_name,
                "impl": type(layer.impl).__module__,
                "prefill": type(layer.prefill_backend).__module__,
                "bases": [base.__name__ for cls in (type(layer.impl), type(layer.prefill_backend)) for base in cls.__mro__],
            }
            for layer in model.modules()
            if hasattr(layer, "impl") and hasattr(layer, "kv_cache")
        ]

    return llm.apply_model(look)[0]


def report(**found: Any) -> None:
    """The last line of a case's output, for the test that started it."""
    sys.stdout.flush()
    print(f"\nRESULT {json.dumps(found)}", flush=True)
