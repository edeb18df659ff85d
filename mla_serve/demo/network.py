"""The demo's network in plain torch: DeepSeek-V3's layers, small, with parameters named as Hugging Face names them.

Multi-head latent attention is that of DeepSeek-V2 (arXiv:2405.04434, section 2.1), the router that of DeepSeek-V3
(arXiv:2412.19437, section 2.1.2), the rotary stretch YaRN (arXiv:2309.00071).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mla_serve.demo.faults import Planted, planted_scores


@dataclass(frozen=True)
class DemoConfig:
    """Sizes of the network; the attention dims are DeepSeek-V3's own."""

    vocab: int = 1280
    hidden: int = 256
    layers: int = 3
    dense_layers: int = 1
    heads: int = 4
    q_rank: int = 128
    kv_rank: int = 512
    nope: int = 128
    rope: int = 64
    v: int = 128
    intermediate: int = 512
    expert: int = 64
    experts: int = 8
    experts_per_token: int = 2
    groups: int = 2
    groups_per_token: int = 1
    routed_scaling: float = 2.5
    eps: float = 1e-6
    theta: float = 10000.0
    yarn_factor: float = 40.0
    yarn_original: int = 512
    yarn_fast: float = 32.0
    yarn_slow: float = 1.0

    @property
    def qk(self) -> int:
        """Width of a query or key in the un-absorbed form."""
        return self.nope + self.rope

    @property
    def scale(self) -> float:
        """Softmax scale: `(nope + rope) ** -0.5 * mscale ** 2`, 0.135234 here."""
        mscale = 0.1 * math.log(self.yarn_factor) + 1.0
        return float(self.qk**-0.5 * mscale**2)


