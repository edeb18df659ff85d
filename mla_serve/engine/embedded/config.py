"""What the engine needs of a Hugging Face config.json, checked once, so that no later line has to doubt it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from mla_serve import shapes
from mla_serve.engine.embedded.fields import CheckpointError, Fields, read_json
from mla_serve.shapes import DType, MLADims

__all__ = ["ARCHITECTURES", "CheckpointError", "MoEConfig", "ModelConfig", "RopeConfig"]

Scoring = Literal["softmax", "sigmoid"]
TopK = Literal["greedy", "group_limited_greedy", "noaux_tc"]

# What an architecture means by a routing field that its config.json leaves out (transformers never writes V3's two).
ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    "DeepseekV2ForCausalLM": {"topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False},
    "DeepseekV3ForCausalLM": {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True},
}
_DTYPES: Mapping[str, DType] = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: plain, or YaRN (arXiv 2309.00071) where `factor` is over 1 or the kind says so.

    `temperature` multiplies cos and sin. `interleave`: the weights hold pairs (0, 1), (2, 3), ...; else
    (0, R/2), (1, R/2 + 1), ...
    """

    theta: float
    interleave: bool = True
    yarn: bool = False
    factor: float = 1.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """Routed experts. `shared` is the width of the shared experts taken as one MLP, 0 for none."""

    experts: int
    top_k: int
    width: int
    shared: int
    groups: int
    top_groups: int
    method: TopK
    scoring: Scoring
    normalise: bool
    scaling: float
    first: int
    every: int

    def at(self, layer: int) -> bool:
        """Whether this layer has experts instead of one dense MLP."""
        return layer >= self.first and layer % self.every == 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One model, as read from a directory. Widths in elements; `dtype` None where config.json does not say."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    dims: MLADims
    q_lora_rank: int | None
    mlp_width: int
    rms_eps: float
    tie_embeddings: bool
    attention_bias: bool
    max_position: int
    softmax_scale: float
    eos_token_ids: tuple[int, ...]
    dtype: DType | None
    rope: RopeConfig
    moe: MoEConfig | None

    @classmethod
    def from_dir(cls, directory: str | Path) -> ModelConfig:
        """Reads config.json, and generation_config.json where there is one. Raises CheckpointError."""
        directory = Path(directory)
        if not directory.is_dir():
            raise CheckpointError(
                f"there is no model directory {directory}; give one with config.json and safetensors files, as downloaded from "
                "Hugging Face"
            )
        raw = read_json(directory / "config.json")
        end = raw.get("eos_token_id")
        if (directory / "generation_config.json").is_file():
            own = read_json(directory / "generation_config.json").get("eos_token_id")
            end = end if own is None else own  # a null field is an absent one
        return cls._parse(Fields(raw, directory / "config.json"), end)

    @classmethod
    def _parse(cls, fields: Fields, end: object) -> ModelConfig:
        raw = fields.raw
        named = raw.get("architectures") or []
        known = [name for name in named if name in ARCHITECTURES] if isinstance(named, list) else []
        if not known:
            what = ", ".join(map(str, named)) if isinstance(named, list) and named else "no architecture"
            raise fields.error(f"names {what}; the embedded engine serves {' and '.join(ARCHITECTURES)}")
        if raw.get("quantization_config"):
            raise fields.error(
                "says that the weights are quantised; give a checkpoint converted to bfloat16, float16 or float32"
            )
        if fields.of("hidden_act", "silu") != "silu":
            raise fields.error(f"has hidden_act {raw['hidden_act']!r}; only silu is served")
        if fields.of("mlp_bias", False):
            raise fields.error("has mlp_bias true; only MLPs without bias are served")
        heads = fields.count("num_attention_heads")
        dims = MLADims(
            heads=heads,
            nope=fields.count("qk_nope_head_dim"),
            rope=fields.count("qk_rope_head_dim"),
            v=fields.count("v_head_dim"),
            latent=fields.count("kv_lora_rank"),
        )
        if dims.rope % 2:
            raise fields.error(f"has qk_rope_head_dim {dims.rope}; rotary embedding turns pairs, so it must be even")
        return cls(
            architecture=known[0],
            vocab_size=fields.count("vocab_size"),
            hidden_size=fields.count("hidden_size"),
            num_layers=fields.count("num_hidden_layers"),
            dims=dims,
            q_lora_rank=fields.count("q_lora_rank", None),
            mlp_width=fields.count("intermediate_size"),
            rms_eps=fields.number("rms_norm_eps", 1e-6),
            tie_embeddings=fields.of("tie_word_embeddings", False),
            attention_bias=fields.of("attention_bias", False),
            max_position=fields.count("max_position_embeddings"),
            softmax_scale=_rope_call(fields, shapes.softmax_scale),
            eos_token_ids=_token_ids(fields, end),
            dtype=_dtype(fields),
            rope=_rope(fields),
            moe=_moe(fields, ARCHITECTURES[known[0]]),
        )


