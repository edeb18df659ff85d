"""The demo model inside vLLM, its answers word for word, with each decode kernel pinned in turn and CUDA graphs on.

    python benchmarks/vllm_demo.py --out benchmarks/results/h200-vllm-demo.json

Each kernel has a process of its own. On a GPU with real vLLM; on a CPU only torch-mla runs, without graphs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PINS = ("flashinfer-fa3", "fa3", "flashmla", "flashinfer-fa2", "torch-mla")
MARK = "ANSWERS "


def ask() -> None:
    """In a process of its own, whose environment has the pin."""
    import torch
    from vllm import LLM, SamplingParams

    from mla_serve.demo import MODEL_DIR, questions
    from mla_serve.vllm_plugin.config import RPC

    cuda = torch.cuda.is_available()
    options: dict[str, Any] = {"attention_config": {"backend": "CUSTOM", "mla_prefill_backend": "CUSTOM"}, "dtype": "bfloat16"}
    if not cuda:
        os.environ["MLA_SERVE_DEFAULT"] = "1"
        options = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}
    llm = LLM(str(MODEL_DIR), max_model_len=2048, max_num_seqs=64, seed=0, **options)
    asked = questions()
    outputs = llm.chat(
        [question.messages() for question in asked], SamplingParams(temperature=0.0, max_tokens=200), use_tqdm=False
    )
    right = sum(output.outputs[0].text == question.answer for output, question in zip(outputs, asked, strict=True))
    counts = json.loads(llm.collective_rpc(RPC)[0])["counts"]
    steps = {f"{step['phase']} {step['kernel']}": step["count"] for deployment in counts for step in deployment["steps"]}
    print(f"\n{MARK}{json.dumps({'right': right, 'of': len(asked), 'steps': steps, 'graphs': cuda})}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--pins", default=",".join(PINS))
    parser.add_argument("--ask", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ask:
        ask()
        return 0
    from mla_serve.bench.results import save_result, stamped

    rows = []
    for pin in args.pins.split(","):
        environment = {**os.environ, "MLA_SERVE_PINS": f"decode={pin}"}
        done = subprocess.run([sys.executable, __file__, "--ask"], env=environment, text=True, capture_output=True, check=False)
        answers = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
        lines = [line for line in (done.stdout + done.stderr).splitlines() if "Error: " in line] or ["nothing was printed"]
        last = next((line for line in lines if "PinError" in line or "UserError" in line), lines[-1])
        rows.append({"pin": pin, **(json.loads(answers[-1].removeprefix(MARK)) if answers else {"error": last})})
        print(json.dumps(rows[-1]), flush=True)
    if args.out:
        save_result(args.out, stamped({"rows": rows}, command=" ".join(["python", *sys.argv])))
    return 0 if all(row.get("right") == row.get("of") for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
