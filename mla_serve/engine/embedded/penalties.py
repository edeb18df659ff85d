"""What a request does to its logits before a token is picked: its grammar, biases, penalties, and ends that come too early.

Only the rows that ask for any of it are copied and changed; all of them at once, each by its own settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_serve.engine.base import Sampling
from mla_serve.engine.embedded.sequence import Sequence

__all__ = ["Tally", "adjust", "asks"]

LEAST_REPETITION = 1e-6  # dividing a logit by less could overflow, and the request would fail


@dataclass(slots=True)
class Tally:
    """How often a sequence has generated each token, and which it holds at all. Kept with it, so that a step adds one token."""

    generated: Tensor  # [vocab] float32
    present: Tensor  # [vocab] bool, prompt included
    counted: int = 0  # leading tokens of the sequence taken in

    def follow(self, seq: Sequence) -> Tally:
        """Takes in what `seq` has gained since the last call."""
        fresh = torch.tensor(seq.token_ids[self.counted :], dtype=torch.int64)
        split = max(0, seq.num_prompt - self.counted)
        fresh = fresh.to(self.present.device)
        self.present[fresh] = True
        mine = fresh[split:]
        self.generated.index_add_(0, mine, torch.ones_like(mine, dtype=torch.float32))
        self.counted = len(seq.token_ids)
        return self


def asks(seq: Sequence, masks: Mapping[Sequence, Tensor]) -> bool:
    """Whether anything of this module concerns the sequence's next token."""
    s = seq.request.sampling
    return seq in masks or bool(s.logit_bias) or _penalised(s) or bool(_too_early(seq))


@torch.inference_mode()
def adjust(logits: Tensor, seqs: Rows[Sequence], masks: Mapping[Sequence, Tensor]) -> Tensor:
    """`logits` [rows, vocab] float32, row i for `seqs[i]`, changed in place in the order that `Sampling` states, and returned.

    `masks` has a grammar's bits for those that have one: int32 [vocab / 32, rounded up], bit i of word j for token 32 j + i, 1
    where the token fits. A token that does not fit has a logit of -inf from then on. Tokens that end a request are ruled out
    before `min_tokens`, unless the grammar leaves nothing else: its end is final.
    """
    _mask(logits, seqs, masks)
    _bias(logits, seqs)
    _penalise(logits, seqs)
    _rule_out_ends(logits, seqs)
    return logits


def _mask(out: Tensor, seqs: Rows[Sequence], masks: Mapping[Sequence, Tensor]) -> None:
    rows = [i for i, seq in enumerate(seqs) if seq in masks]
    if not rows:
        return
    packed = torch.stack([masks[seqs[i]] for i in rows]).view(torch.uint8).to(out.device, non_blocking=True)
    bits = torch.arange(8, dtype=torch.uint8, device=out.device)
    fits = (packed[:, :, None] >> bits & 1).bool().flatten(1)[:, : out.shape[-1]]  # [rows, vocab]
    out[rows] = out[rows].masked_fill_(~fits, -torch.inf)


def _bias(out: Tensor, seqs: Rows[Sequence]) -> None:
    entries = [(i, token, value) for i, seq in enumerate(seqs) for token, value in seq.request.sampling.logit_bias]
    if entries:
        rows, tokens, values = zip(*entries, strict=True)
        out.index_put_((_ids(rows, out), _ids(tokens, out)), torch.tensor(values, device=out.device), accumulate=True)


def _penalise(out: Tensor, seqs: Rows[Sequence]) -> None:
    rows = [i for i, seq in enumerate(seqs) if _penalised(seq.request.sampling)]
    if not rows:
        return
    asked = [seqs[i].request.sampling for i in rows]
    tallies = [_tally(seqs[i], out).follow(seqs[i]) for i in rows]
    generated = torch.stack([tally.generated for tally in tallies])
    present = torch.stack([tally.present for tally in tallies])
    repetition, frequency, presence = (
        torch.tensor([getattr(s, name) for s in asked], dtype=torch.float32, device=out.device)[:, None]
        for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")
    )
    repetition = repetition.clamp(min=LEAST_REPETITION)
    chosen = out[rows]
    chosen = torch.where(present, torch.where(chosen > 0, chosen / repetition, chosen * repetition), chosen)
    out[rows] = chosen - frequency * generated - presence * (generated > 0)


def _rule_out_ends(out: Tensor, seqs: Rows[Sequence]) -> None:
    entries = [(i, token) for i, seq in enumerate(seqs) for token in _too_early(seq)]
    if not entries:
        return
    rows, tokens = (_ids(column, out) for column in zip(*entries, strict=True))
    before = out[rows, tokens]
    out[rows, tokens] = -torch.inf
    stuck = (out.amax(dim=-1) == -torch.inf)[rows]
    out[rows[stuck], tokens[stuck]] = before[stuck]


def _penalised(s: Sampling) -> bool:
    return s.repetition_penalty != 1 or s.frequency_penalty != 0 or s.presence_penalty != 0


def _too_early(seq: Sequence) -> tuple[int, ...]:
    """Token ids that would end the request, while it is not to end."""
    s = seq.request.sampling
    return () if seq.num_generated >= s.min_tokens else tuple({*s.stop_token_ids, *seq.end_token_ids})


def _tally(seq: Sequence, like: Tensor) -> Tally:
    if seq.tally is None:
        vocab = like.shape[-1]
        seq.tally = Tally(
            torch.zeros(vocab, dtype=torch.float32, device=like.device),
            torch.zeros(vocab, dtype=torch.bool, device=like.device),
        )
    return seq.tally


def _ids(values: Iterable[int], like: Tensor) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64, device=like.device)
