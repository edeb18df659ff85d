"""vLLM's load generator against our server and against vLLM's, same model and threads, one after the other, order swapped.

    python benchmarks/vllm_serve.py --vllm-python .venv-vllm/bin/python --out benchmarks/results/cpu-vllm-serve.json

Each server has the host to itself but for the generator. Both are warmed by a run of the same shape that is thrown away.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mla_serve.bench.checkpoint import make_checkpoint
from mla_serve.bench.results import save_result, stamped
from mla_serve.demo import MODEL_DIR

GENERATOR = (
    "from vllm.benchmarks.serve import add_cli_args, main\n"
    "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
    "parser = FlexibleArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)
QUIET = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
THREADS = {"OMP_NUM_THREADS": "2", "VLLM_CPU_OMP_THREADS_BIND": "0-1", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
PORT = 8765
DTYPES = {"checkpoint": "float32", MODEL_DIR.name: "bfloat16"}
"""The checkpoints' own; vLLM would round a float32 one to half precision unasked."""


def ours(model: Path) -> tuple[list[str], dict[str, str]]:
    """`mla-serve serve` with the embedded engine, as it comes."""
    command = [sys.executable, "-m", "mla_serve.cli", "serve", str(model), "--port", str(PORT), "--served-model-name", "m"]
    return [*command, "--threads", "2", "--max-model-len", "2048", "--engine", "embedded", "--dtype", DTYPES[model.name]], {}


def theirs(model: Path, python: str) -> tuple[list[str], dict[str, str]]:
    """vLLM's server without our plugin; its RoPE operator for CPUs, which is wrong for MLA, is off."""
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "m"]
    command += ["--port", str(PORT), "--host", "127.0.0.1", "--max-model-len", "2048", "--max-num-seqs", "64"]
    command += ["--dtype", DTYPES[model.name]]
    command += ["--kv-cache-memory-bytes", str(2 << 30), "--compilation-config", '{"custom_ops": ["-rotary_embedding"]}']
    return command, {**QUIET, **THREADS, "VLLM_PLUGINS": "none"}


@contextmanager
def running(command: list[str], env: dict[str, str], log: Path) -> Iterator[None]:
    """The server, until it answers; ended afterwards."""
    with log.open("w") as out:
        process = subprocess.Popen(command, env={**os.environ, **env}, stdout=out, stderr=subprocess.STDOUT)
    try:
        until = time.monotonic() + 300
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5).close()
                break
            except (urllib.error.URLError, OSError):
                if process.poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"the server did not start; see {log}") from None
                time.sleep(0.5)
        yield
    finally:
        process.terminate()
        process.wait(60)


def generate(python: str, model: Path, *, backend: str, requests: int, output: int, result: Path) -> dict[str, Any]:
    """One run of the generator; what it reports."""
    route = "/v1/chat/completions" if backend == "openai-chat" else "/v1/completions"
    command = [python, "-c", GENERATOR, "--backend", backend, "--base-url", f"http://127.0.0.1:{PORT}", "--endpoint", route]
    command += ["--model", "m", "--tokenizer", str(model), "--dataset-name", "random", "--random-input-len", "128"]
    command += ["--random-output-len", str(output), "--num-prompts", str(requests), "--max-concurrency", "64", "--ignore-eos"]
    command += ["--temperature", "0", "--save-result", "--result-filename", result.name, "--result-dir", str(result.parent)]
    done = subprocess.run(command, env={**os.environ, **QUIET}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-4000:])
    report: dict[str, Any] = json.loads(result.read_text())
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm-python", required=True, help="Python of an environment with vLLM's CPU build")
    parser.add_argument("--models", nargs="+", default=["checkpoint", "demo"])
    parser.add_argument("--backends", nargs="+", default=["openai", "openai-chat"])
    parser.add_argument("--requests", type=int, default=192)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        for name in asked.models:
            model = MODEL_DIR
            if name == "checkpoint":
                model = root / "checkpoint"
                make_checkpoint(model)
            backends = [one for one in asked.backends if name == "demo" or one == "openai"]  # it has no chat template
            for turn, side in enumerate(("mla_serve", "vllm", "vllm", "mla_serve")):
                command, env = ours(model) if side == "mla_serve" else theirs(model, asked.vllm_python)
                with running(command, env, root / f"{side}-{turn}.log"):
                    for backend in backends:
                        common = {"backend": backend, "output": asked.output, "result": root / "result.json"}
                        generate(asked.vllm_python, model, requests=64, **common)
                        report = generate(asked.vllm_python, model, requests=asked.requests, **common)
                        row = {
                            "model": name, "backend": backend, "side": side, "turn": turn, "completed": report["completed"],
                            "failed": asked.requests - report["completed"], "output_tokens_per_s": report["output_throughput"],
                            "median_ttft_ms": report["median_ttft_ms"], "median_tpot_ms": report["median_tpot_ms"],
                        }  # fmt: skip
                        print(json.dumps(row), flush=True)
                        rows.append(row)
    summary = []
    for name, backend in dict.fromkeys((row["model"], row["backend"]) for row in rows):
        mine, other = (
            {
                key: statistics.median(
                    row[key] for row in rows if (row["model"], row["backend"], row["side"]) == (name, backend, side)
                )
                for key in ("output_tokens_per_s", "median_ttft_ms")
            }
            for side in ("mla_serve", "vllm")
        )
        ratios = {
            "throughput": mine["output_tokens_per_s"] / other["output_tokens_per_s"],
            "ttft": mine["median_ttft_ms"] / other["median_ttft_ms"],
        }
        summary.append({"model": name, "backend": backend, **ratios})
        print(f"{name} {backend}: throughput {ratios['throughput']:.2f}x vLLM's, time to first token {ratios['ttft']:.2f}x")
    if asked.out is not None:
        save_result(asked.out, stamped({"summary": summary, "rows": rows}, command=" ".join(sys.argv)))


if __name__ == "__main__":
    main()
