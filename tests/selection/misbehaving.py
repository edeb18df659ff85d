"""Kernels that break the process they run in. Right where they answer at all; a worker makes them as `cls(device)`.

They do their worst in `prepare`, the first thing that is asked of a candidate; `AbortsLater` only once it has been found right.
"""

from __future__ import annotations

import ctypes
import os
import time

import torch
from torch import Tensor

from mla_serve.backends.base import BatchLayout, Kind, Limits, Plan, State
from mla_serve.shapes import AttentionShape
from tests.selection.fakes import Fake


class Misbehaving(Fake):
    def __init__(self, device: torch.device) -> None:
        super().__init__(
            type(self).__name__.lower(),
            kinds=lambda _: Kind.UNFUSED,
            refuse=lambda shape: None if shape.absorbed else "takes the absorbed form only",
        )
        self.device = device

    def prepare(self, shape: AttentionShape, limits: Limits) -> State:
        self.misbehave()
        return super().prepare(shape, limits)

    def misbehave(self) -> None:
        raise AssertionError("each has a way of its own")


class Aborts(Misbehaving):
    def misbehave(self) -> None:
        os.write(2, b"terminate called without an active exception\n")
        os.abort()


class Segfaults(Misbehaving):
    def misbehave(self) -> None:
        ctypes.string_at(0)


class Exits(Misbehaving):
    def misbehave(self) -> None:
        raise SystemExit(3)


class Hangs(Misbehaving):
    def misbehave(self) -> None:
        while True:
            time.sleep(60)


class Hoards(Misbehaving):
    def misbehave(self) -> None:
        hoard = []
        while True:
            hoard.append(torch.empty(1 << 26))  # not written to: a busy host would take its time over the pages


class HoardsCuda(Misbehaving):
    def misbehave(self) -> None:
        hoard = []
        while True:
            hoard.append(torch.empty(1 << 30, dtype=torch.int8, device=self.device))


class SpoilsCuda(Misbehaving):
    """An index out of range, which no later call of that process recovers from."""

    def misbehave(self) -> None:
        torch.zeros(8, device=self.device)[torch.full((8,), 1 << 20, device=self.device)].sum().item()


class Floods(Misbehaving):
    def misbehave(self) -> None:
        while True:
            print("much ado about nothing\n" * 4096)


class AbortsLater(Misbehaving):
    """Behaves while it is judged; the first plan that is refreshed outside the gate is its last."""

    def misbehave(self) -> None:
        """Nothing yet."""

    def plan(self, state: State, batch: BatchLayout, *, scale: float, reuse: Plan | None = None) -> Plan:
        if reuse is not None and reuse.batch is batch:  # a gate never plans the same batch twice
            os.abort()
        return super().plan(state, batch, scale=scale, reuse=reuse)


class Right(Misbehaving):
    def misbehave(self) -> None:
        """Never."""

    def run_decode(self, *args, **kwargs) -> tuple[Tensor, Tensor | None]:  # type: ignore[no-untyped-def]
        time.sleep(0.001)
        return super().run_decode(*args, **kwargs)
