"""The transformer: embedding, layers, head, and how a checkpoint's tensors become them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mla_serve.engine.embedded.attention import Attention, StepAttention
from mla_serve.engine.embedded.config import ModelConfig, MoEConfig
from mla_serve.engine.embedded.layers import MLP, Linear, Norm
from mla_serve.engine.embedded.loader import Checkpoint
from mla_serve.engine.embedded.moe import MoE, Router
from mla_serve.engine.embedded.rope import pair_order

__all__ = ["Layer", "Model"]

_LATENT_EPS = 1e-6  # DeepSeek's modeling files leave the norms of the two latents at this, whatever rms_norm_eps says


@dataclass(frozen=True, slots=True)
class Layer:
    """Pre-norm attention and MLP, each added to the residual stream in place."""

    attention_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: MLP | MoE

    def __call__(self, total: Tensor, cache: Tensor, step: StepAttention, rows: Tensor | None = None) -> Tensor:
        """total [tokens, hidden], changed in place and returned. `rows`, for the last layer: those wanted after attention."""
        self.attention.add_to(total, self.attention_norm(total), cache, step)
        if rows is not None:
            total = total.index_select(0, rows)
        if total.shape[0]:  # a step in the middle of a prompt wants no row at all
            self.mlp.add_to(total, self.mlp_norm(total))
        return total


@dataclass(frozen=True, slots=True)
class Model:
    """A DeepSeek-V2 or V3 decoder on one device."""

    embedding: Tensor  # [vocab, hidden]
    layers: tuple[Layer, ...]
    norm: Norm
    head: Linear

    @classmethod
    def load(cls, config: ModelConfig, checkpoint: Checkpoint) -> Model:
        """Places every tensor that config.json implies; others (multi-token prediction layers) are left alone.

        Raises CheckpointError naming a tensor that is missing or has another shape.
        """
        embedding = checkpoint.place("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        head = embedding if config.tie_embeddings else checkpoint.place("lm_head.weight", config.vocab_size, config.hidden_size)
        layers = tuple(_layer(config, checkpoint, index) for index in range(config.num_layers))
        norm = Norm(checkpoint.place("model.norm.weight", config.hidden_size), config.rms_eps)
        return cls(embedding, layers, norm, Linear(head))

    def __call__(
        self, tokens: Tensor, cache: Tensor, step: StepAttention, rows: Tensor | None, after_layer: Callable[[], None]
    ) -> Tensor:
        """tokens [tokens] int64, cache [layers, pages, page_size, latent + rope] to float32 logits [rows, vocab].

        `rows` are indices of the tokens whose logits are wanted, None for all. `after_layer` is called once a layer.
        """
        total = F.embedding(tokens, self.embedding)
        for layer, latents in zip(self.layers, cache, strict=True):
            total = layer(total, latents, step, rows if layer is self.layers[-1] else None)
            after_layer()
        return self.head(self.norm(total)).float()


def _layer(config: ModelConfig, checkpoint: Checkpoint, index: int) -> Layer:
    at = f"model.layers.{index}."

    def norm(name: str) -> Norm:
        return Norm(checkpoint.place(f"{at}{name}.weight", config.hidden_size), config.rms_eps)

    moe = config.moe
    return Layer(
        attention_norm=norm("input_layernorm"),
        attention=_attention(config, checkpoint, f"{at}self_attn."),
        mlp_norm=norm("post_attention_layernorm"),
        mlp=_moe(config, moe, checkpoint, f"{at}mlp.")
        if moe is not None and moe.at(index)
        else _mlp(checkpoint, f"{at}mlp.", config.hidden_size, config.mlp_width),
    )


def _attention(config: ModelConfig, checkpoint: Checkpoint, at: str) -> Attention:
    d, hidden, rank = config.dims, config.hidden_size, config.q_lora_rank
    low_rank = rank is not None
    first = f"{at}q_a_proj" if low_rank else f"{at}q_proj"
    width = rank or d.heads * d.qk
    latent = f"{at}kv_a_proj_with_mqa"
    down = checkpoint.stack(((f"{first}.weight", width), (f"{latent}.weight", d.latent_row)), hidden)
    bias = None
    if config.attention_bias:
        bias = checkpoint.empty(width + d.latent_row).zero_()
        bias[width:] = checkpoint.read(f"{latent}.bias", d.latent_row)
        if low_rank:
            bias[:width] = checkpoint.read(f"{first}.bias", width)
    q_b = checkpoint.place(f"{at}q_b_proj.weight", d.heads * d.qk, width) if low_rank else None

    order = pair_order(config.rope, d.rope)
    if order is not None:
        queries = (down[:width] if q_b is None else q_b).view(d.heads, d.qk, -1)
        for rope_rows in (queries[:, d.nope :], down[-d.rope :], *(() if bias is None else (bias[-d.rope :],))):
            dim = 1 if rope_rows.ndim == 3 else 0
            rope_rows.copy_(rope_rows.index_select(dim, order.to(rope_rows.device)))

    out_bias = checkpoint.place(f"{at}o_proj.bias", hidden) if config.attention_bias else None
    return Attention(
        dims=d,
        down=Linear(down, bias),
        q_norm=Norm(checkpoint.place(f"{at}q_a_layernorm.weight", width), _LATENT_EPS) if low_rank else None,
        q_b=None if q_b is None else Linear(q_b),
        kv_norm=Norm(checkpoint.place(f"{at}kv_a_layernorm.weight", d.latent), _LATENT_EPS),
        kv_b=Linear(checkpoint.place(f"{at}kv_b_proj.weight", d.heads * (d.nope + d.v), d.latent)),
        out=Linear(checkpoint.place(f"{at}o_proj.weight", hidden, d.heads * d.v), out_bias),
    )


def _mlp(checkpoint: Checkpoint, at: str, hidden: int, width: int) -> MLP:
    gate_up = checkpoint.stack(((f"{at}gate_proj.weight", width), (f"{at}up_proj.weight", width)), hidden)
    return MLP(Linear(gate_up), Linear(checkpoint.place(f"{at}down_proj.weight", hidden, width)))


def _moe(config: ModelConfig, moe: MoEConfig, checkpoint: Checkpoint, at: str) -> MoE:
    hidden, width, gate = config.hidden_size, moe.width, f"{at}gate."
    gate_up = checkpoint.empty(moe.experts, 2 * width, hidden)
    down = checkpoint.empty(moe.experts, hidden, width)
    for expert in range(moe.experts):
        name = f"{at}experts.{expert}."
        gate_up[expert, :width] = checkpoint.read(f"{name}gate_proj.weight", width, hidden)
        gate_up[expert, width:] = checkpoint.read(f"{name}up_proj.weight", width, hidden)
        down[expert] = checkpoint.read(f"{name}down_proj.weight", hidden, width)
    bias = None
    if moe.method == "noaux_tc":
        bias = checkpoint.place(f"{gate}e_score_correction_bias", moe.experts, dtype=torch.float32)
    router = Router(moe, checkpoint.place(f"{gate}weight", moe.experts, hidden, dtype=torch.float32), bias)
    shared = _mlp(checkpoint, f"{at}shared_experts.", hidden, moe.shared) if moe.shared else None
    return MoE(router, gate_up, down, shared)
