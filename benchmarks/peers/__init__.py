"""The peers that `mla-serve bench attention --peers benchmarks/peers` times beside our choice.

Each module calls one library through its own public API, never through an adapter of mla_serve, with that library's own best
settings, and offers

    def calls(shape: AttentionShape, call: Call) -> Iterator[PeerCall]

`call.tensors` is (q, k, v) [tokens, heads, width] of the un-absorbed form, v a view of packed storage as an engine has it, or
(q_nope, q_pe, cache) of the absorbed one; `call.batch` has lengths and block table, `call.scale` multiplies the logits. A form
that the library refuses is yielded too, with `why_not`. See `PeerCall` for what `run`, `plan` and `read` do.

A library is imported inside `calls`. Nothing may be set up under the clock: workspaces, wrappers and the first plan are made
before the PeerCall is yielded.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from mla_serve.backends.padded import Padding
from mla_serve.bench.attention_peers import PeerCall

__all__ = ["PeerCall", "attempt", "trimmed"]


def attempt(name: str, make: Callable[[], PeerCall], padding: Padding | None = None) -> PeerCall:
    """`make()`, or a refused call with the first line of what it raised: one form's failure must not cost the others."""
    try:
        return make()
    except Exception as error:  # noqa: BLE001 - a library may raise anything; its reason is kept in the row
        lines = str(error).strip().splitlines() or [""]
        return PeerCall(name, padding=padding, why_not=f"{type(error).__name__}: {lines[0][:200]}".rstrip(": "))


def trimmed(out: Tensor, width: int) -> Tensor:
    """The first `width` columns of [tokens, heads, padded], contiguous as the next layer needs them."""
    return out if out.shape[-1] == width else out[..., :width].contiguous()
