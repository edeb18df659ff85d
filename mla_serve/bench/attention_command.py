"""`mla-serve bench attention`: the command. What it measures is in the files beside this one."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from mla_serve.bench.attention_peers import PeerModule
    from mla_serve.bench.grids import Case
    from mla_serve.selection import Decision, Selector

__all__ = ["attention"]


def attention(
    grid: Annotated[str, typer.Option(help="Named grid: cpu, or on a GPU decode, prefill, small (both) or full.")] = "cpu",
    peers: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Other people's kernels to time beside ours: benchmarks/peers.")
    ] = None,
    only: Annotated[
        str, typer.Option(metavar="NAMES", help="Choose among these kernels alone, as in torch-*,triton-mla.")
    ] = "",
    emulate: Annotated[
        str | None, typer.Option(help="sm80: leave what Ampere could run. An emulation, no Ampere result.")
    ] = None,
    decisions: Annotated[
        Path | None, typer.Option(help="The table of an earlier process; default: the one that serve reads.")
    ] = None,
    write_decisions: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Only measure the grid for the choice, into FILE; a later run reads it.")
    ] = None,
    budget: Annotated[float | None, typer.Option(min=0, help="Seconds after which no further shape is begun.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Plot the ratios; needs mla-serve[bench].")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the result, with host and versions, to this file too.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """The chosen kernel beside ours alone and every peer's, in microseconds, on the shapes of a grid, in one run.

    The choice comes from a table that an earlier process wrote: `mla-serve probe --grid`, or this with --write-decisions.
    """
    import torch

    from mla_serve.bench import attention_emulate
    from mla_serve.bench.attention_peers import load_peers
    from mla_serve.bench.grids import cases
    from mla_serve.engine.embedded.threads import available_threads
    from mla_serve.errors import UserError

    torch.set_num_threads(threads or available_threads())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if emulate is not None:
        if device.type != "cuda":
            raise UserError(f"--emulate {emulate} leaves out what an older GPU lacks, and there is no GPU here; leave it out")
        attention_emulate.begin(emulate)  # before anything compiles
    asked = cases(grid)
    modules = load_peers(peers) if peers else []
    selector = _selector(device, write_decisions or decisions, only, emulate, strict=decisions is not None)
    if write_decisions is not None:
        _probe(selector, asked, write_decisions, budget)
        return
    result: dict[str, Any] = {}
    for result in _measure(selector, asked, modules, emulate, budget):
        result = _finished({"grid": grid, **result}, out)
    _show(result, plot, as_json=as_json)


def _selector(device: torch.device, table: Path | None, only: str, emulate: str | None, *, strict: bool) -> Selector:
    """Chooses among the kernels asked for; by their runs alone, as the rows are compared."""
    from mla_serve.bench.attention import RUN_ALONE
    from mla_serve.bench.attention_contenders import kernels
    from mla_serve.bench.attention_emulate import why_not
    from mla_serve.selection import DecisionTable, Selector, default_table_path
    from mla_serve.selection.measure import InProcess

    backends = kernels(device, [name.strip() for name in only.split(",") if name.strip()])
    if emulate is not None:
        # What no kernel of Ampere's takes is left to the last resort, as anywhere.
        backends = [backend for backend in backends if why_not(backend.name) is None]
    path = table or default_table_path()
    held = DecisionTable.load(path, strict=True) if strict else DecisionTable.load(path)
    if not only and emulate is None:
        return Selector(device, table=held, layers=RUN_ALONE, clean_pool=True)
    measurer = InProcess(device, clean_pool=True)  # a child process would not be restrained as this one is
    return Selector(device, table=held, layers=RUN_ALONE, clean_pool=True, backends=backends, measurer=measurer)


def _probe(selector: Selector, asked: list[Case], path: Path, budget: float | None) -> None:
    from contextlib import closing

    from mla_serve.selection import probe

    def progress(done: int, of: int, decision: Decision | None) -> None:
        _note(f"probed {done} of {of}: {f'{decision.bucket}: {decision.label}' if decision else 'no kernel can'}")

    with closing(selector):
        found = probe(selector, [case.shape for case in asked], budget_s=budget, progress=progress)
    selector.table.save(path, strict=True)
    _note(f"{sum(decision.policy == 'measured' for decision in found)} buckets in {path}")


def _measure(
    selector: Selector, asked: list[Case], modules: list[PeerModule], emulate: str | None, budget: float | None
) -> Iterator[dict[str, Any]]:
    """The result so far, after each shape: what stops the process costs only what was not yet measured."""
    from mla_serve.bench import attention_emulate
    from mla_serve.bench.attention import Bench
    from mla_serve.bench.attention import bench as run
    from mla_serve.bench.attention_backends import described
    from mla_serve.bench.attention_contenders import OWN

    bench = Bench(
        selector, modules, own=OWN if modules else None,
        allowed=attention_emulate.why_not if emulate else lambda name: None,
    )  # fmt: skip
    head: dict[str, Any] = {"emulated": emulate, "note": attention_emulate.NOTE} if emulate else {}
    backends, shapes, began = described(selector.backends), 0, time.monotonic()
    rows: list[dict[str, Any]] = []

    def result() -> dict[str, Any]:
        seconds = round(time.monotonic() - began, 1)
        return {
            **head,
            "seconds": seconds,
            "shapes": shapes,
            "shapes_left_out": len(asked) - shapes,
            "rates": bench.measured_rates(),
            "backends": backends,
            "rows": list(rows),
        }

    yield result()
    for found in run(bench, asked, _note, until=None if budget is None else began + budget):
        rows += [row.to_json() for row in found]
        shapes += 1
        yield result()


def _finished(result: dict[str, Any], out: Path | None) -> dict[str, Any]:
    """With date, host and command, and in its file."""
    from mla_serve.bench.results import save_result, stamped

    result = stamped(result, command=" ".join(["mla-serve", *sys.argv[1:]]))
    if out is not None:
        save_result(out, result)
    return result


def _show(result: dict[str, Any], plot: Path | None, *, as_json: bool) -> None:
    from mla_serve.bench.attention_table import lines

    heading = _heading(result)
    if as_json:
        print(json.dumps(result, indent=1))
    else:
        for line in lines(result["rows"], heading):
            print(line)
    if plot is not None:
        from mla_serve.bench.attention_plot import plot as draw

        draw(result["rows"], plot, heading)


def _heading(result: dict[str, Any]) -> str:
    device = result["host"]["devices"][0]["name"]
    versions = ", ".join(f"{name} {version}" for name, version in result["host"]["versions"].items())
    emulated = f"EMULATED {result['emulated']}: {result['note']}. " if result.get("emulated") else ""
    how = "; decode by CUDA-graph replay, the rest eager, L2 flushed" if "cuda" in result["host"]["versions"] else ""
    return f"{emulated}{device}, {result['date']}, {versions}{how}"


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
