"""Checkpoints: shards, dtypes, and every way in which files can be missing or wrong."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from mla_serve.engine.embedded.config import ModelConfig
from mla_serve.engine.embedded.fields import CheckpointError
from mla_serve.engine.embedded.loader import Checkpoint
from mla_serve.engine.embedded.model import Model

CPU = torch.device("cpu")
GATE = "model.layers.1.mlp.experts.3.gate_proj.weight"


@pytest.fixture
def copy(checkpoint, tmp_path):
    return shutil.copytree(checkpoint, tmp_path / "copy")


@pytest.fixture
def change(copy):
    """Rewrites the one file of a copy with tensors changed, or without those that become None."""

    def rewrite(**changes):
        tensors = load_file(copy / "model.safetensors") | {name.replace("__", "."): t for name, t in changes.items()}
        save_file({name: t for name, t in tensors.items() if t is not None}, copy / "model.safetensors")
        return copy

    return rewrite


def load(directory, dtype=None):
    return Model.load(ModelConfig.from_dir(directory), Checkpoint(directory, dtype=dtype, device=CPU))


def shard(directory):
    """Splits the one file into two with an index, as large checkpoints come."""
    tensors = load_file(directory / "model.safetensors")
    where = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(where.values()):
        save_file({name: tensors[name] for name in where if where[name] == file}, directory / file)
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return directory


def test_shards_give_the_same_model(checkpoint, copy):
    one, two = load(checkpoint), load(shard(copy))
    assert torch.equal(one.embedding, two.embedding)
    assert torch.equal(one.layers[1].mlp.gate_up, two.layers[1].mlp.gate_up)
    assert torch.equal(one.layers[0].attention.down.weight, two.layers[0].attention.down.weight)


def test_dtypes_are_converted_and_the_routers_stay_float32(checkpoint, change):
    halved = change(**{name.replace(".", "__"): t.half() for name, t in load_file(checkpoint / "model.safetensors").items()})
    for dtype in (None, torch.float32, torch.bfloat16):
        model = load(halved, dtype)
        assert model.embedding.dtype == model.layers[1].mlp.down.dtype == (dtype or torch.float16)
        assert model.layers[1].mlp.router.weight.dtype == torch.float32


def test_absorbed_and_unabsorbed_weights_share_storage(checkpoint):
    attention = load(checkpoint).layers[0].attention
    d = attention.dims
    up = attention.kv_b.weight.view(d.heads, d.nope + d.v, d.latent)
    assert up.untyped_storage().data_ptr() == attention.kv_b.weight.untyped_storage().data_ptr()


def test_reading_maps_the_file(checkpoint):
    files = Checkpoint(checkpoint, device=CPU)
    name = "model.embed_tokens.weight"
    assert files.read(name).data_ptr() == files.read(name).data_ptr()


def test_tensors_of_other_layers_are_left_alone(change):
    assert len(load(change(model__layers__2__eh_proj__weight=torch.zeros(4, 4))).layers) == 2


def fails(directory, *named):
    with pytest.raises(CheckpointError) as error:
        load(directory)
    text = str(error.value)
    assert "\n" not in text
    for part in named:
        assert part in text


def test_missing_and_misshapen_tensors_are_named(change):
    fails(change(**{GATE.replace(".", "__"): torch.zeros(3, 5)}), GATE, "[3, 5]", "[32, 64]", "download")
    fails(change(**{GATE.replace(".", "__"): None}), f"no tensor {GATE}", "download")


def test_quantised_tensors_are_refused(change):
    fails(
        change(**{GATE.replace(".", "__"): torch.zeros(32, 64, dtype=torch.float8_e4m3fn)}), GATE, "float8_e4m3fn", "bfloat16"
    )


def test_missing_head_is_missed_unless_tied(change, copy):
    fails(change(lm_head__weight=None), "lm_head.weight")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    model = load(copy)
    assert model.head.weight is model.embedding


def test_missing_and_damaged_files(copy):
    whole = (copy / "model.safetensors").read_bytes()
    for text in (b"", whole[:100], whole[: len(whole) // 2], b"\xff" * 64):
        (copy / "model.safetensors").write_bytes(text)
        fails(copy, "model.safetensors is damaged", "download it again")
    (copy / "model.safetensors").unlink()
    fails(copy, "neither model.safetensors nor model.safetensors.index.json")
    (copy / "pytorch_model.bin").write_bytes(b"")
    fails(copy, "pickled", "safetensors")


def test_missing_shard_and_bad_index(copy):
    index = shard(copy) / "model.safetensors.index.json"
    (copy / "model-00002-of-00002.safetensors").unlink()
    fails(copy, "lacks model-00002-of-00002.safetensors")
    for text in (
        "{}",
        '{"weight_map": [1]}',
        '{"weight_map": {"a": "../other/model.safetensors"}}',
        '{"weight_map": {"a": 1}}',
    ):
        index.write_text(text)
        fails(copy, "weight_map", "download it again")
    index.write_text("{")
    fails(copy, "model.safetensors.index.json cannot be read as JSON")
