"""Chunked prefill and the prefix cache on a CPU: long prompts, several step budgets, then again with the prefix cached."""

from __future__ import annotations

import os
import sys

from tests.vllm.inside import answers, counts, engine, expected, keep_on_cpu, plug_in, report

plug_in()


def main(directory: str, length: str, absorb_up_to: str, *budgets: str) -> None:
    from tests.parity.reference import prompt
    from tests.vllm.checkpoints import write

    os.environ["MLA_SERVE_ABSORB_UP_TO"] = absorb_up_to
    model = write("v2", directory, max_position_embeddings=8192)
    prompts = [prompt(int(length)), prompt(90), prompt(7)]
    theirs = expected(model, prompts)
    runs = []
    for budget in budgets:
        keep_on_cpu(chunked=True, prefix_cache=True, budget=int(budget))
        llm = engine(model, max_model_len=8192)
        first, again = answers(llm, prompts), answers(llm, prompts)
        runs.append({"budget": int(budget), "first": first, "again": again, "counts": counts()})
        del llm
    report(theirs=theirs, runs=runs)


if __name__ == "__main__":
    main(*sys.argv[1:])
