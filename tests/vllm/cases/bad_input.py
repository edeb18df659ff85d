"""What cannot be served must end the start of vLLM with one sentence, and never in a wrong answer."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.vllm.inside import engine, plug_in, report

plug_in()


def refusal(model: Path, settings: dict[str, str], **options: Any) -> str:
    """The error that vLLM's start ends with, and its class."""
    os.environ |= settings
    try:
        engine(model, **options)
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    else:
        return "started"
    finally:
        for name in settings:
            del os.environ[name]


def main(directory: str) -> None:
    from tests.pages.sample import decisions
    from tests.vllm.checkpoints import write

    model = write("v3-yarn-40", f"{directory}/model")
    foreign = Path(directory) / "h100.json"
    foreign.write_text(json.dumps({"schema": 1, "decisions": [decision.to_json() for decision in decisions()]}))
    report(
        unknown_pin=refusal(model, {"MLA_SERVE_PINS": "decode=flash-mla"}),
        missing_kernel=refusal(model, {"MLA_SERVE_PINS": "decode=flashmla"}),
        missing_prefill=refusal(model, {"MLA_SERVE_PINS": "prefill=fa3"}),
        unknown_setting=refusal(model, {"MLA_SERVE_PIN": "decode=torch-mla"}),
        foreign_table=refusal(model, {"MLA_SERVE_DECISIONS": str(foreign)}),
        missing_table=refusal(model, {"MLA_SERVE_DECISIONS": f"{directory}/none.json"}),
        float8=refusal(model, {}, kv_cache_dtype="fp8"),
        probe=refusal(model, {"MLA_SERVE_PROBE": "always"}),
        good=refusal(model, {"MLA_SERVE_PINS": "decode=torch-mla,prefill=torch-math"}),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
