"""Each target of the kernel work with its figure, met or missed, from the results files of one run on the GPU host.

    python benchmarks/verdicts.py benchmarks/results/h200-attention.json --torch benchmarks/results/h200-attention-torch.json \\
        --emulated benchmarks/results/h200-attention-sm80-emulated.json --probes benchmarks/results/h200-probes.json

A target whose file or rows are missing is "not measured", never met. Exit status 0 if all are met.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from mla_serve.bench.attention_table import RowData, groups, label, title
from mla_serve.bench.grids import DECODE, NARROW, PREFILL

SAME = 1.02
"""A choice at most 2 % slower than the best counts as the best."""

TE = "transformer-engine"


@dataclass(frozen=True, slots=True)
class Verdict:
    """`met` None: not measured."""

    target: str
    figure: str
    met: bool | None

    def __str__(self) -> str:
        return f"{ {True: 'met', False: 'MISSED', None: 'not measured'}[self.met]:>12}  {self.target}: {self.figure}"


def times(group: Iterable[RowData]) -> dict[str, float]:
    """Microseconds by label, of the rows that were timed."""
    return {label(row): float(row["us"]) for row in group if row["us"] is not None}


def not_slower(rows: Sequence[RowData], target: str = "chosen at most 2 % behind the best, every shape") -> Verdict:
    """The choice against the fastest other row of each shape."""
    over: dict[str, tuple[float, str]] = {}
    for group in groups(rows):
        timed = times(group)
        chosen = timed.pop("chosen", None)
        if timed and chosen is None:
            over[title(group[0])] = (float("inf"), "no time of the choice")
        elif timed and chosen is not None:
            best = min(timed, key=timed.__getitem__)
            over[title(group[0])] = (chosen / timed[best], best)
    if not over:
        return Verdict(target, "no rows", None)
    behind = {shape: found for shape, found in over.items() if found[0] > SAME}
    worst = max(over, key=lambda shape: over[shape][0])
    figure = f"{len(over) - len(behind)} of {len(over)} shapes; worst {over[worst][0]:.3f}x {over[worst][1]} at {worst}"
    if behind:
        figure += "; behind at " + "; ".join(f"{shape} ({ratio:.3f}x {name})" for shape, (ratio, name) in behind.items())
    return Verdict(target, figure, not behind)


def times_faster(rows: Sequence[RowData], peer: str, at_least: float, target: str, shapes: int | None) -> Verdict:
    """Geometric mean of the peer's time over the choice's; over all of `shapes` or it is not measured."""
    ratios = [timed[peer] / timed["chosen"] for group in groups(rows) if peer in (timed := times(group)) and "chosen" in timed]
    if not ratios:
        return Verdict(target, f"no shape has both a time of the choice and of {peer}", None)
    mean = geometric_mean(ratios)
    figure = f"{mean:.3f}x over {len(ratios)} shapes ({min(ratios):.2f} to {max(ratios):.2f}), at least {at_least}x asked"
    if shapes is not None and len(ratios) < shapes:
        return Verdict(target, f"{figure}; {shapes - len(ratios)} of {shapes} shapes are missing", None)
    return Verdict(target, figure, mean >= at_least)


def decode_grid(rows: Sequence[RowData]) -> list[RowData]:
    """The rows of the eleven decode shapes of the base grid."""
    return [
        row
        for row in rows
        if row["phase"] == "decode" and row["q_len"] == 1 and not row["ragged"]
        and (row["batch"], row["heads"], row["kv_len"]) in DECODE
    ]  # fmt: skip


def prefill_grid(rows: Sequence[RowData]) -> list[RowData]:
    """The rows of the six prefill shapes of the base grid."""
    return [
        row
        for row in rows
        if row["phase"] == "prefill" and not row["ragged"] and (row["qk"], row["v"]) == (192, 128)
        and (row["batch"], row["heads"], row["q_len"]) in PREFILL
    ]  # fmt: skip


def torch_alone(rows: Sequence[RowData]) -> list[Verdict]:
    """With torch's kernels alone: the choice beats always-native and always-padded somewhere, and loses to neither anywhere."""
    found = []
    for form, padded in (("native", False), ("padded", True)):
        ratios = {}
        for group in groups([row for row in rows if row["phase"] == "prefill"]):
            timed = times(group)
            rivals = [us for name, us in timed.items() if name != "chosen" and ("+pad" in name) is padded]
            if rivals and "chosen" in timed:
                ratios[title(group[0])] = min(rivals) / timed["chosen"]
        target = f"torch alone: chosen beats always-{form} somewhere and never loses to it"
        if not ratios:
            found.append(Verdict(target, "no rows", None))
            continue
        wins = sum(ratio > SAME for ratio in ratios.values())
        losses = [f"{shape} ({1 / ratio:.3f}x)" for shape, ratio in ratios.items() if 1 / ratio > SAME]
        best = max(ratios, key=ratios.__getitem__)
        figure = f"wins {wins} of {len(ratios)} shapes, at most {ratios[best]:.2f}x ({best})"
        figure += f"; loses at {', '.join(losses)}" if losses else "; loses nowhere by over 2 %"
        found.append(Verdict(target, figure, wins > 0 and not losses))
    return found


