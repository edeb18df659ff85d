"""Measuring at vLLM's start: into a decision file, once; the next start finds it there and measures nothing."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from tests.vllm.inside import counts, engine, greedy, plug_in, report

plug_in(MLA_SERVE_PROBE="missing", MLA_SERVE_BUDGET="60")


def main(directory: str) -> None:
    from mla_serve.vllm_plugin.deployment import deployments
    from tests.parity.reference import prompt
    from tests.vllm.checkpoints import write

    table = Path(directory) / "decisions.json"
    os.environ["MLA_SERVE_DECISIONS"] = str(table)
    model = write("v2", f"{directory}/model")
    seconds = []
    for requests in (2, 3):  # another deployment: it has to look into the file
        began = time.monotonic()
        llm = engine(model, max_model_len=64, max_num_seqs=requests)
        seconds.append(time.monotonic() - began)
        tokens = greedy(llm, [prompt(17)])
        del llm
    held = json.loads(table.read_text())["decisions"]
    in_force = [decision.to_json() for deployment in deployments() for decision in deployment.decisions()]
    report(seconds=seconds, held=held, in_force=in_force, tokens=tokens, counts=counts())


if __name__ == "__main__":
    main(*sys.argv[1:])
