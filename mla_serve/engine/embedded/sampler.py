"""From logits to tokens: all rows of a step at once, each by its own request's settings.

A request's randomness is one number per position, a pure function of its seed and of how many tokens it has generated. So its
tokens depend neither on its batch mates nor on being preempted half-way and computed again.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from collections.abc import Sequence as Rows
from hashlib import blake2b
from types import MappingProxyType

import torch
from torch import Tensor

from mla_serve.engine.base import TokenLogprobs
from mla_serve.engine.embedded.penalties import adjust, asks
from mla_serve.engine.embedded.sequence import Sampled, Sequence

SHORTLIST = 1024  # tokens sorted for top-k and top-p before the whole vocabulary is
AT_ONCE = 256  # rows whose log-probabilities are computed together: a prompt's may be thousands
NO_MASKS: Mapping[Sequence, Tensor] = MappingProxyType({})


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 52 random bits for a 64-bit seed (signed or unsigned) and a position."""
    digest = blake2b(struct.pack("<QQ", seed % 2**64, position), digest_size=8).digest()
    return float((int.from_bytes(digest, "little") >> 12) * 2.0**-52)


@torch.inference_mode()
def sample(logits: Tensor, seqs: Rows[Sequence], masks: Mapping[Sequence, Tensor] = NO_MASKS) -> list[Sampled | None]:
    """Picks one token per row of `logits` [rows, vocab] (float32), row i for `seqs[i]`; `masks` as `penalties.adjust` has them.

    None for a row that holds NaN or has no finite maximum. Temperature 0 takes the likeliest token, the lowest id among equals,
    once grammar, biases and penalties are applied. Log-probabilities are those of the model itself, before all of that, as
    vLLM tells them unless asked otherwise ("raw_logprobs"); the chosen token's own may so be lower than every one told.
    """
    if not seqs:
        return []
    chooser, top = logits, logits.max(dim=-1).values
    sound = torch.isfinite(top)
    asking = [i for i, seq in enumerate(seqs) if asks(seq, masks)]
    if asking:
        chooser = logits.clone()
        chooser[asking] = adjust(logits[asking], [seqs[i] for i in asking], masks)
        top = chooser.max(dim=-1).values
        sound &= torch.isfinite(top)
    tokens, fit = chooser.argmax(dim=-1), sound.tolist()
    drawn = [i for i, seq in enumerate(seqs) if fit[i] and seq.request.sampling.temperature > 0]
    if drawn:
        tokens[drawn] = _draw(chooser[drawn] - top[drawn, None], [seqs[i] for i in drawn])
    told = [i for i, seq in enumerate(seqs) if fit[i] and seq.request.sampling.logprobs is not None]
    logprobs: dict[int, TokenLogprobs] = {}
    if told:
        counts = [seqs[i].request.sampling.logprobs or 0 for i in told]
        logprobs = dict(zip(told, describe(logits[told], tokens[told], counts), strict=True))
    return [Sampled(token, logprobs.get(i)) if fit[i] else None for i, token in enumerate(tokens.tolist())]


def _draw(logits: Tensor, seqs: Rows[Sequence]) -> Tensor:
    """Token ids [rows] drawn from `logits` [rows, vocab], whose row maxima are 0, by inverting the cumulative distribution.

    The order is temperature, min-p, top-k, top-p. The sum runs in float64 and in the order of token ids, so that a logit's
    rounding moves the bounds between tokens by as little.
    """
    settings = [seq.request.sampling for seq in seqs]
    temperature = torch.tensor([s.temperature for s in settings], dtype=torch.float64, device=logits.device)
    probs = torch.softmax(logits.double() / temperature[:, None], dim=-1)
    floored = [i for i, s in enumerate(settings) if s.min_p > 0]
    if floored:
        some = probs[floored]
        least = torch.tensor([settings[i].min_p for i in floored], dtype=torch.float64, device=logits.device)[:, None]
        # What is left need not sum to 1: the cuts below and the draw go by shares of its sum.
        probs[floored] = some.masked_fill(some < least * some.amax(dim=-1, keepdim=True), 0.0)
    cut = [i for i, s in enumerate(settings) if s.top_p < 1 or 0 < s.top_k < logits.shape[-1]]
    if cut:
        probs[cut] = _truncate(probs[cut], [settings[i].top_k for i in cut], [settings[i].top_p for i in cut])
    cdf = probs.cumsum(dim=-1)
    draws = [uniform(seq.seed, seq.num_generated) for seq in seqs]
    target = torch.tensor(draws, dtype=torch.float64, device=logits.device) * cdf[:, -1]
    # The first token whose cumulative probability is over the target: never one of probability 0.
    return torch.searchsorted(cdf, target[:, None], right=True)[:, 0]


