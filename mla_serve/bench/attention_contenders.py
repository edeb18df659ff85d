"""Who takes part in `bench attention`: the choice, our kernels alone, and the peers, all as PeerCalls."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from mla_serve.backends.base import Backend, Plan
from mla_serve.backends.registry import load_backends
from mla_serve.bench.attention_peers import PeerCall, PeerModule
from mla_serve.errors import UserError
from mla_serve.selection import Kernel, Selector, candidates
from mla_serve.selection.candidates import native
from mla_serve.selection.gate import describe
from mla_serve.selection.inputs import Call, limits_of
from mla_serve.selection.measure import Trial
from mla_serve.shapes import MLADims, Phase

__all__ = ["CHOSEN", "OWN", "Chosen", "kernels", "our_calls", "peer_calls"]

CHOSEN = "chosen"

OWN = ("triton-mla", "torch-mla")
"""Kernels of this package: where peers take part, other libraries' kernels are called by those alone."""


def kernels(device: torch.device, only: Sequence[str]) -> list[Backend]:
    """The backends whose names match one of the patterns; all of them without any. Raises UserError if none matches."""
    loaded = load_backends(device)
    if not only:
        return loaded
    found = [backend for backend in loaded if any(fnmatchcase(backend.name, pattern) for pattern in only)]
    if not found:
        names = ", ".join(backend.name for backend in loaded)
        raise UserError(f"no kernel is called {' or '.join(only)}; there are {names}")
    return found


class Chosen:
    """What the Selector's table says, run as an engine runs it.

    An eager call looks its kernel up every time; one in a CUDA graph did so when the graph was captured.
    """

    def __init__(self, selector: Selector, call: Call) -> None:
        shape = call.shape
        limits = limits_of((call.batch.q_lens_host or (), call.batch.kv_lens_host or ()))
        self.call = call
        if shape.absorbed:
            decision = selector.decide(shape)
            backend = selector.backend_of(decision)
            held = Kernel(backend, backend.prepare(shape, limits), decision)
            self._look_up: Callable[[], Kernel] = lambda: held
        else:
            dims = MLADims(heads=shape.heads, nope=shape.qk - shape.rope, rope=shape.rope, v=shape.v, latent=512)
            bound = selector.bind(dims, dtype=shape.dtype, page_size=64, limits=limits)
            tokens, kv_tokens = call.batch.num_tokens, sum(call.batch.kv_lens_host or ())
            if shape.phase is Phase.PREFILL:
                self._look_up = lambda: bound.prefill(shape.batch, tokens, lse=shape.lse)
            else:
                self._look_up = lambda: bound.context(shape.batch, tokens, kv_tokens)
        self.current: Plan = self._look_up().plan(call.batch, scale=call.scale)

    @property
    def kernel(self) -> Kernel:
        return self._look_up()

    def run(self) -> object:
        kernel, shape = self._look_up(), self.call.shape
        if shape.absorbed:
            cache_scale = self.call.cache_scale
            return kernel.run_decode(*self.call.tensors, self.current, cache_scale=cache_scale, need_lse=shape.lse)
        return kernel.run_prefill(*self.call.tensors, self.current, need_lse=shape.lse)

    def plan(self) -> object:
        self.current = self._look_up().plan(self.call.batch, scale=self.call.scale, reuse=self.current)
        return self.current

    def peer_call(self) -> PeerCall:
        kernel = self.kernel
        return PeerCall(
            CHOSEN, self.run, _as_it_is, self.plan, kernel.decision.padding, capturable=native(kernel.backend).capturable
        )  # fmt: skip


def our_calls(selector: Selector, call: Call, names: Collection[str] | None) -> Iterator[PeerCall]:
    """Our kernels (all that the Selector knows, or the named ones), native and padded, each by itself."""
    for candidate in candidates(call.shape, selector.backends):
        name, padding = candidate.native.name, candidate.padding
        if names is not None and name not in names:
            continue
        if candidate.verdict is not None:
            yield PeerCall(name, padding=padding, why_not=candidate.reason)
            continue
        try:
            trial = Trial.make(candidate, call)
        except Exception as error:  # noqa: BLE001 - a kernel may raise anything; its reason is kept and the others go on
            yield PeerCall(name, padding=padding, why_not=f"raised {describe(error)}")
            continue
        yield PeerCall(name, trial.run, _as_it_is, trial.plan, padding, capturable=candidate.native.capturable)


def peer_calls(modules: Sequence[PeerModule], call: Call, allowed: Callable[[str], str | None]) -> Iterator[PeerCall]:
    """The peers' calls; `allowed` gives the reason why a name may not take part, or None."""
    for module in modules:
        name = module.__name__.rpartition(".")[2]
        try:
            for peer in module.calls(call.shape, call):
                why_not = allowed(peer.name)
                yield peer if why_not is None else replace(peer, why_not=why_not)
        except Exception as error:  # noqa: BLE001 - a peer may raise anything; its reason is kept and the others go on
            yield PeerCall(name, why_not=f"raised {describe(error)}")


def _as_it_is(raw: Any) -> tuple[Tensor, Tensor | None]:
    """A backend's own result is out and natural-log LSE."""
    out, lse = raw
    return out, lse
