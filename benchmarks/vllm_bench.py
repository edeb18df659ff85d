"""vLLM's own choice of attention against the plugin's, in one run: both engines resident, requests alternated.

    python benchmarks/vllm_bench.py --out benchmarks/results/h200-vllm.json

A model of DeepSeek-V2-Lite's shape with dummy weights. Time per output token counts from the step in which the last prompt was
finished. vLLM runs twice in each alternation: what its two runs differ by is the spread. On a GPU with real vLLM; `--model`,
`--rows` and `--dtype` make it small enough to try on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams

from mla_serve.bench.results import save_result, stamped
from mla_serve.vllm_plugin.config import RPC

MODEL = Path(__file__).parent / "configs" / "deepseek-v2-lite"
ROWS = "1x1024,64x1024,256x1024,16x32000,1x32000,16x30000+200"
OURS = {"backend": "CUSTOM", "mla_prefill_backend": "CUSTOM"}


@dataclass(frozen=True)
class Row:
    """`requests` prompts of `prompt` tokens; with `more`, those are cached and so many new ones follow."""

    requests: int
    prompt: int
    more: int = 0

    @classmethod
    def parse(cls, text: str) -> Row:
        requests, _, rest = text.partition("x")
        prompt, _, more = rest.partition("+")
        return cls(int(requests), int(prompt), int(more or 0))


def start(name: str, args: argparse.Namespace, rows: list[Row]) -> tuple[LLM, float]:
    """An engine in a process of its own, and the seconds its start took."""
    cuda = torch.cuda.is_available()
    os.environ["MLA_SERVE_DEFAULT"] = "1" if name == "mla_serve" and not cuda else "0"
    os.environ["MLA_SERVE_PROBE"] = args.probe if name == "mla_serve" else "off"
    longest = max(row.prompt + row.more for row in rows) + args.tokens
    options: dict[str, Any] = {"attention_config": OURS} if name == "mla_serve" and cuda else {}
    options |= {"gpu_memory_utilization": 0.4} if cuda else {"kv_cache_memory_bytes": 256 << 20, "enforce_eager": True}
    began = time.perf_counter()
    engine = LLM(
        str(args.model), load_format="dummy", skip_tokenizer_init=True, dtype=args.dtype, seed=0, max_model_len=longest,
        max_num_seqs=max(row.requests for row in rows), enable_prefix_caching=cuda,
        compilation_config={"custom_ops": ["-rotary_embedding"]} if not cuda else {}, **options,
    )  # fmt: skip
    return engine, time.perf_counter() - began


def measure(engine: LLM, row: Row, tokens: int, seed: int) -> dict[str, float]:
    """Milliseconds per output token after the last prefill, and the seconds until then."""
    draw, words = torch.Generator().manual_seed(seed), engine.llm_engine.model_config.get_vocab_size()
    prompts = [torch.randint(3, words, (row.prompt,), generator=draw).tolist() for _ in range(row.requests)]
    if row.more:
        run(engine, prompts, 1)
        prompts = [prompt + torch.randint(3, words, (row.more,), generator=draw).tolist() for prompt in prompts]
    return run(engine, prompts, tokens)


def run(engine: LLM, prompts: list[list[int]], tokens: int) -> dict[str, float]:
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    core = engine.llm_engine
    began = time.perf_counter()
    for number, prompt in enumerate(prompts):
        core.add_request(f"{began}-{number}", {"prompt_token_ids": prompt}, sampling)
    have: dict[str, int] = {}
    started = began
    first = 0
    while core.has_unfinished_requests():
        outputs = core.step()
        now = time.perf_counter()
        for output in outputs:
            have[output.request_id] = len(output.outputs[0].token_ids)
        if not first and len(have) == len(prompts):
            started, first = now, sum(have.values())
    rest = (sum(have.values()) - first) / len(prompts)
    return {"prefill_s": started - began, "tpot_ms": (time.perf_counter() - started) * 1e3 / rest if rest else 0.0}


def kernels(engine: LLM) -> Counter[str]:
    """Steps so far by phase and kernel, of the first rank."""
    counts = json.loads(engine.collective_rpc(RPC)[0])["counts"]
    return Counter(
        {f"{step['phase']} {step['kernel']}": step["count"] for deployment in counts for step in deployment["steps"]}
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--probe", default="missing", help="MLA_SERVE_PROBE of our engine")
    args = parser.parse_args()
    rows = [Row.parse(text) for text in args.rows.split(",")]

    engines, seconds = {}, {}
    for name in ("vllm", "mla_serve"):
        engines[name], seconds[name] = start(name, args, rows)
    found: list[dict[str, Any]] = []
    for row in rows:
        for number in range(-1, args.times):  # the first is for warming up
            for run_name, name in (("vllm", "vllm"), ("mla_serve", "mla_serve"), ("vllm again", "vllm")):
                before = kernels(engines[name]) if name == "mla_serve" else Counter()
                result = measure(engines[name], row, args.tokens, seed=number + 1)
                used = dict(kernels(engines[name]) - before) if name == "mla_serve" else {}
                if number >= 0:
                    shape = {"requests": row.requests, "prompt": row.prompt, "more": row.more}
                    found.append(
                        {"backend": name, "run": number, "again": "again" in run_name, **shape, **result, "kernels": used}
                    )
    summary = []
    for row in rows:
        of = [r for r in found if (r["requests"], r["prompt"], r["more"]) == (row.requests, row.prompt, row.more)]
        for figure in ("tpot_ms", "prefill_s"):
            mid = {
                key: statistics.median(r[figure] for r in of if (r["backend"], r["again"]) == key)
                for key in (("vllm", False), ("vllm", True), ("mla_serve", False))
            }
            plain = mid["vllm", False]
            if plain:
                ratio, spread = mid["mla_serve", False] / plain, abs(mid["vllm", True] / plain - 1)
                summary.append(
                    {
                        "row": f"{row.requests}x{row.prompt}+{row.more}",
                        "figure": figure,
                        "vllm": plain,
                        "ratio": ratio,
                        "spread": spread,
                    }
                )
    result = {"start_seconds": seconds, "summary": summary, "rows": found}
    save_result(args.out, stamped(result, command=" ".join(["python", *sys.argv])))
    print(json.dumps(summary, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
