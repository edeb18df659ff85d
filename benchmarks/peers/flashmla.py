"""FlashMLA, dense decode, from vLLM's bundle or the stand-alone package: the heads as they are, and padded to 64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mla_serve.backends.padded import Padding
from mla_serve.selection.inputs import Call
from mla_serve.shapes import AttentionShape

from . import PeerCall, attempt

NAME = "flashmla"
PAGE, HEADS = 64, 64


def calls(shape: AttentionShape, call: Call) -> Iterator[PeerCall]:
    if not shape.absorbed:
        return
    device = call.tensors[0].device
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        yield PeerCall(NAME, why_not="dense decode needs a Hopper GPU")
    elif shape.page_size != PAGE:
        yield PeerCall(NAME, why_not=f"takes pages of {PAGE} tokens, not {shape.page_size}")
    elif len(set(call.batch.q_lens_host or ())) != 1:
        yield PeerCall(NAME, why_not="takes the same number of query tokens from every request")
    else:
        yield attempt(NAME, lambda: _decode(shape, call, None))
        if shape.heads < HEADS:
            padding = Padding.of(shape, heads=HEADS)
            yield attempt(NAME, lambda: _decode(shape, call, padding), padding)


def _library() -> Any:
    try:
        import flash_mla

        return flash_mla
    except ImportError:
        from vllm.third_party.flashmla import flash_mla_interface

        return flash_mla_interface


def _decode(shape: AttentionShape, call: Call, padding: Padding | None) -> PeerCall:
    library = _library()
    q_nope, q_pe, cache = call.tensors
    batch, keys = call.batch, cache.unsqueeze(2)
    more_heads = 0 if padding is None else padding.heads - shape.heads
    size = (batch.num_requests, shape.q_len, shape.heads + more_heads, shape.qk)
    kept: list[Any] = []

    def attend(schedule: Any) -> tuple[Tensor, Tensor]:
        q = torch.cat((q_nope, q_pe), dim=-1)
        if more_heads:
            q = F.pad(q, (0, 0, 0, more_heads))
        out, lse = library.flash_mla_with_kvcache(
            q.view(size), keys, batch.block_table, batch.kv_lens, shape.v, schedule, softmax_scale=call.scale, causal=True
        )
        return (out[:, :, : shape.heads].contiguous(), lse) if more_heads else (out, lse)

    def plan() -> None:
        schedule, _ = library.get_mla_metadata()
        attend(schedule)  # the library makes its schedule in the first call
        if kept:
            kept[0].tile_scheduler_metadata.copy_(schedule.tile_scheduler_metadata)
            kept[0].num_splits.copy_(schedule.num_splits)
        else:
            kept.append(schedule)

    def read(raw: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor | None]:
        out, lse = raw  # [batch, q, heads, v], [batch, heads, q]
        return out.flatten(0, 1), lse[:, : shape.heads].transpose(1, 2).flatten(0, 1)

    plan()
    return PeerCall(NAME, lambda: attend(kept[0]), read, plan, padding, settings="its plan includes a run")
