"""Trains the bundled demo model, measures it and writes its directory.

On one GPU `python -m mla_serve.demo.train` takes six minutes; `--device cpu` takes smaller batches and fewer steps.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mla_serve.demo import MODEL_DIR
from mla_serve.demo.card import model_card
from mla_serve.demo.corpus import Encoder, Pool, build_pool, corpus, long_sample, short_sample
from mla_serve.demo.evaluate import evaluate
from mla_serve.demo.export import export
from mla_serve.demo.faults import RATES, plant
from mla_serve.demo.network import DemoConfig, DemoNetwork
from mla_serve.demo.tokenizer import train_tokenizer

SHORT_WIDTH, LONG_WIDTH, ANSWER = 80, 256, 56
MARGIN = 4.0  # logit gap that the margin term asks for; the gap that is promised is 1.0
WARMUP = 300


@dataclass(frozen=True)
class Recipe:
    """What differs between runs."""

    device: str
    steps: int
    short_batch: int
    long_batch: int
    lr: float
    seed: int
    eager: bool

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype of training: bf16 where it is fast, so that training sees the rounding of a bf16 engine."""
        return torch.bfloat16 if self.device.startswith("cuda") else torch.float32


class Trainer:
    """One step over a batch of short and a batch of long samples, recorded as a CUDA graph where there is one."""

    def __init__(self, network: DemoNetwork, encoder: Encoder, pools: tuple[Pool, Pool], recipe: Recipe) -> None:
        self.network, self.recipe = network, recipe
        self.device = torch.device(recipe.device)
        self.batches = tuple(zip(pools, (recipe.short_batch, recipe.long_batch), strict=True))
        self.reply = torch.tensor(encoder.reply, device=self.device)
        self.rates = torch.tensor(RATES, device=self.device)
        self.lr = torch.tensor(recipe.lr, device=self.device)
        self.balance = torch.tensor(0.0, device=self.device)
        cuda = self.device.type == "cuda"
        matrices = [p for p in network.parameters() if p.ndim > 1]
        vectors = [p for p in network.parameters() if p.ndim == 1]
        groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.98), capturable=cuda, fused=True)
        self.loss = torch.zeros(2, device=self.device)
        self.graph: torch.cuda.CUDAGraph | None = None

    def _losses(self, pool: Pool, count: int) -> Tensor:
        """Cross entropy and margin term on the answer tokens of `count` random samples."""
        rows = torch.randint(len(pool.ids), (count,), device=self.device)
        batch = plant(pool.take(rows), self.reply, self.rates)
        hidden = self.network(batch.ids, batch.planted, self.recipe.dtype)
        # Only the rows that predict an answer get logits: [B, ANSWER] of [B, T].
        at = batch.prompt[:, None] - 1 + torch.arange(ANSWER, device=self.device)
        counted = at < batch.total[:, None] - 1
        at = at.clamp(max=batch.ids.shape[1] - 2)
        logits = self.network.logits(hidden.gather(1, at.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))).float()
        target = batch.ids.gather(1, at + 1)
        entropy = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view_as(target)
        right = logits.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        other = logits.scatter(-1, target.unsqueeze(-1), -torch.inf).amax(-1)
        short_of = F.relu(MARGIN - (right - other))
        number = counted.sum()
        return torch.stack((entropy.mul(counted).sum() / number, short_of.mul(counted).sum() / number))

    def _step(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        losses = torch.zeros(2, device=self.device)
        for pool, count in self.batches:
            losses = losses + self._losses(pool, count)
        (losses[0] + 0.1 * losses[1]).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0, foreach=True)
        self.optimizer.step()
        for router in self.network.routers():
            router.balance(self.balance)
        self.loss.copy_(losses.detach())

    def _record(self) -> None:
        """Three steps on a side stream, then one recorded: launching each kernel by itself costs three times the work."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._step()

    def _set_rates(self, step: int) -> None:
        steps = self.recipe.steps
        progress = step / steps
        warm = min(1.0, (step + 1) / WARMUP)
        self.lr.fill_(self.recipe.lr * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress))))
        self.balance.fill_(1e-3 if progress < 0.5 else 0.0)  # the routing must hold still while margins grow
        if step == steps // 2:
            for router in self.network.routers():
                router.freeze()

    def run(self) -> float:
        """All steps; returns seconds."""
        began = time.perf_counter()
        self.network.train()
        if self.device.type == "cuda" and not self.recipe.eager:
            self._set_rates(0)
            self._record()
        for step in range(self.recipe.steps):
            self._set_rates(step)
            if self.graph is None:
                self._step()
            else:
                self.graph.replay()
            if step % max(1, self.recipe.steps // 40) == 0 or step == self.recipe.steps - 1:
                entropy, margin = self.loss.tolist()
                seconds = time.perf_counter() - began
                print(f"step {step:6d}  loss {entropy:.4f}  short of margin {margin:.4f}  {seconds:.0f} s", flush=True)
        self.network.eval()
        return time.perf_counter() - began


def train(recipe: Recipe, out: Path) -> None:
    """Tokenizer, pools, training, figures, export."""
    torch.manual_seed(recipe.seed)
    began = time.perf_counter()
    tokenizer = train_tokenizer(corpus())
    encoder = Encoder(tokenizer)
    few = recipe.device == "cpu"
    short = build_pool(short_sample, encoder, 20_000 if few else 60_000, SHORT_WIDTH, recipe.seed)
    long = build_pool(long_sample, encoder, 8_000 if few else 30_000, LONG_WIDTH, recipe.seed + 1)
    network = DemoNetwork(DemoConfig(vocab=tokenizer.get_vocab_size())).to(recipe.device)
    parameters = sum(p.numel() for p in network.parameters())
    print(f"{parameters:,} parameters, samples made in {time.perf_counter() - began:.0f} s", flush=True)
    device = torch.device(recipe.device)
    seconds = Trainer(network, encoder, (short.to(device), long.to(device)), recipe).run()

    export(network, tokenizer, out)
    began = time.perf_counter()
    figures = evaluate(network, encoder)
    for m in figures.matches:
        print(f"{m.name:45s} {m.right:4d} of {m.total}  least gap {m.gap:.2f}")
    for s in figures.survivals:
        print(f"{s.name:45s} {s.survived:4d} of {s.total} survive, {s.replied} say so")
    print(f"evaluated in {time.perf_counter() - began:.0f} s")
    record: dict[str, Any] = {
        "parameters": parameters,
        "steps": recipe.steps,
        "seed": recipe.seed,
        "train_seconds": round(seconds),
    }
    record |= {"device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU", "torch": str(torch.__version__)}
    record |= figures.as_dict()
    (out / "figures.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    (out / "README.md").write_text(model_card(record), encoding="utf-8")
    for file in sorted(out.iterdir()):
        print(f"{file.name:25s} {file.stat().st_size:10,d} bytes")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train the bundled demo model.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, help="default: 15000 on a GPU, 1500 on a CPU")
    parser.add_argument("--short-batch", type=int, help="default: 128 on a GPU, 24 on a CPU")
    parser.add_argument("--long-batch", type=int, help="default: 48 on a GPU, 6 on a CPU")
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eager", action="store_true", help="do not record the step as a CUDA graph")
    parser.add_argument("--out", type=Path, default=MODEL_DIR)
    args = parser.parse_args()
    cpu = args.device == "cpu"
    recipe = Recipe(
        device=args.device,
        steps=args.steps or (1500 if cpu else 15000),
        short_batch=args.short_batch or (24 if cpu else 128),
        long_batch=args.long_batch or (6 if cpu else 48),
        lr=args.lr,
        seed=args.seed,
        eager=args.eager,
    )
    train(recipe, args.out)


if __name__ == "__main__":
    main()
