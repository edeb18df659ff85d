"""A child process that answers the benchmark's requests with transformers' `generate`, the fastest way it has.

Reads one JSON object on standard input, {"model", "prompts", "output_tokens", "threads"}, and prints one as its last line:
{"attention", "experts", "tried": {name: tokens per second}, "sequential": {"seconds", "tokens"}, "batch": {...}}.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import product
from typing import Any

import torch


def load(model: str, attention: str, experts: str) -> Any:
    """The model in float32 with these implementations; raises whatever transformers raises where it has no such."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation=attention, experts_implementation=experts
    ).eval()


@torch.inference_mode()
def generate(model: Any, prompts: list[list[int]], output_tokens: int) -> tuple[float, list[list[int]]]:
    """Greedy; prompts of equal length. Returns seconds and the new token ids of each."""
    ids = torch.tensor(prompts)
    begin = time.perf_counter()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        use_cache=True,
        min_new_tokens=output_tokens,
        max_new_tokens=output_tokens,
    )
    return time.perf_counter() - begin, out[:, ids.shape[1] :].tolist()


def fastest(model_dir: str, prompts: list[list[int]], note: Any) -> tuple[str, str, dict[str, float | str]]:
    """Tries each attention x experts implementation on one short request and a batch; the most tokens per second wins."""
    tried: dict[str, float | str] = {}
    for attention, experts in product(("sdpa", "eager"), ("eager", "grouped_mm", "batched_mm")):
        name = f"{attention}+{experts}"
        try:
            model = load(model_dir, attention, experts)
            generate(model, prompts[:1], 2)
            one, _ = generate(model, prompts[:1], 8)
            many, _ = generate(model, prompts[:4], 8)
        except (ValueError, RuntimeError, NotImplementedError, ImportError) as error:
            tried[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            continue
        tried[name] = 40 / (one + many)
        note(f"transformers {name}: {tried[name]:.1f} tokens/s on a short trial")
    rates = {name: rate for name, rate in tried.items() if isinstance(rate, float)}
    attention, experts = max(rates, key=lambda name: rates[name]).split("+")
    return attention, experts, tried


def main() -> None:
    request = json.load(sys.stdin)
    torch.set_num_threads(request["threads"])

    def note(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    prompts, tokens = request["prompts"], request["output_tokens"]
    attention, experts, tried = fastest(request["model"], prompts, note)
    model = load(request["model"], attention, experts)
    generate(model, prompts[:1], 4)
    batch_seconds, batch = generate(model, prompts, tokens)
    note(f"transformers, one batch of {len(prompts)}: {batch_seconds:.1f} s")
    seconds = 0.0
    sequential: list[list[int]] = []
    for index, prompt in enumerate(prompts):
        took, new = generate(model, [prompt], tokens)
        seconds, sequential = seconds + took, [*sequential, *new]
        note(f"transformers, request {index + 1} of {len(prompts)}: {took:.1f} s")
    result = {
        "attention": attention,
        "experts": experts,
        "tried": tried,
        "sequential": {"seconds": seconds, "tokens": sequential},
        "batch": {"seconds": batch_seconds, "tokens": batch},
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