def _dtype(fields: Fields) -> DType | None:
    """`dtype` since transformers 4.56, `torch_dtype` before."""
    name = fields.raw.get("dtype") or fields.raw.get("torch_dtype")
    if name is None:
        return None
    if name not in _DTYPES:
        raise fields.error(f"has dtype {name!r}; the embedded engine serves {', '.join(_DTYPES)}")
    return _DTYPES[cast(str, name)]


def _token_ids(fields: Fields, end: object) -> tuple[int, ...]:
    ids = [] if end is None else end if isinstance(end, list) else [end]
    if any(type(i) is not int for i in ids):
        raise fields.error(f"has eos_token_id {end!r}, which should be a token id or a list of them; correct it")
    return tuple(cast(list[int], ids))


def _rope_call(fields: Fields, function: Any) -> Any:
    """Runs one of shapes' readers of the rope settings, with its complaint made the file's."""
    try:
        return function(fields.raw)
    except KeyError as missing:
        raise fields.error(f"has rope settings without {missing}; take them from the model's own config.json") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise fields.error(
            f"has rope settings that cannot be used ({error}); take them from the model's own config.json"
        ) from None


def _rope(fields: Fields) -> RopeConfig:
    """Both spellings of the rope settings; the temperature of cos and sin as transformers defines it.

    `attention_factor` where given, else the ratio of the temperatures of `mscale` and `mscale_all_dim` where both are,
    else YaRN's own 0.1 ln(factor) + 1. The softmax scale carries `mscale_all_dim` on its own (`shapes.softmax_scale`).
    """
    settings = Fields(_rope_call(fields, shapes.rope_parameters), fields.path)
    theta = settings.number("rope_theta", 10000.0)
    interleave = fields.of("rope_interleave", True)
    kind = settings.raw["rope_type"]
    if kind == "default":
        return RopeConfig(theta, interleave)
    if kind not in ("yarn", "deepseek_yarn"):
        raise fields.error(f"has rope_type {kind!r}; the embedded engine serves default and yarn")
    original = settings.count("original_max_position_embeddings", fields.count("max_position_embeddings"))
    factor = settings.number("factor", fields.count("max_position_embeddings") / original)
    mscale, all_dim = settings.number("mscale", 0.0), settings.number("mscale_all_dim", 0.0)
    temperature = shapes.yarn_mscale(factor, 1.0)
    if mscale and all_dim:
        temperature = shapes.yarn_mscale(factor, mscale) / shapes.yarn_mscale(factor, all_dim)
    return RopeConfig(
        theta=theta,
        interleave=interleave,
        yarn=True,
        factor=factor,
        original_max_position=original,
        beta_fast=settings.number("beta_fast", 32.0) or 32.0,
        beta_slow=settings.number("beta_slow", 1.0) or 1.0,
        truncate=settings.of("truncate", True),
        temperature=settings.number("attention_factor", temperature),
    )


def _moe(fields: Fields, defaults: Mapping[str, Any]) -> MoEConfig | None:
    experts = fields.count("n_routed_experts", 0, least=0)
    if not experts:
        return None
    method, scoring = (fields.of(name, cast(str, defaults[name])) for name in ("topk_method", "scoring_func"))
    if method not in get_args(TopK):
        raise fields.error(f"has topk_method {method!r}; known are {', '.join(get_args(TopK))}")
    if scoring not in get_args(Scoring):
        raise fields.error(f"has scoring_func {scoring!r}; known are {', '.join(get_args(Scoring))}")
    width = fields.count("moe_intermediate_size")
    moe = MoEConfig(
        experts=experts,
        top_k=fields.count("num_experts_per_tok"),
        width=width,
        shared=width * fields.count("n_shared_experts", 0, least=0),
        groups=1 if method == "greedy" else fields.count("n_group", 1),
        top_groups=1 if method == "greedy" else fields.count("topk_group", 1),
        method=cast(TopK, method),
        scoring=cast(Scoring, scoring),
        normalise=fields.of("norm_topk_prob", cast(bool, defaults["norm_topk_prob"])),
        scaling=fields.number("routed_scaling_factor", 1.0),
        first=fields.count("first_k_dense_replace", 0, least=0),
        every=fields.count("moe_layer_freq", 1),
    )
    if experts % moe.groups or moe.top_groups > moe.groups or moe.top_k > experts // moe.groups * moe.top_groups:
        raise fields.error(
            f"asks for {moe.top_k} of {experts} experts from {moe.top_groups} of {moe.groups} groups, which cannot be done; "
            "correct num_experts_per_tok, n_group or topk_group"
        )
    return moe
