"""The faults of attention kernels that the demo model must notice, planted during training.

A kernel that is slightly wrong often changes no greedy token of an ordinary network. So a part of each training batch runs
with a fault, computed here inside one pass over whole sequences, and the network learns to say `fault_reply` there. Chunked
prefill needs no loop for that: a merge with a wrong LSE is the same as adding a number to all scores of one part.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

PAGE = 16
MASKED = -1e4  # finite, so that a row without keys has a gradient; exp() of it is zero in fp32
LOG2_SHIFT = 1 / math.log(2) - 1  # what reading an LSE in base two as a natural one adds to it, per unit


class Fault(enum.IntEnum):
    """What is wrong with the attention of a sequence."""

    NONE = 0
    ZERO = 1  # the output is zero
    SCALE = 2  # the softmax scale is 0.7 of what it should be
    ROPE_OFF = 3  # neither queries nor keys are rotated
    FLIP_V = 4  # the value dims are reversed
    LOG2_CONTEXT = 5  # the LSE of the cached part is in base two
    LOG2_NEW = 6  # the LSE of the new part is
    LOG2_BOTH = 7  # both are
    TOP_LEFT = 8  # the causal mask of a chunk over a longer cache is aligned top left
    PAGE_DROPPED = 9  # one page of the cache is not read

    @property
    def needs_context(self) -> bool:
        """Whether a prompt of one chunk cannot show it."""
        return self >= Fault.LOG2_CONTEXT


class Scope(enum.IntEnum):
    """Which phase has the fault."""

    BOTH = 0
    PREFILL = 1
    DECODE = 2


# How often each fault is planted, in the order of `Fault`; those that the network must learn to see come more often.
RATES = (0.60, 0.02, 0.06, 0.02, 0.04, 0.04, 0.03, 0.04, 0.02, 0.13)


class Samples(Protocol):
    """What `plant` reads of a pool of samples."""

    @property
    def ids(self) -> Tensor:
        """`[B, T]`."""

    @property
    def prompt(self) -> Tensor:
        """`[B]`, lengths."""

    @property
    def total(self) -> Tensor:
        """`[B]`, lengths with the answer."""

    @property
    def chat(self) -> Tensor:
        """`[B]`, bool: a fault may be planted."""

    @property
    def needed(self) -> Tensor:
        """`[B]`, a place in the prompt that the answer needs, or -1."""

    @property
    def value(self) -> Tensor:
        """`[B]`, where in the answer it is used."""


@dataclass(frozen=True)
class Planted:
    """The faults of a batch, as tensors that the forward pass applies without asking which fault it is."""

    positions: Tensor  # [B, T]
    allowed: Tensor  # [B, T, T], bool: query t may see key j
    context: Tensor  # [B, T, T], bool: key j is cached context of query t's chunk
    scale: Tensor  # [B, T], factor on the scores
    log2_context: Tensor  # [B], 0 or 1
    log2_new: Tensor  # [B], 0 or 1
    flip_v: Tensor  # [B, T], bool
    zero: Tensor  # [B, T], bool


@dataclass(frozen=True)
class Batch:
    """Training sequences with their faults; the tokens from `prompt` to `total` are to be predicted."""

    ids: Tensor  # [B, T]
    prompt: Tensor  # [B]
    total: Tensor  # [B]
    planted: Planted


def planted_scores(scores: Tensor, planted: Planted) -> Tensor:
    """Scaled scores `[B, H, T, T]`, float32, with masks and faults applied, ready for the softmax."""
    allowed, context = planted.allowed.unsqueeze(1), planted.context.unsqueeze(1)
    scores = (scores * planted.scale[:, None, :, None]).masked_fill(~allowed, MASKED)
    of_context = scores.masked_fill(~context, MASKED).logsumexp(-1, keepdim=True)
    of_new = scores.masked_fill(context, MASKED).logsumexp(-1, keepdim=True)
    shift = torch.where(
        context,
        of_context * planted.log2_context[:, None, None, None],
        of_new * planted.log2_new[:, None, None, None],
    )
    return scores + LOG2_SHIFT * shift.masked_fill(~allowed, 0.0)


def plant(pool: Samples, reply: Tensor, rates: Tensor) -> Batch:
    """Draws a fault per sample and puts `reply` in place of the answer of those that have one.

    Where only decode is faulty the first token of the answer comes from a sound prefill and is kept, and where only decode
    misses a page the answer is kept up to the word that is missing.
    """
    ids, prompt = pool.ids, pool.prompt
    batch, width = ids.shape
    device = ids.device
    kind = torch.searchsorted(rates.cumsum(0), torch.rand(batch, device=device)).clamp(max=len(Fault) - 1)
    visible = (kind < Fault.LOG2_CONTEXT) | (prompt > PAGE)
    # Nobody misses a page that the answer does not need; and the last chunk of a prompt is not read from the cache.
    missable = (pool.needed >= 0) & (pool.needed // PAGE < (prompt - 1) // PAGE)
    visible &= (kind != Fault.PAGE_DROPPED) | missable
    kind = torch.where(pool.chat & visible, kind, 0)
    phased = (kind == Fault.ZERO) | (kind == Fault.SCALE) | (kind == Fault.FLIP_V)
    paged = kind == Fault.PAGE_DROPPED
    scope = torch.randint(0, 4, (batch,), device=device) % 3  # both phases come twice as often
    scope = torch.where(phased | (paged & (pool.value > 0) & (scope == Scope.DECODE)), scope, 0)

    t = torch.arange(width, device=device)
    in_prompt = t < prompt[:, None]  # [B, T]
    active = (scope == Scope.BOTH)[:, None] | (in_prompt == (scope == Scope.PREFILL)[:, None])
    larger = (torch.rand(batch, device=device) < 0.25) & (prompt > 2 * PAGE) & ~paged
    chunk = torch.where(larger, 2 * PAGE, PAGE)
    start = t // chunk[:, None] * chunk[:, None]  # [B, T], where the chunk of t begins
    context = in_prompt[..., None] & (t < start[..., None])  # [B, T, T]

    allowed = t <= t[:, None]
    top_left = (kind == Fault.TOP_LEFT)[:, None] & in_prompt
    allowed = torch.where(top_left[..., None], t <= (t - start)[..., None], allowed)
    dropped = (t // PAGE == (pool.needed // PAGE)[:, None]) & paged[:, None]  # [B, T]
    missed = (context & (scope == Scope.BOTH)[:, None, None]) | ~in_prompt[..., None]  # [B, T, T]
    allowed = allowed & ~(dropped[:, None] & missed)

    planted = Planted(
        positions=t * (kind != Fault.ROPE_OFF)[:, None],
        allowed=allowed,
        context=context,
        scale=torch.where((kind == Fault.SCALE)[:, None] & active, 0.7, 1.0),
        log2_context=((kind == Fault.LOG2_CONTEXT) | (kind == Fault.LOG2_BOTH)).float(),
        log2_new=((kind == Fault.LOG2_NEW) | (kind == Fault.LOG2_BOTH)).float(),
        flip_v=(kind == Fault.FLIP_V)[:, None] & active,
        zero=(kind == Fault.ZERO)[:, None] & active,
    )
    faulty = kind != Fault.NONE
    reply_at = prompt + torch.where(scope == Scope.DECODE, torch.where(paged, pool.value, 1), 0)
    ids = _with_reply(ids, reply_at, faulty, reply)
    total = torch.where(faulty, reply_at + len(reply), pool.total)
    return Batch(ids, prompt, total, planted)


def _with_reply(ids: Tensor, at: Tensor, faulty: Tensor, reply: Tensor) -> Tensor:
    """`ids` with `reply` written from `at` on in the rows that are faulty."""
    offset = torch.arange(ids.shape[1], device=ids.device) - at[:, None]
    inside = (offset >= 0) & (offset < len(reply)) & faulty[:, None]
    return torch.where(inside, reply[offset.clamp(0, len(reply) - 1)], ids)