def _truncate(probs: Tensor, top_k: Rows[int], top_p: Rows[float], shortlist: int = SHORTLIST) -> Tensor:
    """Zeroes what lies outside each row's top-k, then outside the nucleus of the rest; the token that crosses p is inside.

    Among equals the lowest id ranks first. Only the `shortlist` likeliest tokens are sorted, and everything only for the rows
    that this cannot settle: sorting a vocabulary of 100,000 takes tens of milliseconds.
    """
    vocab = probs.shape[-1]
    ids = probs.topk(min(shortlist, vocab), dim=-1).indices.sort(dim=-1).values
    ranked, order = probs.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(-1, order)
    k = torch.tensor([k or vocab for k in top_k], device=probs.device)[:, None]
    p = torch.tensor(top_p, dtype=torch.float64, device=probs.device)[:, None]
    in_k = torch.arange(ranked.shape[-1], device=probs.device) < k
    total = torch.where(k < vocab, (ranked * in_k).sum(dim=-1, keepdim=True), probs.sum(dim=-1, keepdim=True))
    before = ranked.cumsum(dim=-1) - ranked
    # p = 1 cuts nothing, also where rounding lets the sum reach 1 early; the likeliest stays, also where p * total rounds to 0.
    keep = in_k & ((before < p * total) | (p >= 1) | (before == 0))
    kept = torch.zeros_like(probs).scatter_(-1, ids, ranked * keep)
    if ranked.shape[-1] < vocab:
        # Unsettled: the cut may lie beyond the shortlist, or among equals of which the shortlist holds only some.
        open_rows = (keep & (ranked == ranked[:, -1:])).any(dim=-1) | ((k > ranked.shape[-1]) & (k < vocab))[:, 0]
        rows = open_rows.nonzero()[:, 0].tolist()
        if rows:
            kept[rows] = _truncate(probs[rows], [top_k[i] for i in rows], [top_p[i] for i in rows], shortlist=vocab)
    return kept


@torch.inference_mode()
def describe(logits: Tensor, tokens: Tensor, counts: Rows[int]) -> list[TokenLogprobs]:
    """Log-probabilities under `logits` [rows, vocab] of `tokens` [rows] int64 and of each row's `counts` likeliest tokens."""
    out: list[TokenLogprobs] = []
    for start in range(0, len(counts), AT_ONCE):
        some = slice(start, start + AT_ONCE)
        scores = torch.log_softmax(logits[some], dim=-1)
        chosen = scores.gather(-1, tokens[some, None])[:, 0].tolist()
        values, ids = scores.topk(max(counts[some]), dim=-1)
        rows = zip(chosen, values.tolist(), ids.tolist(), counts[some], strict=True)
        out += [TokenLogprobs(_finite(mine), _ranked(ids_, values_)[:n]) for mine, values_, ids_, n in rows]
    return out


def _ranked(ids: Rows[int], values: Rows[float]) -> list[tuple[int, float]]:
    """By falling value; topk promises no order among equals, and the lowest id first agrees with the greedy choice."""
    return sorted(zip(ids, map(_finite, values), strict=True), key=lambda pair: (-pair[1], pair[0]))


def _finite(logprob: float) -> float:
    """JSON knows no infinity: a token that a model rules out gets the lowest number that float32 holds."""
    return logprob if math.isfinite(logprob) else torch.finfo(torch.float32).min
