"""Tensors of a Hugging Face checkpoint by name, memory-mapped: reading one copies nothing until it is placed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mla_serve.engine.embedded.fields import CheckpointError, read_json

__all__ = ["Checkpoint"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Checkpoint:
    """The safetensors files of one directory. No other format is read: pickles run code when opened.

    Weights are copied one tensor at a time from the mapped file into their final place, in the final dtype and on the final
    device, so loading needs the model's size once (the file's pages are the kernel's to drop).
    """

    def __init__(self, directory: Path, *, dtype: torch.dtype | None = None, device: torch.device) -> None:
        """`dtype` None: that of the embedding in the file. Raises CheckpointError."""
        self.directory = directory
        self.device = device
        self._shards: dict[str, Any] = {}
        self._shard_of = self._index()
        self.dtype = dtype or self.read("model.embed_tokens.weight").dtype

    def __contains__(self, name: str) -> bool:
        return name in self._shard_of

    def read(self, name: str, *shape: int) -> Tensor:
        """The tensor as it lies in the file: mapped, on the CPU, never written to. Checks the shape where given."""
        if name not in self._shard_of:
            raise CheckpointError(
                f"{self.directory} has no tensor {name}; download the checkpoint again, its shards are incomplete"
            )
        shard = self._shard_of[name]
        try:
            tensor: Tensor = self._open(shard).get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(
                f"{self.directory / shard} does not give tensor {name} ({error}); download the file again"
            ) from None
        if shape and tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{self.directory / shard} has tensor {name} of shape {list(tensor.shape)} where config.json means "
                f"{list(shape)}; the two belong to different models, download both again"
            )
        if tensor.dtype not in _FLOATS:
            raise CheckpointError(
                f"{self.directory / shard} has tensor {name} as {str(tensor.dtype).removeprefix('torch.')}; give a checkpoint "
                "converted to bfloat16, float16 or float32"
            )
        return tensor

    def place(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A copy of one tensor on the device."""
        return self.empty(*shape, dtype=dtype).copy_(self.read(name, *shape))

    def stack(self, parts: Sequence[tuple[str, int]], *rest: int) -> Tensor:
        """Tensors [rows, *rest] under each other in one allocation, from (name, rows) pairs."""
        out = self.empty(sum(rows for _, rows in parts), *rest)
        for piece, (name, rows) in zip(torch.split(out, [rows for _, rows in parts]), parts, strict=True):
            piece.copy_(self.read(name, rows, *rest))
        return out

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Room for a weight: the engine's dtype unless another is given, on the device."""
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def _index(self) -> dict[str, str]:
        """Tensor name to file name, from the index or from the one file there is."""
        if (self.directory / _INDEX).is_file():
            names = read_json(self.directory / _INDEX).get("weight_map")
            if not isinstance(names, dict) or not all(_plain(shard) for shard in names.values()):
                raise CheckpointError(f"{self.directory / _INDEX} has no usable weight_map; download it again")
            return names
        if (self.directory / _SINGLE).is_file():
            return dict.fromkeys(self._open(_SINGLE).keys(), _SINGLE)
        if any(self.directory.glob("*.bin")):
            raise CheckpointError(
                f"{self.directory} has only pickled weights (.bin), which are never opened; convert them to safetensors"
            )
        raise CheckpointError(f"{self.directory} has neither {_SINGLE} nor {_INDEX}; download the whole checkpoint directory")

    def _open(self, shard: str) -> Any:
        if shard not in self._shards:
            try:
                self._shards[shard] = safe_open(self.directory / shard, framework="pt")
            except FileNotFoundError:
                raise CheckpointError(
                    f"{self.directory} lacks {shard}, which its index names; download the missing shard"
                ) from None
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{self.directory / shard} is damaged ({error}); download it again") from None
        return self._shards[shard]


def _plain(shard: object) -> bool:
    """A file name and no path: an index must not lead out of its directory."""
    return isinstance(shard, str) and shard.endswith(".safetensors") and Path(shard).name == shard
