"""Mixture of experts: routing as DeepSeek-V2 and V3 define it, and the experts' MLPs over tokens sorted by expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mla_serve.engine.embedded.config import MoEConfig
from mla_serve.engine.embedded.layers import MLP, gated

__all__ = ["MoE", "Router"]


@dataclass(frozen=True, slots=True)
class Router:
    """Chooses experts per token, in float32.

    `greedy`: the best scores (DeepSeek-V2-Lite). `group_limited_greedy`: the best within the groups whose best score is highest
    (DeepSeek-V2, arXiv 2405.04434, section 2.2.2). `noaux_tc`: scores plus `bias` choose, groups by the sum of their best two,
    the scores alone weigh (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
    """

    config: MoEConfig
    weight: Tensor  # [experts, hidden] float32
    bias: Tensor | None  # [experts] float32, noaux_tc only

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [tokens, hidden] to weights [tokens, top_k] float32 and expert ids [tokens, top_k] int64."""
        c = self.config
        logits = F.linear(x.float(), self.weight)
        scores = logits.sigmoid() if c.scoring == "sigmoid" else logits.softmax(-1)
        choice = scores if self.bias is None else scores + self.bias
        if c.top_groups < c.groups:
            choice = self._within_groups(choice)
        ids = choice.topk(c.top_k, dim=-1, sorted=False).indices
        weights = scores.gather(1, ids)
        if c.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights.mul_(c.scaling) if c.scaling != 1.0 else weights, ids

    def _within_groups(self, choice: Tensor) -> Tensor:
        """Experts outside the chosen groups get -inf."""
        c = self.config
        grouped = choice.view(choice.shape[0], c.groups, -1)
        counted = min(2 if c.method == "noaux_tc" else 1, grouped.shape[-1])
        best = grouped.topk(counted, dim=-1).values.sum(-1).topk(c.top_groups, dim=-1, sorted=False).indices
        outside = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, False)
        return grouped.masked_fill(outside.unsqueeze(-1), float("-inf")).flatten(1)


@dataclass(frozen=True, slots=True)
class MoE:
    """Routed experts, stacked, and the shared ones as one MLP."""

    router: Router
    gate_up: Tensor  # [experts, 2 * width, hidden]
    down: Tensor  # [experts, hidden, width]
    shared: MLP | None

    def add_to(self, total: Tensor, x: Tensor) -> None:
        """total += moe(x), in place.

        Each expert sees its rows as one slice, so its weights are read once. The sum over a token's experts has a
        fixed order, so the result does not depend on threads or atomics.
        """
        weights, ids = self.router(x)
        top_k = ids.shape[1]
        order = ids.flatten().argsort(stable=True)
        counts = ids.new_zeros(self.gate_up.shape[0]).index_add_(0, ids.flatten(), torch.ones_like(order))
        rows = self._experts(x.index_select(0, order // top_k), counts)  # [tokens * top_k, hidden], by expert
        back = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
        by_token = rows.index_select(0, back).view(-1, top_k, x.shape[1])  # [tokens, top_k, hidden]
        if x.dtype is torch.float32:
            total.add_(torch.bmm(weights.unsqueeze(1), by_token).squeeze(1))
        else:  # the products and their sum in float32, rounded once
            total.add_((by_token * weights.unsqueeze(2)).sum(1))
        if self.shared is not None:
            self.shared.add_to(total, x)

    def _experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Each expert's MLP over its run of `rows`, `counts` [experts] long. May overwrite `rows`."""
        if rows.is_cuda and rows.dtype is torch.bfloat16 and rows.shape[1] % 8 == 0 and self.down.shape[2] % 8 == 0:
            ends = counts.cumsum(0).int()  # stays on the device: the host does not wait
            hidden = F.grouped_mm(rows, self.gate_up.transpose(1, 2), offs=ends)
            return F.grouped_mm(gated(hidden), self.down.transpose(1, 2), offs=ends)
        spans, start = [], 0
        for expert, count in enumerate(counts.tolist()):
            if count:
                spans.append((expert, slice(start, start + count)))
            start += count
        hidden = rows.new_empty(rows.shape[0], self.gate_up.shape[1])
        for expert, span in spans:
            torch.mm(rows[span], self.gate_up[expert].t(), out=hidden[span])
        inner = gated(hidden)
        for expert, span in spans:
            torch.mm(inner[span], self.down[expert].t(), out=rows[span])
        return rows