def yarn_frequencies(config: DemoConfig) -> Tensor:
    """Angle per position of each rotary pair, `[rope / 2]`: YaRN's blend of stretched and unstretched frequencies."""
    dim, base = config.rope, config.theta
    plain = base ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)

    def pair_turning(rotations: float) -> float:
        return dim * math.log(config.yarn_original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(pair_turning(config.yarn_fast)), 0)
    high = min(math.ceil(pair_turning(config.yarn_slow)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain / config.yarn_factor * ramp + plain * (1 - ramp)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turns interleaved pairs of `x` `[..., rope]` by `angles` `[..., rope / 2]`; the result has the pairs' halves apart.

    Queries and keys get the same new order, so scores are those of in-place rotation.
    """
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat((even * cos - odd * sin, odd * cos + even * sin), dim=-1)


def as_shipped(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight as the bf16 file will hold it, in `dtype`: training sees the rounding, the gradient passes through."""
    return weight.to(torch.bfloat16).to(dtype)


class Linear(nn.Linear):
    """A linear layer without bias that computes in the dtype of its input."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., inputs]` to `[..., outputs]`."""
        return F.linear(x, as_shipped(self.weight, x.dtype))


class RMSNorm(nn.Module):
    """Root-mean-square norm, in fp32 inside."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """`[..., width]` to the same."""
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return as_shipped(self.weight, x.dtype) * y.to(x.dtype)


class Attention(nn.Module):
    """Multi-head latent attention. `forward` is the un-absorbed form over whole sequences, for training."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        c = self.config = config
        self.q_a_proj = Linear(c.hidden, c.q_rank)
        self.q_a_layernorm = RMSNorm(c.q_rank, c.eps)
        self.q_b_proj = Linear(c.q_rank, c.heads * c.qk)
        self.kv_a_proj_with_mqa = Linear(c.hidden, c.kv_rank + c.rope)
        self.kv_a_layernorm = RMSNorm(c.kv_rank, c.eps)
        self.kv_b_proj = Linear(c.kv_rank, c.heads * (c.nope + c.v))
        self.o_proj = Linear(c.heads * c.v, c.hidden)

    def queries(self, x: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        """`x` `[B, T, hidden]`, `angles` `[B, T, rope / 2]` to `q_nope` `[B, T, H, nope]` and `q_pe` `[B, T, H, rope]`."""
        c = self.config
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).unflatten(-1, (c.heads, c.qk))
        nope, pe = q.split([c.nope, c.rope], dim=-1)
        return nope, rotate(pe, angles.unsqueeze(-2))

    def latents(self, x: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        """What a cache would keep: latent `[B, T, kv_rank]` and rotated key `[B, T, rope]`."""
        c = self.config
        latent, pe = self.kv_a_proj_with_mqa(x).split([c.kv_rank, c.rope], dim=-1)
        return self.kv_a_layernorm(latent), rotate(pe, angles)

    def expand(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Latent `[B, T, kv_rank]` to `k_nope` `[B, T, H, nope]` and `v` `[B, T, H, v]`."""
        c = self.config
        kv = self.kv_b_proj(latent).unflatten(-1, (c.heads, c.nope + c.v))
        k_nope, v = kv.split([c.nope, c.v], dim=-1)
        return k_nope, v

    def forward(self, x: Tensor, angles: Tensor, planted: Planted) -> Tensor:
        """`[B, T, hidden]` to the same, with the faults of `planted` per sequence."""
        q_nope, q_pe = self.queries(x, angles)
        latent, k_pe = self.latents(x, angles)
        k_nope, v = self.expand(latent)
        q = torch.cat((q_nope, q_pe), dim=-1).transpose(1, 2)  # [B, H, T, qk]
        k_rope = k_pe.unsqueeze(2).expand(-1, -1, self.config.heads, -1)
        k = torch.cat((k_nope, k_rope), dim=-1).transpose(1, 2)
        scores = (q @ k.transpose(-1, -2)).float() * self.config.scale
        weights = planted_scores(scores, planted).softmax(-1).to(x.dtype)  # [B, H, T, T]
        out = (weights @ v.transpose(1, 2)).transpose(1, 2)  # [B, T, H, v]
        flipped = planted.flip_v[..., None, None]
        out = torch.where(flipped, out.flip(-1), out)
        out = out.masked_fill(planted.zero[..., None, None], 0.0)
        projected: Tensor = self.o_proj(out.flatten(-2))
        return projected


class MLP(nn.Module):
    """Gated SiLU."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, intermediate)
        self.up_proj = Linear(hidden, intermediate)
        self.down_proj = Linear(intermediate, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., hidden]` to the same."""
        result: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class Router(nn.Module):
    """Sigmoid scores, the best group, then the best experts in it; the bias steers the choice and not the weight."""

    e_score_correction_bias: Tensor

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.experts, config.hidden))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.experts))
        self.register_buffer("load", torch.zeros(config.experts), persistent=False)
        self.load: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """`[N, hidden]` to the weight of every expert, `[N, experts]`, float32, zero for those not chosen."""
        c = self.config
        scores = F.linear(x.float(), as_shipped(self.weight, torch.float32)).sigmoid()
        choice = scores.detach() + self.e_score_correction_bias
        grouped = choice.view(-1, c.groups, c.experts // c.groups)
        best = grouped.topk(2, dim=-1).values.sum(-1).topk(c.groups_per_token, dim=-1).indices
        allowed = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, True)
        choice = grouped.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(-2)
        chosen = torch.zeros_like(scores).scatter(-1, choice.topk(c.experts_per_token, dim=-1).indices, 1.0)
        if self.training:
            self.load += chosen.sum(0)
        weights = scores * chosen
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * c.routed_scaling

    @torch.no_grad()
    def balance(self, speed: Tensor) -> None:
        """Moves the bias of each expert towards the mean load; only differences count, so the least bias is kept at zero."""
        self.e_score_correction_bias += speed * (self.load.mean() - self.load).sign()
        self.e_score_correction_bias -= self.e_score_correction_bias.min()
        self.load.zero_()

    @torch.no_grad()
    def freeze(self) -> None:
        """Rounds the bias to what bf16 holds, so that a loader of either dtype reads the same."""
        self.e_score_correction_bias.copy_(self.e_score_correction_bias.to(torch.bfloat16).float())


class Experts(nn.Module):
    """All routed experts, stacked; every expert computes every token, which for this size is faster than sorting."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(config.experts, 2, config.expert, config.hidden))
        self.down = nn.Parameter(torch.empty(config.experts, config.hidden, config.expert))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """`[N, hidden]` and `[N, experts]` to `[N, hidden]`."""
        experts, _, width, hidden = self.gate_up.shape
        both = F.linear(x, as_shipped(self.gate_up, x.dtype).view(-1, hidden)).view(-1, experts, 2, width)
        inner = F.silu(both[:, :, 0]) * both[:, :, 1] * weights.to(x.dtype).unsqueeze(-1)
        return inner.flatten(1) @ as_shipped(self.down, x.dtype).transpose(1, 2).reshape(-1, hidden)


class MoE(nn.Module):
    """Routed experts and one shared expert."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config)
        self.shared_experts = MLP(config.hidden, config.expert)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., hidden]` to the same."""
        flat = x.reshape(-1, x.shape[-1])
        routed: Tensor = self.experts(flat, self.gate(flat))
        shared: Tensor = self.shared_experts(x)
        return routed.view_as(x) + shared


class Layer(nn.Module):
    """Attention and feed-forward with their norms."""

    def __init__(self, config: DemoConfig, index: int) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config.hidden, config.intermediate) if index < config.dense_layers else MoE(config)
        self.input_layernorm = RMSNorm(config.hidden, config.eps)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.eps)

    def forward(self, x: Tensor, angles: Tensor, planted: Planted) -> Tensor:
        """`[B, T, hidden]` to the same."""
        attended: Tensor = self.self_attn(self.input_layernorm(x), angles, planted)
        x = x + attended
        return x + self.feed_forward(x)

    def feed_forward(self, x: Tensor) -> Tensor:
        """What the second half of the layer adds."""
        added: Tensor = self.mlp(self.post_attention_layernorm(x))
        return added


class Body(nn.Module):
    """Everything under Hugging Face's prefix `model.`."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.eps)


class DemoNetwork(nn.Module):
    """The whole network."""

    frequencies: Tensor

    def __init__(self, config: DemoConfig, init: float = 0.04) -> None:
        super().__init__()
        self.config = config
        self.model = Body(config)
        self.lm_head = Linear(config.hidden, config.vocab)
        self.register_buffer("frequencies", yarn_frequencies(config), persistent=False)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=init)

    def layers(self) -> list[Layer]:
        """The layers, typed."""
        return [layer for layer in self.model.layers if isinstance(layer, Layer)]

    def routers(self) -> list[Router]:
        """The routers of all MoE layers."""
        return [module for module in self.modules() if isinstance(module, Router)]

    def embed(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """`[B, T]` to `[B, T, hidden]`."""
        return F.embedding(ids, as_shipped(self.model.embed_tokens.weight, dtype))

    def angles(self, positions: Tensor) -> Tensor:
        """`[B, T]` to the angle of each rotary pair, `[B, T, rope / 2]`."""
        return positions.unsqueeze(-1).float() * self.frequencies

    def logits(self, x: Tensor) -> Tensor:
        """`[..., hidden]` to `[..., vocab]`."""
        result: Tensor = self.lm_head(self.model.norm(x))
        return result

    def forward(self, ids: Tensor, planted: Planted, dtype: torch.dtype) -> Tensor:
        """`ids` `[B, T]` to the last hidden state `[B, T, hidden]`, computed in `dtype`."""
        x = self.embed(ids, dtype)
        angles = self.angles(planted.positions)
        for layer in self.layers():
            x = layer(x, angles, planted)
        return x
