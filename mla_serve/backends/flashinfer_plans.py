"""FlashInfer's wrappers, lent to Plans: what each may share, and what not.

A wrapper holds one planned step. Its `plan` writes the schedule into pinned memory, starts a copy to the device and returns;
so the pinned side may not be written again until that copy has run, which on a busy stream is later. The device side may: its
next copy comes behind the kernels that read it, on the same stream.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from mla_serve.backends.base import AttentionError

_PINNED = "_pin_memory_int_workspace_buffer"


class Staging:
    """Pinned buffers of one size; each is taken again once the copy out of it has run."""

    def __init__(self) -> None:
        self._used: list[tuple[torch.Tensor, torch.cuda.Event]] = []

    def plan(self, wrapper: Any, *arguments: Any, **options: Any) -> None:
        """`wrapper.plan(...)` through a pinned buffer that no copy is reading."""
        if not hasattr(wrapper, _PINNED):
            raise AttentionError("this FlashInfer stages its plans in a way that is not known; use 0.6")
        own = getattr(wrapper, _PINNED)
        done = (copied.query() for _, copied in self._used)  # type: ignore[no-untyped-call]
        free = next((number for number, is_done in enumerate(done) if is_done), None)
        buffer = torch.empty(own.shape, dtype=own.dtype, pin_memory=True) if free is None else self._used.pop(free)[0]
        setattr(wrapper, _PINNED, buffer)
        wrapper.plan(*arguments, **options)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        self._used.append((buffer, copied))


class Pool:
    """Wrappers of one kind. A Plan holds one for as long as it lives; then another Plan gets it."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._free: list[Any] = []
        self.staging = Staging()

    def lend(self) -> Any:
        return self._free.pop() if self._free else self._make()

    def until_gone(self, plan: object, wrapper: Any) -> None:
        """Takes `wrapper` back when `plan` is garbage."""
        weakref.finalize(plan, self._free.append, wrapper).atexit = False
