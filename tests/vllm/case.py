"""One vLLM engine in a process of its own: `python -m tests.vllm.case JSON`. Its last line of output is its findings, as JSON.

Engine and worker run in this very process, so that what our kernels did can be counted.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch


def prompts() -> list[list[int]]:
    return [[5, 9], [3, 4, 5, 6], list(range(10, 40)), [(i * 37) % 250 + 3 for i in range(121)]]


def expected(model: str, tokens: int) -> list[list[int]]:
    """What transformers says, in float32 with plain attention."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager", dtype=torch.float32).eval()
    return [
        theirs.generate(
            torch.tensor([prompt]),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        for prompt in prompts()
    ]


def keep_chunks(budget: int) -> None:
    """vLLM switches chunked prefill and the prefix cache off for MLA on a CPU; here they are put back."""
    from vllm.platforms.cpu import CpuPlatform

    theirs = CpuPlatform.check_and_update_config.__func__

    def check(cls: type, config: Any) -> None:
        theirs(cls, config)
        config.scheduler_config.enable_chunked_prefill = True
        config.scheduler_config.max_num_batched_tokens = budget
        config.cache_config.enable_prefix_caching = True

    CpuPlatform.check_and_update_config = classmethod(check)


def engine(model: str, **more: Any) -> Any:
    from vllm import LLM

    return LLM(
        model, dtype="float32", enforce_eager=True, skip_tokenizer_init=True, kv_cache_memory_bytes=64 << 20, max_model_len=512,
        compilation_config={"custom_ops": ["-rotary_embedding"]}, seed=0, **more,
    )  # fmt: skip


def generate(llm: Any, asked: list[list[int]], tokens: int) -> tuple[list[list[int]], list[int]]:
    """Greedy tokens of each prompt, and how many of its tokens came from the prefix cache."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    answers = llm.generate([{"prompt_token_ids": prompt} for prompt in asked], params, use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in answers], [answer.num_cached_tokens or 0 for answer in answers]


def run(model: str, *, tokens: int = 24, chunk: int | None = None, compare: bool = True) -> dict[str, Any]:
    """Both passes over the prompts; `chunk`: tokens of one step, with the prefix cache."""
    found: dict[str, Any] = {"expected": expected(model, tokens) if compare else None}
    if chunk is not None:
        keep_chunks(chunk)
    llm = engine(model)
    found["first"], _ = generate(llm, prompts(), tokens)
    found["again"], found["cached"] = generate(llm, prompts(), tokens)
    found |= facts()
    return found


def facts() -> dict[str, Any]:
    """Which classes serve, and what ours have run."""
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from mla_serve.vllm_plugin.kernels import counts

    decodes = {name: member for name, member in AttentionBackendEnum.__members__.items() if "MLA" in name or name == "CUSTOM"}
    return {"counts": counts(), "decode": paths(decodes), "prefill": paths(MLAPrefillBackendEnum.__members__)}


def paths(members: Any) -> dict[str, str]:
    """The class behind each member; none behind a CUSTOM that nobody registered."""
    found = {}
    for name, member in members.items():
        try:
            found[name] = member.get_path()
        except ValueError:
            found[name] = ""
    return found


def lineage(_: str) -> dict[str, Any]:
    """The modules of every class that ours are made of."""
    from mla_serve.vllm_plugin.decode import Backend, Builder, Impl
    from mla_serve.vllm_plugin.prefill import Prefill

    return {cls.__name__: [base.__module__ for base in cls.__mro__] for cls in (Backend, Builder, Impl, Prefill)}


def twice(model: str) -> dict[str, Any]:
    """Registered three times over, by hand and by vLLM."""
    from mla_serve.vllm_plugin import register

    register()
    register()
    return run(model, compare=False)


def refused(model: str) -> dict[str, Any]:
    """The sentence with which a start fails."""
    from mla_serve.errors import UserError

    try:
        engine(model, **json.loads(os.environ.get("MLA_SERVE_TEST_ENGINE", "{}")))
    except UserError as error:
        return {"error": str(error)}
    return {"error": None}


def main() -> int:
    asked = json.loads(sys.argv[1])
    found = globals()[asked.pop("case")](asked.pop("model"), **asked)
    print("\n" + json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
