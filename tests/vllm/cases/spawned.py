"""vLLM's usual engine: in a process of its own, where the plugin is loaded anew. Started as a script: it spawns."""

from __future__ import annotations

import json
import sys

from tests.vllm.inside import engine, expected, greedy, plug_in, report

plug_in(VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_WORKER_MULTIPROC_METHOD="spawn")


def main(directory: str) -> None:
    from mla_serve.vllm_plugin.config import RPC
    from tests.parity.reference import prompt
    from tests.vllm.checkpoints import write

    model = write("v3-yarn-40", directory)
    prompts = [prompt(2), prompt(60)]
    theirs = expected(model, prompts)
    llm = engine(model)
    ours = greedy(llm, prompts)
    ranks = [json.loads(answer) for answer in llm.collective_rpc(RPC)]
    here = "mla_serve.vllm_plugin.decode" in sys.modules
    llm.llm_engine.engine_core.shutdown()
    report(ours=ours, theirs=theirs, ranks=ranks, here=here)


if __name__ == "__main__":
    main(*sys.argv[1:])
