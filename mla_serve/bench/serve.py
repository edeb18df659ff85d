"""`mla-serve bench serve`: our server, over HTTP, beside transformers' `generate` on the same requests."""

from __future__ import annotations

import json
import random
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mla_serve.errors import UserError

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of one round: all sent at once, greedy, each of the same size in tokens."""

    requests: int = 16
    prompt_tokens: int = 256
    output_tokens: int = 64
    threads: int = 2

    def prompts(self, vocab_size: int, seed: int) -> list[list[int]]:
        """Random token ids that avoid the lowest, special ones."""
        rng = random.Random(seed)
        return [[rng.randrange(8, vocab_size) for _ in range(self.prompt_tokens)] for _ in range(self.requests)]


@contextmanager
def server(model: Path, threads: int, note: Note, extra: tuple[str, ...] = ()) -> Iterator[str]:
    """Runs `mla-serve serve` on a free loopback port; yields its URL; ends it afterwards."""
    command = [sys.executable, "-m", "mla_serve.cli", "serve", str(model), "--port", "0", "--threads", str(threads), *extra]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    lines: list[str] = []
    try:
        for line in process.stdout:
            lines.append(line.rstrip())
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                break
        else:
            raise UserError(f"the server did not start: {lines[-1] if lines else 'it printed nothing'}")
        with ThreadPoolExecutor(1) as drain:  # keep the pipe empty
            drain.submit(lambda: [None for _ in process.stdout or ()])
            note(f"server at {found.group()}")
            try:
                yield found.group()
            finally:
                process.terminate()  # else the drain, and whoever waits for it, would wait for a server that serves on
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()


def complete(url: str, prompt: list[int], output_tokens: int) -> str:
    """One greedy completion of exactly `output_tokens` tokens; the text."""
    body = {"prompt": prompt, "max_tokens": output_tokens, "temperature": 0, "ignore_eos": True, "skip_special_tokens": False}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=1800) as answer:
        text = json.load(answer)["choices"][0]["text"]
    assert isinstance(text, str)
    return text


def one_round(url: str, prompts: list[list[int]], output_tokens: int) -> tuple[float, list[str]]:
    """All prompts at once, each on its own connection. Seconds until the last answer, and the texts."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        begin = time.perf_counter()
        texts = list(pool.map(lambda prompt: complete(url, prompt, output_tokens), prompts))
        return time.perf_counter() - begin, texts


def ours(model: Path, load: Load, vocab_size: int, note: Note, rounds: int = 3) -> tuple[list[float], list[str]]:
    """Seconds of each round (fresh prompts each, so that no cached prefix helps) and the texts of the first."""
    with server(model, load.threads, note) as url:
        one_round(url, load.prompts(vocab_size, seed=1000)[:2], 8)  # warm up
        seconds: list[float] = []
        first: list[str] = []
        for index in range(rounds):
            took, texts = one_round(url, load.prompts(vocab_size, seed=index), load.output_tokens)
            note(f"mla_serve, round {index + 1}: {took:.2f} s, {load.requests * load.output_tokens / took:.1f} tokens/s")
            seconds, first = [*seconds, took], first or texts
    return seconds, first


def against_transformers(model: Path, load: Load, note: Note) -> dict[str, Any]:
    """Runs both and compares tokens; the model's tokenizer must write token 17 as "t17" (see bench/checkpoint.py)."""
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    prompts = load.prompts(vocab_size, seed=0)
    seconds, texts = ours(model, load, vocab_size, note)
    request = {"model": str(model), "prompts": prompts, "output_tokens": load.output_tokens, "threads": load.threads}
    child = subprocess.run(
        [sys.executable, "-m", "mla_serve.bench.transformers_peer"],
        input=json.dumps(request), stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    if child.returncode:
        raise UserError(f"the transformers side ended with status {child.returncode}; its error is above")
    peer = json.loads(child.stdout.splitlines()[-1])
    tokens = [[int(word[1:]) for word in text.split()] for text in texts]
    total = load.requests * load.output_tokens
    rate = total / statistics.median(seconds)
    sequential, batch = total / peer["sequential"]["seconds"], total / peer["batch"]["seconds"]
    return {
        "load": asdict(load),
        "tokens_per_s": {"mla_serve": rate, "transformers_sequential": sequential, "transformers_batch": batch},
        "rounds_tokens_per_s": [total / s for s in seconds],
        "times_faster": {"sequential": rate / sequential, "batch": rate / batch},
        "tokens_equal": {
            "sequential": sum(a == b for a, b in zip(tokens, peer["sequential"]["tokens"], strict=True)),
            "batch": sum(a == b for a, b in zip(tokens, peer["batch"]["tokens"], strict=True)),
            "of": load.requests,
        },
        "transformers": {key: peer[key] for key in ("attention", "experts", "tried")},
    }
