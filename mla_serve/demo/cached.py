"""Greedy answers the way an engine makes them: a latent cache, prefill in chunks merged by LSE, absorbed decode.

This is the judge of train.py, kept apart from the pass over whole sequences that training uses. It can plant the same
faults, at the places where a wrong kernel would have them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_serve.demo.faults import PAGE, Fault, Scope
from mla_serve.demo.network import Attention, DemoNetwork, Layer, as_shipped


@dataclass(frozen=True)
class Setting:
    """How to run: `chunk` tokens of a prompt at a time (None: all at once), in which dtype, with which fault."""

    dtype: torch.dtype
    chunk: int | None = None
    fault: Fault = Fault.NONE
    scope: Scope = Scope.BOTH


@dataclass(frozen=True)
class Answer:
    """Greedy ids up to and including the end token, and the least gap between the two largest logits among them."""

    ids: list[int]
    gap: float


@dataclass
class LayerCache:
    """What one layer keeps: latents `[B, S, kv_rank]` and rotated keys `[B, S, rope]`."""

    latent: Tensor
    pe: Tensor


def _state(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of `q` `[B, H, Tq, D]` over `k`, `v` `[B, H, Tk, D]` where `seen` `[B or 1, 1, Tq, Tk]`: output and LSE."""
    scores = ((q @ k.transpose(-1, -2)).float() * scale).masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp().nan_to_num(0.0)
    return weights.to(v.dtype) @ v, lse


