"""The plot of `bench attention`: per shape, each kernel's time over the choice's, the best of the others marked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mla_serve.bench.attention_table import RowData, groups, ratios, title
from mla_serve.errors import UserError

__all__ = ["plot"]

_MARKS = "os^Dv<>pPX*hd"
_COLOURS = (
    "tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown", "tab:pink", "tab:olive", "tab:cyan", "navy",
    "goldenrod", "darkgreen", "crimson", "black",
)  # fmt: skip
_FARTHEST = 12.0  # times the choice; what is beyond stands at the edge with its figure


def plot(rows: Sequence[RowData], path: Path, heading: str) -> None:
    """Writes a PNG: right of the line at 1 the choice is faster. Raises UserError without matplotlib, or without rows to show.

    Each kernel has a colour and a mark of its own, filled for the native form and hollow for the padded one.
    """
    try:
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise UserError("the plot needs matplotlib; install mla-serve[bench], or leave --plot out") from error

    shown = [(group, ratios(group)) for group in groups(rows)]
    shown = [(group, found) for group, found in shown if found]
    if not shown:
        raise UserError("there is nothing to plot: no shape has a time of the choice beside another")
    names = sorted({str(row["name"]) for group, _ in shown for row in group if row["name"] != "chosen"})
    style = {name: (_COLOURS[number % len(_COLOURS)], _MARKS[number % len(_MARKS)]) for number, name in enumerate(names)}

    figure, axes = pyplot.subplots(figsize=(13, 2.4 + 0.42 * len(shown)), layout="constrained")
    drawn: dict[str, Any] = {}
    for line, (_, found) in enumerate(shown):
        best = min(found.values())
        axes.plot(
            [1.0, min(best, _FARTHEST)], [line, line], color="0.2", linewidth=4, alpha=0.35, solid_capstyle="butt", zorder=1
        )
        for name, ratio in sorted(found.items()):
            colour, mark = style[name.partition("+")[0]]
            hollow = "+" in name
            (point,) = axes.plot(
                min(ratio, _FARTHEST), line, mark, color=colour, markersize=8, markeredgewidth=1.5, linestyle="none",
                markerfacecolor="white" if hollow else colour, zorder=3,
            )  # fmt: skip
            drawn.setdefault(name, point)
            if ratio > _FARTHEST:
                axes.annotate(f"{ratio:.0f}x", (_FARTHEST, line), (7, 0), textcoords="offset points", va="center", fontsize=7)
        axes.annotate(f"{best:.2f}", (0.0, line), (4, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
                      va="center", fontsize=8)  # fmt: skip
    axes.axvline(1.0, color="black", linewidth=1.2, zorder=2)
    axes.axvspan(1 / 1.02, 1.02, color="0.85", zorder=0)
    axes.set_xscale("log")
    lowest = min(0.9, *(min(found.values()) for _, found in shown))
    axes.set_xlim(lowest * 0.86, _FARTHEST * 1.15)
    ticks = [tick for tick in (0.5, 0.7, 1, 1.2, 1.5, 2, 3, 4, 6, 8, 12) if tick >= lowest * 0.9]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(
        range(len(shown)), [f"{title(group[0])}  [{group[0].get('kernel') or '-'}]" for group, _ in shown], fontsize=8
    )
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.grid(axis="x", color="0.9")
    axes.set_xlabel("time over the choice's; right of 1 the choice is faster; bar and figure: the best other; grey: within 2 %")
    axes.set_title(heading, fontsize=10, wrap=True)
    figure.legend(
        drawn.values(), drawn.keys(), loc="outside lower center", ncols=6, fontsize=8, title="filled: native, hollow: padded",
        title_fontsize=8,
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
