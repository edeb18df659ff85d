"""From what a user names as MODEL to a directory on disk."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mla_serve.errors import UserError
from mla_serve.shapes import AttentionShape, DType

if TYPE_CHECKING:
    import torch

# No *.bin, *.pt or *.py: a checkpoint is data here, never code.
PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")


def resolve(model: str | None) -> Path:
    """The directory of MODEL: the bundled demo for None, a directory as it is, else a hub name (downloaded).

    Raises UserError if it is neither.
    """
    if model is None:
        from mla_serve.demo import MODEL_DIR

        return MODEL_DIR
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise UserError(f"{model} is a file; name the directory that holds config.json and the safetensors")
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise UserError(f"there is no directory {model}; name a Hugging Face model directory, or a hub name such as org/model")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        return Path(snapshot_download(model, allow_patterns=list(PATTERNS)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"{model} is no directory here, nor could it be fetched from the Hugging Face hub ({reason}); give a directory"
        ) from error


def public_name(model: str | None) -> str:
    """What clients call MODEL: a hub name as it was typed, since a download lies in a directory named by its commit."""
    if model is None:
        return "mla-serve-demo"
    path = Path(model).expanduser()
    return os.path.basename(os.path.abspath(path)) if path.is_dir() else model


def attention_grid(
    model: str | None, device: torch.device, *, tp: int, dtype: str, page_size: int | None, max_model_len: int | None,
    max_batch: int, graph: bool = False,
) -> tuple[list[AttentionShape], int]:  # fmt: skip
    """The shapes to measure for MODEL at tensor-parallel size `tp`, and its number of layers. Raises UserError.

    `graph`: decode as it is replayed from CUDA graphs instead of called.
    """
    from mla_serve.engine.embedded.config import ModelConfig
    from mla_serve.selection import grid

    config = ModelConfig.from_dir(resolve(model))
    if config.dims.heads % tp:
        raise UserError(f"{config.dims.heads} heads cannot be divided among {tp} ranks; choose a divisor for --tp")
    known: tuple[DType, ...] = ("float32", "bfloat16", "float16")
    if dtype != "auto" and dtype not in known:
        raise UserError(f"there is no dtype {dtype!r} here; use auto, float32, bfloat16 or float16")
    shapes = grid(
        replace(config.dims, heads=config.dims.heads // tp),
        dtype=next((d for d in known if d == dtype), config.dtype or "float32"),
        page_size=page_size or (64 if device.type == "cuda" else 16),
        max_model_len=max_model_len or config.max_position,
        max_batch=max_batch,
        device=device,
        graph=graph,
    )
    return shapes, config.num_layers
