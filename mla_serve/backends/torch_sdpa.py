"""torch's scaled-dot-product kernels, each one forced: flash, memory-efficient, cuDNN and math.

The public function picks a kernel by itself and returns no LSE, so these backends call the operators underneath it. They take
dense batches only: neighbouring requests of equal lengths share a call, the others get one each, by the batch's host lengths.
Where the shape asks for batch invariance each request has a call of its own, since operators choose their tiles by the batch.
Operators disagree on where the causal diagonal of a rectangle lies (on a CPU flash aligns it top-left), so only squares are
ever sent as causal; more keys than queries become a context part and a square part, merged.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from mla_serve.backends.base import AttentionError, Backend, BatchLayout, Kind, Plan, State
from mla_serve.backends.merge import merge
from mla_serve.shapes import AttentionShape

__all__ = ["TorchCudnn", "TorchEfficient", "TorchFlash", "TorchMath", "TorchSdpa"]

_aten = torch.ops.aten
_Result = tuple[Tensor, Tensor | None]  # out [requests, heads, q, v], lse [requests, heads, q]


@dataclass(frozen=True, slots=True)
class Call:
    """A run of neighbouring requests with equal lengths: where its rows start, and its sizes."""

    q_start: int
    k_start: int
    requests: int
    q_len: int
    kv_len: int


@dataclass(slots=True)
class SdpaPlan(Plan):
    """Calls in the order of their rows; together they cover every query row of the batch."""

    calls: tuple[Call, ...] = ()


def _calls(batch: BatchLayout, *, alone: bool) -> tuple[Call, ...]:
    assert batch.q_lens_host is not None
    assert batch.kv_lens_host is not None
    calls, q_start, k_start = [], 0, 0
    for (q_len, kv_len), run in groupby(zip(batch.q_lens_host, batch.kv_lens_host, strict=True)):
        n = sum(1 for _ in run)
        if q_len and alone:
            calls += [Call(q_start + i * q_len, k_start + i * kv_len, 1, q_len, kv_len) for i in range(n)]
        elif q_len:
            calls.append(Call(q_start, k_start, n, q_len, kv_len))
        q_start, k_start = q_start + n * q_len, k_start + n * kv_len
    return tuple(calls)


class TorchSdpa(Backend):
    """What the four have in common: ragged rows to dense calls and back. A subclass forces one operator in `_kernel`."""

    needs_host_lens = True
    batch_invariant = True
    dtypes: tuple[str, ...] = ("bfloat16", "float16")

    @abstractmethod
    def _kernel(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, need_lse: bool) -> _Result:
        """One dense call, [requests, heads, length, width] each; `causal` only with as many keys as queries."""

    def supports(self, shape: AttentionShape) -> str | None:
        if shape.absorbed:
            return "takes the un-absorbed form only, not the paged latent cache"
        if shape.graph:
            return "its calls follow each batch's lengths, so a captured graph cannot be replayed with others"
        if shape.dtype not in self.dtypes:
            return f"takes {', '.join(self.dtypes)}, not {shape.dtype}"
        return None

    def plan(self, state: State, batch: BatchLayout, *, scale: float, reuse: Plan | None = None) -> SdpaPlan:
        super().plan(state, batch, scale=scale)  # refuses missing or inexact host lengths
        calls = _calls(batch, alone=state.shape.batch_invariant)
        if not isinstance(reuse, SdpaPlan):
            return SdpaPlan(state, batch, scale, calls)
        reuse.state, reuse.batch, reuse.scale, reuse.calls = state, batch, scale, calls
        return reuse

    def run_prefill(
        self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, need_lse: bool, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """As the contract says; differentiable in q, k and v through the output (the operators give no gradient to the LSE)."""
        assert isinstance(plan, SdpaPlan)
        shape = plan.state.shape
        lse_too = need_lse or shape.batch_invariant  # an operator may take another way where it gives one
        outs, lses, rows = [], [], 0
        for call in plan.calls:
            part, part_lse = self._call(q, k, v, call, causal=shape.causal, scale=plan.scale, need_lse=lse_too)
            outs.append(part)
            lses.append(part_lse)
            rows = call.q_start + call.requests * call.q_len
        if rows < q.shape[0] or not outs:  # rows of no request
            outs.append(q.new_zeros(q.shape[0] - rows, q.shape[1], v.shape[2]))
            lses.append(_no_keys(outs[-1]))
        result = outs[0] if len(outs) == 1 else torch.cat(outs)
        result = result.contiguous() if out is None else out.copy_(result)
        if not need_lse:
            return result, None
        present = [lse for lse in lses if lse is not None]
        return result, (present[0] if len(present) == 1 else torch.cat(present)).contiguous()

    def _call(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, *, causal: bool, scale: float, need_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """One Call's rows: out [rows, heads, v], lse [rows, heads]."""
        n, sq, sk = call.requests, call.q_len, call.kv_len
        if sk == 0:  # no operator may see this: flash on a CPU divides by zero
            empty = q.new_zeros(n * sq, q.shape[1], v.shape[2])
            return empty, _no_keys(empty)
        q, k, v = (  # views, [n, heads, length, width]
            rows[start : start + n * length].view(n, length, *rows.shape[1:]).transpose(1, 2)
            for rows, start, length in ((q, call.q_start, sq), (k, call.k_start, sk), (v, call.k_start, sk))
        )
        try:
            out, lse = self._attend(q, k, v, causal=causal and sq > 1, scale=scale, need_lse=need_lse)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = str(error).strip().split("\n", 1)[0]
            raise AttentionError(f"{self.name} cannot run {sq} queries on {sk} keys here: {reason}") from error
        return out.transpose(1, 2).flatten(0, 1), None if lse is None else lse.transpose(1, 2).flatten(0, 1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, need_lse: bool) -> _Result:
        """A dense call with the causal diagonal at the bottom right, made of squares."""
        sq, sk = q.shape[2], k.shape[2]
        if not causal or sq == sk:
            return self._kernel(q, k, v, causal=causal, scale=scale, need_lse=need_lse)
        if sq > sk:  # the first queries see no key at all
            out, lse = self._kernel(q[:, :, sq - sk :], k, v, causal=True, scale=scale, need_lse=need_lse)
            out = F.pad(out, (0, 0, sq - sk, 0))
            return out, None if lse is None else F.pad(lse, (sq - sk, 0), value=float("-inf"))
        if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
            raise AttentionError(f"{self.name} gives its LSE no gradient, so it cannot merge states there; use torch-math")
        cut = sk - sq
        old, old_lse = self._kernel(q, k[:, :, :cut], v[:, :, :cut], causal=False, scale=scale, need_lse=True)
        new, new_lse = self._kernel(q, k[:, :, cut:], v[:, :, cut:], causal=True, scale=scale, need_lse=True)
        assert old_lse is not None
        assert new_lse is not None
        return merge(old, old_lse, new, new_lse)


