"""What a case does inside its own process: real vLLM on a CPU with the plugin in it, and transformers on the same checkpoint.

Nothing here is imported by the tests themselves: vLLM's global state and its once-per-process plugins stay with the case.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

NEW_TOKENS = 12


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


def keep_on_cpu(*, chunked: bool, prefix_cache: bool, budget: int | None = None) -> None:
    """Engines made from now on have chunked prefill and prefix caching as said, which vLLM switches off for MLA on a CPU.

    `budget` is the tokens of one step. It wraps vLLM's platform: for tests only.
    """
    from vllm.platforms.cpu import CpuPlatform

    if not hasattr(CpuPlatform, "settled"):
        CpuPlatform.settled = CpuPlatform.check_and_update_config.__func__

    def check(cls: Any, config: Any) -> None:
        CpuPlatform.settled(cls, config)
        if config.model_config is None or not config.model_config.use_mla:
            return
        config.scheduler_config.enable_chunked_prefill = chunked
        config.cache_config.enable_prefix_caching = prefix_cache
        if budget is not None:
            config.scheduler_config.max_num_batched_tokens = budget

    CpuPlatform.check_and_update_config = classmethod(check)


def greedy(llm: Any, prompts: Sequence[Sequence[int]], new_tokens: int = NEW_TOKENS) -> list[list[int]]:
    """The next tokens of each prompt, all prompts in one batch."""
    return [tokens for tokens, _, _ in answers(llm, prompts, new_tokens)]


def answers(
    llm: Any, prompts: Sequence[Sequence[int]], new_tokens: int = NEW_TOKENS
) -> list[tuple[list[int], list[float], int]]:
    """Of each prompt, all in one batch: the next tokens, their log-probabilities, and how many prompt tokens were cached."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False, logprobs=1)
    outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], sampling, use_tqdm=False)
    found = []
    for output in outputs:
        tokens = list(output.outputs[0].token_ids)
        logprobs = [step[token].logprob for step, token in zip(output.outputs[0].logprobs, tokens, strict=True)]
        found.append((tokens, logprobs, output.num_cached_tokens or 0))
    return found


@torch.inference_mode()
def expected(model: Path, prompts: Sequence[Sequence[int]], new_tokens: int = NEW_TOKENS) -> list[list[int]]:
    """What transformers says, in float32, prompt by prompt."""
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    found = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        out = net.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=2,
        )
        found.append(out[0, ids.shape[1] :].tolist())
    return found


def counts() -> dict[str, dict[str, int]]:
    """How often kernels of ours were planned, by phase, and run, by phase and layer, in this process so far."""
    from mla_serve.vllm_plugin.deployment import deployments

    steps: Counter[str] = Counter()
    runs: Counter[str] = Counter()
    for deployment in deployments():
        for (phase, _), count in deployment.counts.steps.items():
            steps[phase] += count
        for (phase, _, layer), count in deployment.counts.runs.items():
            runs[f"{phase} {layer}".strip()] += count
    return {"steps": dict(steps), "runs": dict(runs)}


def bases(llm: Any) -> list[list[str]]:
    """Of each attention layer: the classes of its impl and, where it has one, its prefill, with all that they inherit."""

    def look(model: torch.nn.Module) -> list[list[str]]:
        layers = [layer for layer in model.modules() if hasattr(layer, "impl") and hasattr(layer, "kv_cache")]
        parts = [[layer.impl, getattr(layer, "prefill_backend", None)] for layer in layers]
        return [
            [f"{base.__module__}.{base.__name__}" for part in pair if part is not None for base in type(part).__mro__]
            for pair in parts
        ]

    return llm.apply_model(look)[0]


def report(**found: Any) -> None:
    """The last line of a case's output, for the test that started it."""
    sys.stdout.flush()
    print(f"\nRESULT {json.dumps(found)}", flush=True)
