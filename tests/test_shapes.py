from __future__ import annotations

import json
from dataclasses import replace

import pytest

from mla_serve.shapes import AttentionShape, Bucket, MLADims, Phase, rope_parameters, softmax_scale, yarn_mscale

DEEPSEEK = MLADims(heads=16, nope=128, rope=64, v=128, latent=512)
CONFIG = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rope_theta": 10000.0}
YARN = {"factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}


def spelled(config: dict, rope: dict | None) -> list[dict]:
    """The same model as older files and as transformers 5 write it."""
    if rope is None:
        default = {"rope_type": "default", "rope_theta": 10000.0}
        return [config, {**config, "rope_scaling": None}, {**config, "rope_parameters": default}]
    return [
        {**config, "rope_scaling": {"type": "yarn", **rope}},
        {**config, "rope_scaling": {"rope_type": "yarn", **rope}},
        {**config, "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, **rope}},
        {**config, "rope_scaling": {"type": "yarn", **rope}, "rope_parameters": {"rope_type": "yarn", **rope}},
    ]


@pytest.mark.parametrize(
    ("rope", "scale"),
    [
        ({**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, 0.135234),
        ({**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}, 0.114721),
        (None, 0.0721688),
    ],
    ids=["V3", "V2-Lite", "no scaling"],
)
def test_k07_the_scale_is_the_same_for_both_spellings(rope: dict | None, scale: float) -> None:
    for config in spelled(CONFIG, rope):
        assert softmax_scale(config) == pytest.approx(scale, abs=5e-7)


@pytest.mark.parametrize(
    ("nope", "rope", "scale", "wrong"),
    [(192, 64, 0.0625, 0.04167), (128, 64, 0.0721688, 0.0625), (64, 32, 0.1020621, 0.0883883)],
    ids=["GLM-4.7-Flash absorbed", "DeepSeek padded to 256", "MiniCPM3 padded to 128"],
)
def test_the_scale_comes_from_the_config_and_never_from_a_width(
    nope: int, rope: int, scale: float, wrong: float
) -> None:  # K06
    got = softmax_scale({"qk_nope_head_dim": nope, "qk_rope_head_dim": rope})
    assert got == pytest.approx(scale, abs=5e-7)
    assert abs(got - wrong) > 5e-3


def test_yarn_without_mscale_all_dim_leaves_the_scale_alone() -> None:
    assert softmax_scale({**CONFIG, "rope_scaling": {"type": "yarn", **YARN, "mscale": 1.0}}) == 192**-0.5
    assert softmax_scale({**CONFIG, "rope_scaling": {"type": "linear", "factor": 4.0}}) == 192**-0.5


def test_yarn_mscale() -> None:
    assert yarn_mscale(1.0, 1.0) == 1.0
    assert yarn_mscale(0.5, 0.7) == 1.0
    assert yarn_mscale(40.0, 1.0) == pytest.approx(1.3688879)
    assert yarn_mscale(40.0, 0.0) == 1.0


def test_rope_parameters_of_both_spellings() -> None:
    assert rope_parameters({}) == {"rope_type": "default", "rope_theta": 10000.0}
    old = {"rope_theta": 5e4, "rope_scaling": {"type": "yarn", "factor": 40}}
    assert rope_parameters(old) == {"rope_type": "yarn", "rope_theta": 5e4, "factor": 40}
    assert old["rope_scaling"] == {"type": "yarn", "factor": 40}
    new = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e4, "factor": 40}}
    assert rope_parameters(new) == rope_parameters(old)
    assert rope_parameters({**old, **new}) == rope_parameters(old)


def test_spellings_that_disagree_are_refused() -> None:
    config = {"rope_scaling": {"type": "yarn", "factor": 40}, "rope_parameters": {"rope_type": "yarn", "factor": 4}}
    with pytest.raises(ValueError, match="with different factor; keep one of them"):
        rope_parameters(config)


def test_dims() -> None:
    assert (DEEPSEEK.qk, DEEPSEEK.latent_row) == (192, 576)
    assert MLADims(heads=1, nope=256, rope=0, v=256, latent=512).latent_row == 512
    for name in ("heads", "nope", "v", "latent"):
        with pytest.raises(ValueError, match=rf"MLADims\.{name} must be positive, got 0"):
            replace(DEEPSEEK, **{name: 0})
    with pytest.raises(ValueError, match=r"MLADims\.rope must be positive, got -1"):
        replace(DEEPSEEK, rope=-1)


def test_shapes_of_the_three_phases() -> None:
    prefill = AttentionShape.prefill(DEEPSEEK, batch=2, q_len=30, dtype="float32", lse=False)
    assert (prefill.qk, prefill.v, prefill.kv_len, prefill.causal, prefill.lse, prefill.absorbed) == (
        192,
        128,
        30,
        True,
        False,
        False,
    )
    context = AttentionShape.context(DEEPSEEK, batch=2, q_len=30, kv_len=100, dtype="float32")
    assert (context.qk, context.v, context.kv_len, context.causal, context.lse) == (192, 128, 100, False, True)
    decode = AttentionShape.decode(DEEPSEEK, batch=2, kv_len=100, dtype="bfloat16", page_size=64)
    assert (decode.qk, decode.v, decode.rope, decode.q_len, decode.page_size, decode.absorbed) == (576, 512, 64, 1, 64, True)
    assert prefill.widened(v=192) == replace(prefill, v=192)
    assert decode.widened(heads=64) == replace(decode, heads=64)


@pytest.mark.parametrize(("n", "up"), [(0, 1), (1, 1), (2, 2), (3, 4), (8, 8), (9, 16), (1000, 1024), (1025, 2048)])
def test_buckets_round_up_to_powers_of_two(n: int, up: int) -> None:
    prefill = Bucket.of(AttentionShape.prefill(DEEPSEEK, batch=n, q_len=n, dtype="float32", lse=False)).shape
    assert (prefill.batch, prefill.q_len, prefill.kv_len) == (up, up, up)
    decode = Bucket.of(AttentionShape.decode(DEEPSEEK, batch=n, kv_len=n, dtype="float32", page_size=16, q_len=3)).shape
    assert (decode.batch, decode.kv_len, decode.q_len) == (up, up, 3)


def test_all_but_the_sizes_is_exact() -> None:
    shape = AttentionShape.decode(DEEPSEEK, batch=5, kv_len=5, dtype="bfloat16", page_size=16)
    others = {
        "heads": 17, "qk": 575, "v": 511, "dtype": "float32", "lse": True, "page_size": 64, "cache_dtype": "float8_e4m3fn",
        "ragged": True, "graph": True, "batch_invariant": True, "causal": False, "q_len": 2,
    }  # fmt: skip
    for name, value in others.items():
        assert Bucket.of(replace(shape, **{name: value})) != Bucket.of(shape)
    assert Bucket.of(replace(shape, batch=8, kv_len=7)) == Bucket.of(shape)
    assert Bucket.of(Bucket.of(shape).shape) == Bucket.of(shape)


@pytest.mark.parametrize(
    "shape",
    [
        AttentionShape.prefill(DEEPSEEK, batch=3, q_len=100, dtype="float32", lse=True),
        AttentionShape.context(DEEPSEEK, batch=3, q_len=100, kv_len=700, dtype="bfloat16"),
        AttentionShape.decode(
            DEEPSEEK, batch=3, kv_len=700, dtype="bfloat16", page_size=64, ragged=True, cache_dtype="float8_e4m3fn", graph=True
        ),
    ],
    ids=lambda shape: shape.phase.value,
)
def test_a_bucket_survives_json(shape: AttentionShape) -> None:
    bucket = Bucket.of(shape)
    data = json.loads(json.dumps(bucket.to_json()))
    assert Bucket.from_json(data) == bucket
    assert None not in data.values()
    assert isinstance(Bucket.from_json(data).shape.phase, Phase)


@pytest.mark.parametrize("spoil", [{"phase": "training"}, {"phase": None}, {"colour": "red"}])
def test_a_foreign_bucket_is_refused(spoil: dict) -> None:
    data = Bucket.of(AttentionShape.prefill(DEEPSEEK, batch=1, q_len=1, dtype="float32", lse=True)).to_json()
    with pytest.raises((ValueError, TypeError)):
        Bucket.from_json({**data, **spoil})
    with pytest.raises(KeyError):
        Bucket.from_json({})


def test_a_bucket_reads_as_a_sentence() -> None:
    decode = AttentionShape.decode(DEEPSEEK, batch=3, kv_len=700, dtype="bfloat16", page_size=64, ragged=True)
    assert str(Bucket.of(decode)) == "decode 4 x 1 on 1024, 16 heads, 576/512 bfloat16 page 64 (ragged)"
    prefill = AttentionShape.prefill(DEEPSEEK, batch=1, q_len=512, dtype="float32", lse=False)
    assert str(Bucket.of(prefill)) == "prefill 1 x 512 on 512, 16 heads, 192/128 float32"
