"""The rows of `bench attention` as a table on a terminal: a line per shape, a column per kernel, times of the best."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from mla_serve.bench.attention_rows import bucket_of

__all__ = ["RowData", "groups", "label", "lines", "ratios", "title"]

RowData = Mapping[str, Any]


def label(row: RowData) -> str:
    """The name; "+pad" for a padded form, with the width ("+pad256") where V is padded beyond the Q/K width."""
    padding = row["padding"]
    if not padding or row["name"] == "chosen":
        return str(row["name"])
    further = row["phase"] != "decode" and padding["v"] > max(row["qk"], row["v"])
    return f"{row['name']}+pad{padding['v'] if further else ''}"


def title(row: RowData) -> str:
    """The shape of a row in a few characters: "decode 16 x 16h, 8,192 keys", "prefill 1 x 16h, 4,096"."""
    what = f"{row['phase']} {row['batch']} x {row['heads']}h, "
    size = f"{row['kv_len']:,} keys" if row["phase"] == "decode" else f"{row['q_len']:,}"
    if row["phase"] == "context":
        size += f" on {row['kv_len']:,}"
    if row["phase"] == "decode" and row["q_len"] > 1:
        size += f", {row['q_len']} q"
    usual = (576, 512) if row["phase"] == "decode" else (192, 128)
    widths = "" if (row["qk"], row["v"]) == usual else f", {row['qk']}/{row['v']}"
    dtype = "" if row["dtype"] == "bfloat16" else f", {row['dtype']}"
    return what + size + widths + dtype + (", ragged" if row["ragged"] else "")


def groups(rows: Sequence[RowData]) -> Iterator[list[RowData]]:
    """The rows of each shape; those of one shape stand together in a results file."""
    for _, group in groupby(rows, key=bucket_of):
        yield list(group)


def ratios(group: Sequence[RowData]) -> dict[str, float]:
    """Each timed kernel's time over the choice's, by label; empty where the choice was not timed."""
    timed = {label(row): row["us"] for row in group if row["us"] is not None}
    chosen = timed.pop("chosen", None)
    return {} if chosen is None else {name: us / chosen for name, us in timed.items()}


def lines(rows: Sequence[RowData], heading: str) -> Iterator[str]:
    """The table: microseconds, the floor, the choice and what it chose, the best of the others, and all in order of time."""
    yield heading
    yield f"{'shape':42} {'floor':>9} {'chosen':>9} {'/floor':>6} {'best other':>10} {'ratio':>6}  chosen kernel; others, in us"
    for group in groups(rows):
        timed = sorted((row for row in group if row["us"] is not None), key=lambda row: float(row["us"]))
        chosen = next((row for row in timed if row["name"] == "chosen"), None)
        others = [row for row in timed if row["name"] != "chosen"]
        best = others[0]["us"] if others else None
        floor = group[0]["floor_us"]
        us = chosen["us"] if chosen else None
        cells = (
            f"{title(group[0]):42} {_us(floor):>9} {_us(us):>9} {_over(us, floor):>6} {_us(best):>10} {_over(best, us):>6}  "
        )
        yield cells + f"{group[0].get('kernel') or '-'}; " + ", ".join(f"{label(row)} {_us(row['us'])}" for row in others)
    wrong = [row for row in rows if row["verdict"] in ("disqualified", "crashed")]
    for row in wrong:
        yield f"{row['verdict']}: {label(row)} at {title(row)}: {row.get('reason')}"


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def _over(value: float | None, other: float | None) -> str:
    return "-" if value is None or not other else f"{value / other:.3f}" if value / other < 10 else f"{value / other:.1f}"
