"""The prefix cache without chunked prefill: two requests share 2,000 tokens, then one that is wholly cached."""

from __future__ import annotations

import sys

from tests.vllm.inside import answers, counts, engine, keep_on_cpu, plug_in, report

plug_in()


def main(directory: str) -> None:
    from tests.parity.reference import prompt
    from tests.vllm.checkpoints import write

    model = write("v2", directory, max_position_embeddings=4096)
    shared = prompt(2000)
    asked = [[*shared, 7, 8, 9], [*shared, 11, 12], [*shared, 7, 8, 9]]
    found = {}
    for name, cached in (("cached", True), ("plain", False)):
        keep_on_cpu(chunked=False, prefix_cache=cached)
        llm = engine(model, max_model_len=4096)
        found[name] = [answers(llm, [one])[0] for one in asked]
        found[f"{name} counts"] = counts()
        del llm
    report(**found)


if __name__ == "__main__":
    main(*sys.argv[1:])
