"""The least time a call could take on this device: its arithmetic and its memory traffic at rates measured here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch

from mla_serve.backends.base import torch_dtype
from mla_serve.shapes import AttentionShape


def flops(shape: AttentionShape) -> float:
    """Floating-point operations of both matrix products (2 per multiply-add), masked-out pairs left out."""
    pairs = float(shape.q_len * shape.kv_len)
    if shape.causal:  # bottom-right: query i of Sq sees Sk - Sq + i + 1 keys
        pairs -= shape.q_len * (shape.q_len - 1) / 2
    return 2.0 * shape.batch * shape.heads * pairs * (shape.qk + shape.v)


def traffic(shape: AttentionShape) -> float:
    """Bytes read and written at least once: queries, keys, values or latents, output."""
    size = torch_dtype(shape.dtype).itemsize
    cached = torch_dtype(shape.cache_dtype).itemsize if shape.cache_dtype else size
    query = shape.q_len * shape.heads * (shape.qk + shape.v) * size
    keys = shape.kv_len * (shape.qk * cached if shape.absorbed else shape.heads * (shape.qk + shape.v) * size)
    return float(shape.batch * (query + keys))


@dataclass(slots=True)
class Rates:
    """Rates of one device, measured when first needed: FLOP per ms of a large matrix product, bytes per ms of a large copy."""

    device: torch.device
    arithmetic: dict[str, float]
    memory: float = 0.0

    @classmethod
    def of(cls, device: torch.device) -> Rates:
        return cls(device, {})

    def floor_ms(self, shape: AttentionShape) -> float:
        """Milliseconds: the larger of arithmetic and traffic. A float8 cache still multiplies in the query's dtype."""
        large = 4096 if self.device.type == "cuda" else 768
        if shape.dtype not in self.arithmetic:
            a = torch.ones(large, large, dtype=torch_dtype(shape.dtype), device=self.device)
            self.arithmetic[shape.dtype] = 2.0 * large**3 / self._best(lambda: a @ a)
        if not self.memory:
            block = torch.zeros((1 << 30 if self.device.type == "cuda" else 1 << 26), dtype=torch.int8, device=self.device)
            target = torch.empty_like(block)
            self.memory = 2.0 * block.numel() / self._best(lambda: target.copy_(block))
        return max(flops(shape) / self.arithmetic[shape.dtype], traffic(shape) / self.memory)

    def _best(self, call: Callable[[], object], times: int = 5) -> float:
        """Milliseconds of the fastest of a few calls."""
        best = float("inf")
        for _ in range(times):
            self._wait()
            start = perf_counter()
            call()
            self._wait()
            best = min(best, (perf_counter() - start) * 1e3)
        return best

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
