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

from mla_serve.bench.attention_peers import PeerCall

__all__ = ["PeerCall"]
