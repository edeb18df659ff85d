"""Many processes at one table file, forked from one that has imported torch: `python -m tests.selection.crowd DIR MODE=N ...`.

Prints a JSON object, a value per mode. The clock is a fake, so that what takes time is the table.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from mla_serve.selection.decision import Decision
from mla_serve.selection.probe import probe
from mla_serve.selection.selector import Selector
from mla_serve.selection.table import DecisionTable
from mla_serve.shapes import AttentionShape, Bucket
from tests.selection.fakes import Fake, decode

CPU = torch.device("cpu")


class Noted(Selector):
    """A Selector that notes in `file` what it measures, a line per bucket."""

    def __init__(self, path: Path, file: Path | None = None, **other: object) -> None:
        super().__init__(
            CPU, backends=[Fake()], measure=lambda trial, part: 1.0, table=DecisionTable.load(path), **other  # type: ignore[arg-type]
        )  # fmt: skip
        self._file = file

    def measure(self, shape: AttentionShape) -> Decision:
        if self._file is not None:
            with self._file.open("a") as file:
                file.write(f"{Bucket.of(shape)}\n")
        return super().measure(shape)


def shapes(count: int) -> list[AttentionShape]:
    return [decode(batch=1 << (i % 4), kv_len=16, q_len=1 + i // 4) for i in range(count)]


def fork(work: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return child


def together(works: list[Callable[[], None]]) -> None:
    """Runs all at once, each in a process; all must succeed."""
    children = [fork(work) for work in works]
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * len(children)


def requests(path: Path, count: int) -> object:
    """Two processes ask for `count` decisions in all over five buckets; what was measured."""
    noted = path.with_suffix(".noted")

    def ask(seed: int) -> Callable[[], None]:
        def work() -> None:
            selector, draw = Noted(path, noted, on_demand=True), random.Random(seed)
            found = {selector.decide(draw.choice(shapes(5))).policy for _ in range(count // 2)}
            assert found == {"measured"}

        return work

    together([ask(1), ask(2)])
    return noted.read_text().splitlines()


def probers(path: Path, count: int) -> object:
    """`count` probers of one grid; what was measured."""
    noted = path.with_suffix(".noted")

    def work() -> None:
        assert len(probe(Noted(path, noted), shapes(24), again=False)) == 24

    together([work] * count)
    return noted.read_text().splitlines()


def writers(path: Path, count: int) -> object:
    """`count` processes write sixteen decisions each; how many the file holds."""

    def write(number: int) -> Callable[[], None]:
        def work() -> None:
            selector = Noted(path)
            for shape in shapes(16 * count)[number::count]:
                selector.measure(shape)

        return work

    together([write(number) for number in range(count)])
    return len(DecisionTable.load(path))


def kills(path: Path, count: int) -> object:
    """A prober killed `count` times; per time how many decisions it had said it had, and how many the file holds."""
    found = []
    for number in range(count):
        table = path.with_name(f"{number}-{path.name}")
        reader, writer = os.pipe()

        def work(table: Path = table, writer: int = writer) -> None:
            probe(Noted(table), shapes(400), again=False, progress=lambda *_: os.write(writer, b"."))  # type: ignore[arg-type,return-value]

        child = fork(work)
        os.read(reader, 1)  # it is at work
        time.sleep(random.uniform(0.0, 0.3))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(writer)
        said = 1
        while block := os.read(reader, 4096):
            said += len(block)
        os.close(reader)
        json.loads(table.read_text())
        held = len(DecisionTable.load(table))
        again = len(probe(Noted(table), shapes(held + 4), again=False))
        found.append((said, held, again))
    return found


MODES = {"requests": requests, "probers": probers, "writers": writers, "kills": kills}

if __name__ == "__main__":
    torch.set_num_threads(1)
    asked = [argument.split("=") for argument in sys.argv[2:]]
    print(json.dumps({mode: MODES[mode](Path(sys.argv[1]) / f"{mode}.json", int(count)) for mode, count in asked}))
