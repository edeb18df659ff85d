"""One checkpoint of `tests/parity`: vLLM with the plugin against transformers, token by token."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.vllm.inside import classes, counts, engine, expected, greedy, plug_in, report

plug_in()


def main(name: str) -> None:
    from tests.parity.checkpoints import BY_NAME, build
    from tests.parity.reference import prompt

    model = build(BY_NAME[name], Path(tempfile.mkdtemp()))
    prompts = [prompt(length) for length in (2, 4, 30, 121)]
    theirs = expected(model, prompts)
    llm = engine(model)
    ours = greedy(llm, prompts)
    report(ours=ours, theirs=theirs, counts=counts(), classes=classes(llm))


if __name__ == "__main__":
    main(sys.argv[1])