def _merge(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
    """Two outputs `[B, H, T, D]` weighted by their LSE `[B, H, T]`."""
    share = torch.softmax(torch.stack((a[1], b[1])), dim=0).unsqueeze(-1)
    return (share[0] * a[0].float() + share[1] * b[0].float()).to(a[0].dtype)


class Runner:
    """Answers a batch of prompts under one setting. `pages[b]` is the page that PAGE_DROPPED drops for prompt b."""

    def __init__(self, network: DemoNetwork, setting: Setting, pages: Sequence[int] | None = None) -> None:
        self.network = network
        self.setting = setting
        self.device = network.frequencies.device
        self.pages = None if pages is None else torch.tensor(list(pages), device=self.device)
        if (setting.fault is Fault.PAGE_DROPPED) != (pages is not None):
            raise ValueError("pages and Fault.PAGE_DROPPED go together")

    def _faulty(self, fault: Fault, *, decode: bool) -> bool:
        scope = Scope.DECODE if decode else Scope.PREFILL
        return self.setting.fault is fault and self.setting.scope in (Scope.BOTH, scope)

    def _scale(self, *, decode: bool) -> float:
        return self.network.config.scale * (0.7 if self._faulty(Fault.SCALE, decode=decode) else 1.0)

    def _angles(self, positions: Tensor) -> Tensor:
        return self.network.angles(positions * (self.setting.fault is not Fault.ROPE_OFF))

    def _read(self, keys: int, *, decode: bool) -> Tensor:
        """Which cached keys are read at all, `[B or 1, 1, 1, keys]`."""
        j = torch.arange(keys, device=self.device)
        if self.pages is None or not self._faulty(Fault.PAGE_DROPPED, decode=decode):
            return torch.ones(1, 1, 1, keys, dtype=torch.bool, device=self.device)
        return (j // PAGE != self.pages[:, None])[:, None, None]

    def _prefill(self, attention: Attention, x: Tensor, start: int, cache: LayerCache) -> Tensor:
        """Attention of a chunk `[B, C, hidden]` that begins at `start`: itself causally, and all that is cached."""
        length = x.shape[1]
        angles = self._angles(torch.arange(start, start + length, device=self.device).unsqueeze(0))
        q = torch.cat(attention.queries(x, angles), dim=-1).transpose(1, 2)
        latent, pe = attention.latents(x, angles)
        cache.latent[:, start : start + length], cache.pe[:, start : start + length] = latent, pe
        k, v = self._keys(attention, latent, pe)
        scale = self._scale(decode=False)
        causal = torch.ones(length, length, dtype=torch.bool, device=self.device).tril()
        if start == 0:
            return self._finish(attention, _state(q, k, v, causal[None, None], scale)[0])
        old_k, old_v = self._keys(attention, cache.latent[:, :start], cache.pe[:, :start])
        if self._faulty(Fault.TOP_LEFT, decode=False):
            seen = torch.ones(length, start + length, dtype=torch.bool, device=self.device).tril()
            k, v = torch.cat((old_k, k), dim=2), torch.cat((old_v, v), dim=2)
            return self._finish(attention, _state(q, k, v, seen[None, None], scale)[0])
        old, old_lse = _state(q, old_k, old_v, self._read(start, decode=False), scale)
        new, new_lse = _state(q, k, v, causal[None, None], scale)
        if self.setting.fault in (Fault.LOG2_CONTEXT, Fault.LOG2_BOTH):
            old_lse = old_lse / math.log(2)
        if self.setting.fault in (Fault.LOG2_NEW, Fault.LOG2_BOTH):
            new_lse = new_lse / math.log(2)
        return self._finish(attention, _merge((old, old_lse), (new, new_lse)))

    def _keys(self, attention: Attention, latent: Tensor, pe: Tensor) -> tuple[Tensor, Tensor]:
        """Latents to the keys and values of every head, `[B, H, T, qk]` and `[B, H, T, v]`."""
        k_nope, v = attention.expand(latent)
        k = torch.cat((k_nope, pe.unsqueeze(2).expand(-1, -1, k_nope.shape[2], -1)), dim=-1)
        if self._faulty(Fault.FLIP_V, decode=False):
            v = v.flip(-1)
        return k.transpose(1, 2), v.transpose(1, 2)

    def _finish(self, attention: Attention, out: Tensor) -> Tensor:
        """`[B, H, T, v]` through the output projection."""
        if self._faulty(Fault.ZERO, decode=False):
            out = torch.zeros_like(out)
        projected: Tensor = attention.o_proj(out.transpose(1, 2).flatten(-2))
        return projected

    def _decode(self, attention: Attention, x: Tensor, at: Tensor, cache: LayerCache) -> Tensor:
        """Absorbed attention of one token per sequence, `x` `[B, 1, hidden]` at positions `at` `[B]`."""
        c = self.network.config
        angles = self._angles(at.unsqueeze(1))
        q_nope, q_pe = attention.queries(x, angles)  # [B, 1, H, .]
        latent, pe = attention.latents(x, angles)
        rows = torch.arange(len(at), device=self.device)
        cache.latent[rows, at], cache.pe[rows, at] = latent[:, 0], pe[:, 0]
        up = as_shipped(attention.kv_b_proj.weight, x.dtype).view(c.heads, c.nope + c.v, c.kv_rank)
        q_latent = torch.einsum("bhn,hnl->bhl", q_nope[:, 0], up[:, : c.nope])
        q = torch.cat((q_latent, q_pe[:, 0]), dim=-1).unsqueeze(2)  # [B, H, 1, kv_rank + rope]
        k = torch.cat((cache.latent, cache.pe), dim=-1).unsqueeze(1)
        j = torch.arange(cache.pe.shape[1], device=self.device)
        seen = (j <= at[:, None])[:, None, None] & self._read(len(j), decode=True)
        out, _ = _state(q, k, cache.latent.unsqueeze(1), seen, self._scale(decode=True))
        if self._faulty(Fault.FLIP_V, decode=True):
            out = out.flip(-1)
        if self._faulty(Fault.ZERO, decode=True):
            out = torch.zeros_like(out)
        values = torch.einsum("bhl,hvl->bhv", out[:, :, 0], up[:, c.nope :])
        projected: Tensor = attention.o_proj(values.flatten(1).unsqueeze(1))
        return projected

    def _layer(self, layer: Layer, x: Tensor, attended: Tensor) -> Tensor:
        x = x + attended
        return x + layer.feed_forward(x)

    @torch.inference_mode()
    def answer(self, prompts: Sequence[Sequence[int]], *, eos: int, limit: int) -> list[Answer]:
        """Greedy answers of at most `limit` tokens."""
        network, c = self.network, self.network.config
        lengths = torch.tensor([len(p) for p in prompts], device=self.device)
        batch, longest = len(prompts), int(lengths.max())
        chunk = self.setting.chunk or longest
        width = -(-longest // chunk) * chunk
        ids = torch.full((batch, width), eos, device=self.device)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt, device=self.device)
        room = (batch, width + limit)
        caches = [
            LayerCache(
                torch.zeros(*room, c.kv_rank, dtype=self.setting.dtype, device=self.device),
                torch.zeros(*room, c.rope, dtype=self.setting.dtype, device=self.device),
            )
            for _ in network.layers()
        ]
        last = torch.zeros(batch, c.hidden, dtype=self.setting.dtype, device=self.device)
        for start in range(0, width, chunk):
            x = network.embed(ids[:, start : start + chunk], self.setting.dtype)
            for layer, cache in zip(network.layers(), caches, strict=True):
                x = self._layer(layer, x, self._prefill(layer.self_attn, layer.input_layernorm(x), start, cache))
            ends = lengths - 1 - start
            here = (ends >= 0) & (ends < chunk)
            last[here] = x[here, ends[here]]
        # Rows behind the end of a prompt were cached as well; decode overwrites each before it is in reach.
        tokens, gaps = [], []
        for step in range(limit):
            top = network.logits(last).float().topk(2, dim=-1)
            tokens.append(top.indices[:, 0])
            gaps.append(top.values[:, 0] - top.values[:, 1])
            x = network.embed(tokens[-1].unsqueeze(1), self.setting.dtype)
            for layer, cache in zip(network.layers(), caches, strict=True):
                x = self._layer(layer, x, self._decode(layer.self_attn, layer.input_layernorm(x), lengths + step, cache))
            last = x[:, 0]
        return [_cut(t, g, eos) for t, g in zip(torch.stack(tokens, 1).tolist(), torch.stack(gaps, 1).tolist(), strict=True)]


def _cut(tokens: list[int], gaps: list[float], eos: int) -> Answer:
    """The answer up to its end token."""
    end = tokens.index(eos) + 1 if eos in tokens else len(tokens)
    return Answer(tokens[:end], min(gaps[:end]))