def transformer_engine(rows: Sequence[RowData]) -> list[Verdict]:
    """Rows of both forms for five shapes, and one shape that is unfused natively and better padded."""
    both = [title(group[0]) for group in groups(prefill_grid(rows)) if {TE, f"{TE}+pad"} <= times(group).keys()]
    found = [
        Verdict(f"{TE}: native and padded rows for five shapes", f"{len(both)}: {', '.join(both)}", len(both) >= 5 or None)
    ]
    target = f"{TE}: unfused natively, fused padded, and padded the faster, or the only one that is right"
    narrow = {bool(row["padding"]): row for row in rows if row["name"] == TE and row["v"] == NARROW.v}
    if len(narrow) < 2 or narrow[True]["us"] is None:
        reasons = "; ".join(f"{label(row)}: {row.get('reason') or row['us']}" for row in narrow.values())
        return [*found, Verdict(target, reasons or "no rows", None)]
    native, padded = narrow[False], narrow[True]
    took = [f"{row['us']:.1f} us" if row["us"] else str(row.get("reason")) for row in (native, padded)]
    said = "; ".join(f"{label(row)} {time} ({row.get('settings')})" for row, time in zip((native, padded), took, strict=True))
    classes = [str(row.get("settings") or "").lower() for row in (native, padded)]
    as_asked = "unfused" in classes[0] and "fused" in classes[1] and "unfused" not in classes[1]
    return [*found, Verdict(target, said, as_asked and (native["us"] is None or padded["us"] < native["us"]))]


def right(rows: Sequence[RowData]) -> Verdict:
    """No row of a kernel of ours is wrong or crashed."""
    wrong = [row for row in rows if row["verdict"] in ("disqualified", "crashed")]
    ours = [f"{label(row)} at {title(row)}: {row.get('reason')}" for row in wrong if row["name"] in ("chosen", "triton-mla")]
    worst = max((float(row["error"]) for row in rows if row["us"] is not None and row["error"] is not None), default=0.0)
    figure = f"largest relative L2 of a timed row {worst:.2g}; {len(wrong)} rows of any kernel wrong or crashed"
    return Verdict("every answer of ours right", "; ".join([figure, *ours]), not ours if rows else None)


def probes(data: dict[str, Any] | None, most: float = 90.0) -> list[Verdict]:
    """Seconds of each probe with compiled kernels cached."""
    if data is None:
        return [Verdict(f"probe of a full grid within {most:g} s", "no file", None)]
    found = []
    for name, probed in data["models"].items():
        figure = f"{probed['seconds']:.0f} s for {probed['buckets']} buckets"
        found.append(Verdict(f"probe of {name} within {most:g} s", figure, probed["seconds"] <= most))
    return found


def verdicts(
    main: dict[str, Any], torch: dict[str, Any] | None, emulated: dict[str, Any] | None, probed: dict[str, Any] | None
) -> list[Verdict]:
    """All targets that results files can show, in the order of the README's claims."""
    rows = main["rows"]
    emulation = emulated["rows"] if emulated and emulated.get("emulated") == "sm80" else []
    return [
        right(rows),
        not_slower(rows),
        times_faster(decode_grid(rows), "fa3", 1.04, "decode against FA3 MLA, vLLM's default on Hopper", len(DECODE)),
        times_faster(
            decode_grid(emulation), "vllm-triton-mla", 3.0, "EMULATED sm_80: decode against vLLM's Triton MLA", len(DECODE)
        ),
        times_faster(prefill_grid(rows), "fa3", 1.03, "prefill against FA3, vLLM's only one on Hopper", len(PREFILL)),
        *torch_alone(torch["rows"] if torch else []),
        *transformer_engine(rows),
        *probes(probed),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("main", type=Path)
    parser.add_argument("--torch", type=Path)
    parser.add_argument("--emulated", type=Path)
    parser.add_argument("--probes", type=Path)
    asked = parser.parse_args()

    def read(path: Path | None) -> dict[str, Any] | None:
        return json.loads(path.read_text()) if path is not None and path.is_file() else None

    if (results := read(asked.main)) is None:
        parser.error(f"there is no results file {asked.main}")
    found = verdicts(results, read(asked.torch), read(asked.emulated), read(asked.probes))
    for verdict in found:
        print(verdict)
    return 0 if all(verdict.met for verdict in found) else 1


if __name__ == "__main__":
    sys.exit(main())