def _no_keys(out: Tensor) -> Tensor:
    """The LSE of rows without keys."""
    return torch.full(out.shape[:2], float("-inf"), dtype=torch.float32, device=out.device)


class TorchFlash(TorchSdpa):
    """FlashAttention as torch builds it: one kernel for CPUs, FlashAttention-2 for GPUs. Equal widths only."""

    name = "torch-flash"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.dtypes = ("float32", "bfloat16", "float16") if device.type == "cpu" else ("bfloat16", "float16")

    def kind(self, shape: AttentionShape) -> Kind:
        return Kind.FLASH

    def available(self) -> str | None:
        if self.device.type == "cpu":
            return None
        if self.device.type != "cuda":
            return f"needs a CPU or a CUDA device, this is {self.device.type}"
        if not torch.backends.cuda.is_flash_attention_available():
            return "this torch is built without FlashAttention"
        return _needs_sm(self.device, 8)

    def supports(self, shape: AttentionShape) -> str | None:
        reason = super().supports(shape)
        if reason is not None:
            return reason
        if shape.qk != shape.v:
            return f"needs equal QK and V widths ({shape.qk}, {shape.v})"
        if self.device.type == "cuda" and (shape.qk > 256 or shape.qk % 8):
            return f"needs widths up to 256 in multiples of 8, not {shape.qk}"
        return None

    def _kernel(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, need_lse: bool) -> _Result:
        if q.device.type == "cpu":
            out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        else:
            out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return out, lse.float() if need_lse else None


