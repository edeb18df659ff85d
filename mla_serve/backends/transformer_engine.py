"""Transformer Engine: `DotProductAttention` for new tokens, through whichever kernel its own rules pick for a shape.

Which one that is, is asked of its `get_attention_backend` before anything runs, for the native shape here and for a padded one
through `Padded`: so the availability policy is the rule of Transformer Engine's pull request 3339 (pad where only the padded
form is fused). It returns no LSE, so it takes no part where attention states are merged.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from collections import OrderedDict
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mla_serve.backends.base import AttentionError, Backend, BatchLayout, Kind, Limits, Plan, State, torch_dtype
from mla_serve.backends.rows import blind_rows
from mla_serve.shapes import AttentionShape

__all__ = ["TransformerEngine"]

_DPA = "transformer_engine.pytorch.attention.dot_product_attention"
_ASKED = 4096  # answers that are kept: asking takes a millisecond


@dataclass(slots=True)
class EngineState(State):
    """`modules` by (layout, mask, scale): a scale is known at plan time only, and a model has one."""

    modules: dict[tuple[str, str, float], Any]


@dataclass(slots=True)
class EnginePlan(Plan):
    """`even` is the requests and the tokens of each where all are equal, for the dense layout; None for packed rows."""

    module: Any
    even: tuple[int, int, int] | None
    blind: Tensor | None


class TransformerEngine(Backend):
    """Un-absorbed prefill. Differentiable."""

    name = "transformer-engine"
    library = "transformer-engine"
    gives_lse = False
    needs_host_lens = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._asked: OrderedDict[AttentionShape, Kind | str] = OrderedDict()
        self._unusable: str | None = None
        self._looked = False

    def available(self) -> str | None:
        if self.device.type != "cuda":
            return f"needs a CUDA device, this is {self.device.type}"
        capability = torch.cuda.get_device_capability(self.device)
        if capability < (8, 0):
            return f"needs sm_80, this is sm_{capability[0]}{capability[1]}"
        if not self._looked:
            self._looked, self._unusable = True, self._load()
        return self._unusable

    def _load(self) -> str | None:
        """Imports the library, with the cuDNN that torch carries; None, or why it cannot be used."""
        if find_spec("transformer_engine") is None:
            return "transformer_engine is not installed (pip install transformer-engine[pytorch])"
        try:
            _load_cudnn_of_torch()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                import_module(_DPA)
            found = import_module("transformer_engine.pytorch.utils").get_cudnn_version()
        except (ImportError, OSError, RuntimeError, AssertionError) as error:
            first = (str(error).strip().splitlines() or [""])[0]
            return f"transformer_engine cannot be imported ({type(error).__name__}: {first})"
        ours = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        major, minor, patch = found
        if ours is not None and major * 10_000 + minor * 100 + patch != ours:
            return (
                f"Transformer Engine has loaded cuDNN {major}.{minor}.{patch} and torch "
                f"{ours // 10_000}.{ours // 100 % 100}.{ours % 100}; unset LD_LIBRARY_PATH"
            )
        return None

    def kind(self, shape: AttentionShape) -> Kind:
        answer = self._ask(shape)
        return answer if isinstance(answer, Kind) else Kind.UNFUSED

    def supports(self, shape: AttentionShape) -> str | None:
        if shape.absorbed:
            return "takes the un-absorbed form only, not the paged latent cache"
        if shape.dtype not in ("bfloat16", "float16"):
            return f"takes bfloat16 and float16, not {shape.dtype}"
        if shape.lse:
            return "returns no LSE, which this call needs for merging"
        if shape.graph:
            return "is called with each batch's lengths, so a graph cannot be replayed with others"
        answer = self._ask(shape)
        return answer if isinstance(answer, str) else None

    def _ask(self, shape: AttentionShape) -> Kind | str:
        """The class of kernel that Transformer Engine itself would take for `shape`, or why none."""
        if shape in self._asked:
            return self._asked[shape]
        utils: Any = import_module(f"{_DPA}.utils")
        training = torch.is_grad_enabled()
        parameters = utils.AttentionParams(
            qkv_dtype=torch_dtype(shape.dtype),
            qkv_layout="bshd_bshd_bshd",
            batch_size=shape.batch,
            num_heads=shape.heads,
            num_gqa_groups=shape.heads,
            max_seqlen_q=shape.q_len,
            max_seqlen_kv=shape.kv_len,
            head_dim_qk=shape.qk,
            head_dim_v=shape.v,
            attn_mask_type=_mask(shape.causal, even=True, square=shape.q_len == shape.kv_len),
            is_training=training,
        )
        # Versions differ in whether flash has a sub-backend of its own: (flash, [its], fused, its, unfused, available).
        flash, *middle, unfused, _ = utils.get_attention_backend(parameters)
        fused = middle[-2]
        answer: Kind | str = (
            Kind.FLASH if flash else Kind.FUSED if fused else Kind.UNFUSED if unfused
            else f"Transformer Engine has no kernel for widths {shape.qk}/{shape.v}"
        )  # fmt: skip
        if not training:
            self._asked[shape] = answer
            if len(self._asked) > _ASKED:
                self._asked.popitem(last=False)
        return answer

    def prepare(self, shape: AttentionShape, limits: Limits) -> EngineState:
        self.require(shape)
        return EngineState(shape, limits, {})

    def plan(self, state: State, batch: BatchLayout, *, scale: float, reuse: Plan | None = None) -> EnginePlan:
        super().plan(state, batch, scale=scale)  # refuses missing or inexact host lengths
        assert isinstance(state, EngineState)
        assert batch.q_lens_host is not None
        assert batch.kv_lens_host is not None
        lens = list(zip(batch.q_lens_host, batch.kv_lens_host, strict=True))
        causal, square = state.shape.causal, all(q_len == kv_len for q_len, kv_len in lens)
        live = [pair for pair in lens if pair != (0, 0)]
        even = (len(live), *live[0]) if len(set(live)) == 1 and all(live[0]) else None
        mask = _mask(causal, even=even is not None, square=square)
        module = self._module(state, "bshd" if even else "thd", mask, scale)
        blind = blind_rows(batch, causal=causal, device=self.device)
        if not isinstance(reuse, EnginePlan):
            return EnginePlan(state, batch, scale, module, even, blind)
        reuse.state, reuse.batch, reuse.scale = state, batch, scale
        reuse.module, reuse.even, reuse.blind = module, even, blind
        return reuse

    def _module(self, state: EngineState, layout: str, mask: str, scale: float) -> Any:
        key = (layout, mask, scale)
        if key not in state.modules:
            shape = state.shape
            state.modules[key] = import_module(_DPA).DotProductAttention(
                shape.heads, (shape.qk, shape.v), num_gqa_groups=shape.heads, attention_dropout=0.0, qkv_format=layout,
                attn_mask_type=mask, softmax_scale=scale,
            )  # fmt: skip
        return state.modules[key]

    def run_prefill(
        self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, need_lse: bool, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        assert isinstance(plan, EnginePlan)
        if need_lse:
            raise AttentionError(f"{self.name} returns no LSE")
        batch, module, width = plan.batch, plan.module, v.shape[2]
        tokens = batch.num_tokens if k.shape[0] else 0
        rows: list[Tensor] = []
        if tokens:
            module.train(torch.is_grad_enabled())
            kv_tokens = sum(batch.kv_lens_host or ())
            parts = [_separate(q[:tokens]), _separate(k[:kv_tokens]), _separate(v[:kv_tokens])]
            if plan.even is not None:
                n, q_len, kv_len = plan.even
                parts = [
                    part.view(n, length, *part.shape[1:])
                    for part, length in zip(parts, (q_len, kv_len, kv_len), strict=True)
                ]  # fmt: skip
                found = module(*parts)
            else:
                found = module(
                    *parts, cu_seqlens_q=batch.query_start_loc, cu_seqlens_kv=batch.kv_start_loc, max_seqlen_q=batch.max_q,
                    max_seqlen_kv=batch.max_kv,
                )  # fmt: skip
            found = found.reshape(tokens, q.shape[1], width)
            rows.append(found if plan.blind is None else found.masked_fill(plan.blind[:, None, None], 0.0))
        if tokens < q.shape[0]:
            rows.append(q.new_zeros(q.shape[0] - tokens, q.shape[1], width))
        result = rows[0] if len(rows) == 1 else torch.cat(rows)
        return result.contiguous() if out is None else out.copy_(result), None


def _load_cudnn_of_torch() -> None:
    """Loads all parts of the cuDNN that torch carries, so that Transformer Engine is linked with these.

    It would look in the system's path, and with another cuDNN there it falls back to unfused attention without a word, or two
    versions meet in one process and neither can be used.
    """
    cudnn = find_spec("nvidia.cudnn") if find_spec("nvidia") else None
    for home in (cudnn.submodule_search_locations or ()) if cudnn else ():
        os.environ.setdefault("CUDNN_HOME", home)
        for part in sorted(Path(home, "lib").glob("libcudnn*.so.*")):
            ctypes.CDLL(str(part), mode=ctypes.RTLD_GLOBAL)


def _mask(causal: bool, *, even: bool, square: bool) -> str:
    """Transformer Engine's name of the mask: its "causal" has the diagonal at the top left."""
    kind = ("causal" if square else "causal_bottom_right") if causal else "no_mask"
    if even:
        return kind
    return f"padding_{kind}" if causal else "padding"


def _separate(rows: Tensor) -> Tensor:
    """`rows` as the whole beginning of a storage of its own: the library tells layouts by storages and offsets."""
    alone = rows.is_contiguous() and rows.storage_offset() == 0
    return rows if alone else rows.clone(memory_format=torch.contiguous_format)
