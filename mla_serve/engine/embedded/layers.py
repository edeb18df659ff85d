"""The plain parts of a transformer layer: projection, norm, gated MLP. Weights only, no gradients, no modules."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

__all__ = ["MLP", "Linear", "Norm", "gated"]


@dataclass(frozen=True, slots=True)
class Linear:
    """x W^T + b, with W [out, in]."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, in] to [tokens, out]."""
        return F.linear(x, self.weight, self.bias)

    def add_to(self, total: Tensor, x: Tensor) -> None:
        """total += x W^T + b, in place: the residual stream is never copied."""
        total.addmm_(x, self.weight.t())
        if self.bias is not None:
            total.add_(self.bias)


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm (arXiv 1910.07467)."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def gated(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, of [rows, 2 * width] with the gate first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


@dataclass(frozen=True, slots=True)
class MLP:
    """down(silu(gate(x)) * up(x)), gate and up stacked in one weight."""

    gate_up: Linear
    down: Linear

    def add_to(self, total: Tensor, x: Tensor) -> None:
        """total += mlp(x), in place."""
        self.down.add_to(total, gated(self.gate_up(x)))