class TorchEfficient(TorchSdpa):
    """xformers' memory-efficient attention as torch builds it. Takes unequal widths."""

    name = "torch-efficient"
    dtypes = ("float32", "bfloat16", "float16")

    def kind(self, shape: AttentionShape) -> Kind:
        return Kind.FUSED

    def available(self) -> str | None:
        return _needs_sm(self.device, 5)

    def supports(self, shape: AttentionShape) -> str | None:
        reason = super().supports(shape)
        if reason is not None:
            return reason
        step = 4 if shape.dtype == "float32" else 8
        if shape.qk % step or shape.v % step:
            return f"needs widths in multiples of {step}, not ({shape.qk}, {shape.v})"
        return None

    def _kernel(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, need_lse: bool) -> _Result:
        lse_too = need_lse or torch.is_grad_enabled()  # its backward pass reads the LSE
        out, lse, *_ = _aten._scaled_dot_product_efficient_attention(q, k, v, None, lse_too, 0.0, causal, scale=scale)
        return out, lse[:, :, : q.shape[2]] if need_lse else None  # its rows are rounded up to a block


class TorchCudnn(TorchSdpa):
    """cuDNN's fused attention through torch. Which unequal widths it takes depends on the GPU and on cuDNN's version."""

    name = "torch-cudnn"

    def kind(self, shape: AttentionShape) -> Kind:
        return Kind.FUSED

    def available(self) -> str | None:
        reason = _needs_sm(self.device, 8)
        if reason is not None:
            return reason
        installed = torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]
        return None if installed else "cuDNN is not installed"

    def supports(self, shape: AttentionShape) -> str | None:
        reason = super().supports(shape)
        if reason is not None:
            return reason
        if shape.qk % 8 or shape.v % 8 or max(shape.qk, shape.v) > 256:
            return f"needs widths up to 256 in multiples of 8, not ({shape.qk}, {shape.v})"
        return None

    def _kernel(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, need_lse: bool) -> _Result:
        lse_too = need_lse or torch.is_grad_enabled()
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, lse_too, 0.0, causal, False, scale=scale)
        return out, lse.reshape(q.shape[:3]) if need_lse else None  # some versions add a last dimension of 1


class TorchMath(TorchSdpa):
    """The operator that materialises the scores. Slow, always there, and the last resort. It has no LSE, so that is ours."""

    name = "torch-math"
    dtypes = ("float32", "bfloat16", "float16")

    def kind(self, shape: AttentionShape) -> Kind:
        return Kind.UNFUSED

    def available(self) -> str | None:
        return None

    def workspace_bytes(self, shape: AttentionShape) -> int:
        return 8 * shape.batch * shape.heads * shape.q_len * shape.kv_len  # scores and weights, in float32

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, need_lse: bool) -> _Result:
        if causal and q.shape[2] < k.shape[2]:
            return self._masked(q, k, v, causal=True, scale=scale)
        return super()._attend(q, k, v, causal=causal, scale=scale, need_lse=need_lse)

    def _kernel(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, need_lse: bool) -> _Result:
        if need_lse:
            return self._masked(q, k, v, causal=causal, scale=scale)
        return _aten._scaled_dot_product_attention_math(q, k, v, None, 0.0, causal, scale=scale)[0], None

    def _masked(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> _Result:
        """Scores in float32, since the LSE must be; every query sees a key."""
        sq, sk = q.shape[2], k.shape[2]
        scores = (q.float() * scale) @ k.float().transpose(-1, -2)
        if causal:
            visible = torch.ones(sq, sk, dtype=torch.bool, device=q.device).tril(sk - sq)
            scores = scores.masked_fill(~visible, float("-inf"))
        lse = scores.logsumexp(-1)
        return ((scores - lse.unsqueeze(-1)).exp() @ v.float()).to(q.dtype), lse


def _needs_sm(device: torch.device, major: int) -> str | None:
    """None on a CUDA device of at least that compute capability, else the reason."""
    if device.type != "cuda":
        return f"needs a CUDA device, this is {device.type}"
    have = torch.cuda.get_device_capability(device)
    return None if have[0] >= major else f"needs sm_{major}0, this is sm_{have[0]}{have[1]}"
