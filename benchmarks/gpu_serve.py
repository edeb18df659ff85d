"""On a GPU host, through `mla-serve serve`: answers while an idle probe runs, bits in company, and what batch invariance costs.

    PYTHONPATH=. python3 benchmarks/gpu_serve.py --out gpu-serve.json

The demo model's answers are known word for word, so a wrong kernel shows in them; the random checkpoint of `bench serve` is
for tokens per second and for bits (logprobs as the server prints them).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mla_serve.bench.checkpoint import make_checkpoint
from mla_serve.bench.serve import Load, one_round, server
from mla_serve.demo import MODEL_DIR, questions
from mla_serve.demo.questions import Question
from mla_serve.doctor import examine

LOAD = Load(requests=64, prompt_tokens=256, output_tokens=128, threads=4)
VOCAB = 2048


def post(url: str, route: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(f"{url}{route}", json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def get(url: str, route: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}{route}", timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def right(url: str, asked: list[Question]) -> int:
    """How many of these questions, asked at once, are answered word for word."""

    def ask(question: Question) -> bool:
        body = {"messages": question.messages(), "max_tokens": 200, "temperature": 0}
        text: str = post(url, "/v1/chat/completions", body)["choices"][0]["message"]["content"]
        return text == question.answer

    with ThreadPoolExecutor(16) as pool:
        return sum(pool.map(ask, asked))


def measured(url: str) -> int:
    return sum(decision["policy"] == "measured" for decision in get(url, "/attention/decisions")["decisions"])


def buckets(table: Path) -> int:
    return len(json.loads(table.read_text())["decisions"]) if table.exists() else 0


def idle(table: Path, seconds: float) -> dict[str, Any]:
    """Questions while the prober works, every few seconds, until it is done or `seconds` have passed; then all of them."""
    asked, rng, rows = questions(), random.Random(0), []
    with server(MODEL_DIR, LOAD.threads, note, ("--probe", "idle", "--decisions", str(table))) as url:
        begin, last, still = time.perf_counter(), -1, 0
        while (now := time.perf_counter() - begin) < seconds and still < 3:
            few = rng.sample(asked, 8)
            rows.append({"at_s": round(now, 1), "buckets": buckets(table), "right": right(url, few), "of": len(few)})
            still = still + 1 if buckets(table) == last and last > 0 else 0
            last = buckets(table)
            time.sleep(6.0)
        whole = right(url, asked)
        found = {"rounds": rows, "after": {"right": whole, "of": len(asked), "measured_in_force": measured(url)}}
    return found | {"buckets": buckets(table)}


def logprobs(url: str, prompt: list[int], tokens: int) -> list[float]:
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    values: list[float] = post(url, "/v1/completions", body)["choices"][0]["logprobs"]["token_logprobs"]
    return values


def company(url: str) -> dict[str, int]:
    """One request alone, then among others, twice: how many of its logprobs differ in any digit that is sent."""
    prompts = Load(24, 300, 0, 1).prompts(VOCAB, seed=7)
    prompts = [prompt[: 40 + 11 * index] for index, prompt in enumerate(prompts)]
    alone = [logprobs(url, prompt, 32) for prompt in prompts[:4]]
    different = 0
    for seed in (1, 2):
        crowd = prompts[:]
        random.Random(seed).shuffle(crowd)
        with ThreadPoolExecutor(len(crowd)) as pool:
            together = dict(zip(map(tuple, crowd), pool.map(lambda prompt: logprobs(url, prompt, 32), crowd), strict=True))
        different += sum(
            a != b for one, own in zip(prompts[:4], alone, strict=True) for a, b in zip(own, together[tuple(one)], strict=True)
        )
    return {"logprobs_compared": 2 * 4 * 32, "different": different}


def throughput(model: Path, policy: str, table: Path) -> dict[str, Any]:
    extra = ("--policy", policy, "--probe", "off", "--decisions", str(table), "--dtype", "bfloat16")
    with server(model, LOAD.threads, note, extra) as url:
        one_round(url, LOAD.prompts(VOCAB, seed=1000)[:2], 8)
        seconds = [one_round(url, LOAD.prompts(VOCAB, seed=index), LOAD.output_tokens)[0] for index in range(3)]
        bits = company(url)
        kernels = sorted({f"{d['bucket']['phase']}: {d['winner']}" for d in get(url, "/attention/decisions")["decisions"]})
    rate = LOAD.requests * LOAD.output_tokens / statistics.median(seconds)
    return {"policy": policy, "tokens_per_s": round(rate, 1), "kernels": kernels, **bits}


def note(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--idle-seconds", type=float, default=120.0)
    options = parser.parse_args()
    host = examine()
    result: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": "benchmarks/gpu_serve.py",
        "host": {"system": host.system, "python": host.python, "devices": host.devices, "versions": host.versions},
    }
    with tempfile.TemporaryDirectory() as scratch:
        table = Path(scratch) / "decisions.json"
        model = Path(scratch) / "model"
        make_checkpoint(model)
        for name, part in (
            ("idle", lambda: idle(table, options.idle_seconds)),
            ("policies", lambda: [throughput(model, policy, table) for policy in ("measured", "batch-invariant", "measured")]),
        ):
            result[name] = part()
            note(json.dumps(result[name]))
            options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
