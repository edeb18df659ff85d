"""One checkpoint of `tests/parity`: vLLM with the plugin against transformers, token by token."""

from __future__ import annotations

import sys

from tests.vllm.inside import bases, counts, engine, expected, greedy, plug_in, report

plug_in()


def main(name: str, directory: str) -> None:
    from tests.parity.reference import PROMPTS, prompt
    from tests.vllm.checkpoints import write

    model = write(name, directory)
    prompts = [prompt(length) for length in PROMPTS]
    theirs = expected(model, prompts)
    llm = engine(model, max_model_len=1024)
    ours = greedy(llm, prompts)
    report(ours=ours, theirs=theirs, counts=counts(), bases=bases(llm))


if __name__ == "__main__":
    main(*sys.argv[1:])
