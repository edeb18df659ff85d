"""On a GPU host: the demo model's answers, word for word, through each prefill kernel pinned in turn and through a fresh probe.

    PYTHONPATH=. python3 benchmarks/gpu_demo.py --out gpu-demo.json

Needs torch with CUDA, transformers' tokenizers, msgspec, platformdirs and filelock; no server.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from mla_serve.demo import MODEL_DIR, questions
from mla_serve.demo.corpus import Encoder
from mla_serve.doctor import examine
from mla_serve.engine.base import Request, Sampling
from mla_serve.engine.embedded.core import EngineCore
from mla_serve.engine.embedded.messages import EngineConfig
from mla_serve.models import attention_grid
from mla_serve.selection import DecisionTable, Selector, probe

PINS = (
    "torch-flash+pad",
    "torch-cudnn+native",
    "torch-cudnn+pad",
    "torch-efficient+native",
    "torch-efficient+pad",
    "torch-math",
)


def answers(**config: Any) -> dict[str, Any]:
    """All questions at once: how many are answered word for word, in how many seconds, by which kernels."""
    encoder = Encoder(Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json")))
    core = EngineCore(EngineConfig(model=str(MODEL_DIR), device="cuda", num_pages=4096, **config))
    asked = questions()
    got: dict[str, list[int]] = {str(index): [] for index in range(len(asked))}
    begin = time.perf_counter()
    for index, question in enumerate(asked):
        tokens = len(encoder.answer(question.answer))
        core.add(Request(str(index), encoder.prompt(question.messages()), Sampling(max_tokens=tokens, temperature=0)))
    while core.has_work:
        for step in core.step():
            got[step.id] += step.token_ids
    right = sum(got[str(index)] == encoder.answer(question.answer) for index, question in enumerate(asked))
    kernels = sorted({f"{d['bucket']['phase']}: {d['winner']}{'+pad' if d['padding'] else ''}" for d in core.decisions()})
    return {"right": right, "of": len(asked), "seconds": round(time.perf_counter() - begin, 2), "kernels": kernels}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    out: Path = parser.parse_args().out
    device = torch.device("cuda")
    table = out.with_name("gpu-demo-decisions.json")
    shapes, layers = attention_grid(
        None, device, tp=1, dtype="bfloat16", page_size=None, max_model_len=4096, max_batch=64
    )  # fmt: skip
    begin = time.perf_counter()
    decisions = probe(Selector(device, table=DecisionTable.load(table), layers=layers, clean_pool=True), shapes)
    result: dict[str, Any] = {"host": examine().to_json(), "probe_seconds": round(time.perf_counter() - begin, 1), "rows": []}
    result["winners"] = {str(d.bucket): d.label for d in decisions}
    print(f"probed {len(decisions)} buckets in {result['probe_seconds']} s", flush=True)
    for chunks in ({}, {"max_tokens": 16, "page_size": 16, "context_chunk": 16, "max_requests": 16}):
        for dtype in ("bfloat16", "float32"):
            for pin in (None, *PINS):
                if dtype == "float32" and pin and ("flash" in pin or "cudnn" in pin):
                    continue  # half precision only
                pins = {"prefill": pin} if pin else {}
                row = {"dtype": dtype, "pin": pin, "chunks": 16 if chunks else None}
                try:
                    row |= answers(dtype=dtype, pins=pins, decisions=str(table), **chunks)
                except Exception as error:  # noqa: BLE001 (one kernel's refusal must not hide the others' answers)
                    row |= {"error": f"{type(error).__name__}: {error}"}
                print(json.dumps(row), flush=True)
                result["rows"].append(row)
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
