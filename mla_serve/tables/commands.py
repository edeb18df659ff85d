"""`mla-serve table ...`: decision files shown, merged and compared."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mla_serve.errors import UserError

if TYPE_CHECKING:
    from mla_serve.selection.compare import Change

table = typer.Typer(no_args_is_help=True, help="Decision files.")

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def _emit(data: Any) -> None:
    print(json.dumps(data, indent=2))


@table.command("show")
def show(
    file: Annotated[Path | None, typer.Argument(help="Decision file; default: the one that serve reads.")] = None,
    as_json: Json = False,
) -> None:
    """The decisions in a file, of every host it has seen."""
    from mla_serve.selection import DecisionTable, default_table_path, render_table

    path = file or default_table_path()
    if not path.exists():
        raise UserError(f"there is no decision file {path}; `mla-serve probe` writes one")
    held = list(DecisionTable.load(path, strict=True))
    _emit([decision.to_json() for decision in held]) if as_json else render_table(held)


@table.command("merge")
def merge(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Decision files, of one host or of several.")],
    out: Annotated[Path, typer.Option(help="File to write; what it already holds is merged too.")],
    as_json: Json = False,
) -> None:
    """Write the decisions of all FILEs into one. Per bucket and host the one measured last stays; none is lost."""
    from mla_serve.selection.compare import merge as run

    counts = run(files, out)
    if as_json:
        _emit(counts)
        return
    for name, count in counts["from"].items():
        print(f"{count:6}  {name}")
    print(f"{counts['decisions']:6}  {out}, of {counts['hosts']} host{'' if counts['hosts'] == 1 else 's'}")


@table.command("diff")
def diff(
    before: Annotated[Path, typer.Argument(help="Decision file.")],
    after: Annotated[Path, typer.Argument(help="Decision file, perhaps made later or on another host.")],
    as_json: Json = False,
) -> None:
    """What changed from one file to the other: per bucket the winner, and its time after over its time before."""
    from mla_serve.selection import DecisionTable
    from mla_serve.selection.compare import diff as run

    changes = run(DecisionTable.load(before, strict=True), DecisionTable.load(after, strict=True))
    if as_json:
        _emit([change.to_json() for change in changes])
        return
    rows = [("bucket", "before", "after", "before ms", "after ms", "ratio", "change"), *map(_cells, changes)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    both = [change for change in changes if change.before and change.after]
    changed = sum(change.winner_changed for change in both)
    print(
        f"in both files: {len(both)}, of these with another winner: {changed}; "
        f"only in {before}: {sum(change.after is None for change in changes)}; "
        f"only in {after}: {sum(change.before is None for change in changes)}",
        file=sys.stderr,
    )


def _cells(change: Change) -> tuple[str, ...]:
    before, after = change.times
    what = "new" if change.before is None else "gone" if change.after is None else "winner" if change.winner_changed else ""
    return (
        str(change.bucket), change.before.label if change.before else "-", change.after.label if change.after else "-",
        _figure(before), _figure(after), _figure(change.ratio), what,
    )  # fmt: skip


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:#.4g}".rstrip(".")
