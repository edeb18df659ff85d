"""Two ranks that share each layer: tokens, the kernels of each, and who measured. Started as a script: it spawns."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.vllm.inside import engine, expected, greedy, plug_in, report

plug_in(VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_WORKER_MULTIPROC_METHOD="spawn", VLLM_CPU_OMP_THREADS_BIND="0|1")


def main(name: str, directory: str, pins: str = "", probe: str = "off") -> None:
    table = Path(directory) / "decisions.json"
    if pins:
        os.environ["MLA_SERVE_PINS"] = pins
    if probe != "off":
        os.environ |= {"MLA_SERVE_PROBE": probe, "MLA_SERVE_BUDGET": "30", "MLA_SERVE_DECISIONS": str(table)}
    from mla_serve.vllm_plugin.config import RPC
    from tests.parity.reference import prompt
    from tests.vllm.checkpoints import write

    model = write(name, f"{directory}/model")
    prompts = [prompt(2), prompt(17), prompt(60)]
    theirs = expected(model, prompts)
    limits = {"max_model_len": 128, "max_num_seqs": 4}
    llm = engine(model, tensor_parallel_size=2, distributed_executor_backend="mp", **limits)
    ours = greedy(llm, prompts)
    ranks = [json.loads(answer) for answer in llm.collective_rpc(RPC)]
    held = json.loads(table.read_text())["decisions"] if table.exists() else []
    llm.llm_engine.engine_core.shutdown()
    report(ours=ours, theirs=theirs, ranks=ranks, held=held)


if __name__ == "__main__":
    main(*sys.argv[1:])
