"""What transformers computes for a checkpoint: greedy tokens, logits at every position, and how close its choices were."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.parity.checkpoints import VOCAB

PROMPTS = (1, 2, 17, 300, 700)
NEW_TOKENS = 12


def prompt(length: int) -> list[int]:
    """The token ids of the prompt of that length; special ids are left out."""
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()


@dataclass(frozen=True)
class Expected:
    """One prompt's continuation [NEW_TOKENS] and the logits [length + NEW_TOKENS - 1, vocab] that led through it."""

    tokens: list[int]
    logits: Tensor


@dataclass
class Margins:
    """The closest calls of a run. Rounding differs between kernels by some 1e-6; a choice closer than that is nobody's fault.

    `token`: the gap between the two largest logits where a token was picked. `expert`: the gap between the last chosen and the
    first rejected expert or group, over all layers and positions.
    """

    token: float = float("inf")
    expert: float = float("inf")
    hooks: list[torch.utils.hooks.RemovableHandle] = field(default_factory=list)

    def watch(self, model: PreTrainedModel) -> None:
        for module in model.modules():
            if type(module).__name__.endswith("TopkRouter"):
                self.hooks.append(module.register_forward_hook(self._see))

    def _see(self, router: torch.nn.Module, _: object, output: tuple[Tensor, Tensor, Tensor]) -> None:
        logits, k = output[0], router.top_k
        v3 = hasattr(router, "e_score_correction_bias")
        scores = logits.sigmoid() + router.e_score_correction_bias if v3 else logits.softmax(-1)
        groups = router.num_group or 1
        if groups > 1 and (v3 or router.topk_method != "greedy"):
            grouped = scores.view(scores.shape[0], groups, -1)
            of_group = grouped.topk(2, -1).values.sum(-1) if v3 else grouped.amax(-1)
            best = of_group.topk(router.topk_group + 1, -1)
            self._closest(best.values[:, -2] - best.values[:, -1])
            chosen = torch.zeros_like(of_group).scatter_(1, best.indices[:, :-1], 1).bool()
            scores = grouped.masked_fill(~chosen.unsqueeze(-1), float("-inf")).flatten(1)
        best = scores.topk(k + 1, -1).values
        self._closest(best[:, -2] - best[:, -1])

    def _closest(self, gaps: Tensor) -> None:
        self.expert = min(self.expert, gaps.min().item())


@torch.no_grad()
def expect(model: PreTrainedModel, lengths: tuple[int, ...] = PROMPTS) -> tuple[dict[int, Expected], Margins]:
    """Greedy continuations by `generate`, then every logit in one plain forward pass over prompt and continuation."""
    margins = Margins()
    results = {}
    for length in lengths:
        ids = torch.tensor([prompt(length)])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            eos_token_id=None,
            pad_token_id=2,
        )
        margins.watch(model)
        logits = model(out[:, :-1]).logits[0]
        for hook in margins.hooks:
            hook.remove()
        best = logits[length - 1 :].topk(2, -1).values
        margins.token = min(margins.token, (best[:, 0] - best[:, 1]).min().item())
        results[length] = Expected(out[0, length:].tolist(), logits)
    return results, margins
