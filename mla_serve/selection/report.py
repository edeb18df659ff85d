"""Decisions for people: one sentence, one table of candidates, one table of buckets; plain lines where there is no terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mla_serve.selection.decision import CandidateResult, Decision
from mla_serve.selection.paddings import describe

_STYLES = {"chosen": "bold green", "tie": "green", "disqualified": "red", "crashed": "red", "timed-out": "red"}


def decision_sentence(decision: Decision) -> str:
    """Why this kernel serves this bucket, in one sentence."""
    chosen, shape = decision.chosen, decision.bucket.shape
    name = decision.label
    if decision.padding is not None:
        name += f" ({describe(shape, decision.padding)})"
    head = f"{name} serves {decision.bucket}"
    if decision.note is not None and decision.policy in ("measured", "batch-invariant"):
        return f"{head}: {decision.note}."
    if decision.policy == "measured" and chosen is not None and chosen.ms is not None:
        return f"{head}: {_ms(chosen.ms)} ms, {_against(decision, chosen)}."
    reason = chosen.reason if chosen is not None and chosen.reason else "nothing else can"
    how = f"by kernel class ({reason}), nothing was timed" if decision.policy == "availability" else reason
    return f"{head}: {how}{f'; {decision.note}' if decision.note else ''}."


def in_short(decision: Decision) -> str:
    """The kernel, its form and the reason in a few words, for a line that says the bucket's phase already."""
    form = "native" if decision.padding is None else f"padded, {describe(decision.bucket.shape, decision.padding)}"
    chosen = decision.chosen
    if decision.policy == "measured" and chosen is not None and chosen.ms is not None:
        beside = _against(decision, chosen)
        why = f"measured, {beside}" if beside.startswith("the only") else f"measured {beside}"
        why += " in the nearest bucket" if decision.note else ""
    else:
        why = {"availability": "by kernel class", "pinned": "pinned"}.get(decision.policy, decision.policy)
    return f"{decision.winner} ({form}), {why}"


def render_decision(decision: Decision, console: Console | None = None) -> None:
    """Prints the sentence, every candidate with its figures, verdict and reason, and on what it was measured.

    Kernels that this host does not have share a line by reason.
    """
    console = console or Console()
    header = ("backend", "padding", "run ms", "plan ms", "spread", "error", "LSE error", "verdict", "reason")
    here = [row for row in decision.candidates if row.verdict != "unavailable"]
    rows = [_candidate_cells(decision, row) for row in sorted(here, key=_fastest_first)]
    styles = [_STYLES.get(cells[7], "") for cells in rows]
    _say(console, decision_sentence(decision))
    _print(console, header, rows, styles)
    for reason, names in _missing(decision.candidates).items():
        _say(console, f"not here: {', '.join(names)} ({reason})")
    facts = [f"{name} {value}" for name, value in decision.fingerprint.to_json().items() if not isinstance(value, dict)]
    facts += [f"{name} {version}" for name, version in decision.fingerprint.libraries.items()]
    if decision.floor_ms is not None:
        facts.insert(0, f"floor {_ms(decision.floor_ms)} ms")
    if decision.measured_at:
        facts.insert(0, f"measured {decision.measured_at} for {decision.layers} layers")
    _say(console, ", ".join(facts))


def render_table(decisions: Iterable[Decision], console: Console | None = None) -> None:
    """Prints one line per decision: bucket, kernel, its time, the best native and the best padded time, the floor."""
    header = ("bucket", "kernel", "padding", "run ms", "native ms", "padded ms", "floor ms", "policy")
    rows, styles = [], []
    for decision in decisions:
        shape, chosen = decision.bucket.shape, decision.chosen
        best = [min((row.ms for row in decision.candidates if row.ms and bool(row.padding) == padded), default=None)
                for padded in (False, True)]  # fmt: skip
        rows.append((
            str(decision.bucket), decision.winner, describe(shape, decision.padding) if decision.padding else "native",
            _ms(chosen.ms if chosen else None), _ms(best[0]), _ms(best[1]), _ms(decision.floor_ms),
            f"{decision.policy}, borrowed" if decision.note and decision.policy == "measured" else decision.policy,
        ))  # fmt: skip
        styles.append("bold" if decision.padding else "")
    _print(console or Console(), header, rows, styles)


def choices(decisions: Iterable[Decision]) -> str:
    """A log's table: bucket, kernel, padding, its time, the runner-up and its, why.

    A line per bucket with figures; those without share a line by phase, kernel, form and reason.
    """
    header = ("bucket", "kernel", "padding", "run ms", "runner-up", "reason")
    rows = [header]
    alike: Counter[tuple[str, ...]] = Counter()
    for decision in decisions:
        chosen, shape = decision.chosen, decision.bucket.shape
        timed = [row for row in decision.candidates if row.ms is not None and row is not chosen]
        second = min(timed, key=lambda row: row.cost(decision.layers) or 0.0, default=None)
        why = decision.note or (chosen.reason if chosen is not None else None) or decision.policy
        if decision.policy == "measured" and chosen is not None and not decision.note:
            why = f"measured, {_against(decision, chosen)}"
        if chosen is None or chosen.ms is None:
            padding = "native" if decision.padding is None else "padded"
            alike[shape.phase.value, decision.winner, padding, why] += 1
            continue
        rows.append((
            str(decision.bucket), decision.winner, describe(shape, decision.padding) if decision.padding else "native",
            _ms(chosen.ms), "" if second is None else f"{second.label} {_ms(second.ms)}", why,
        ))  # fmt: skip
    for (phase, winner, padding, why), count in alike.items():
        rows.append((f"{phase}, {count} buckets", winner, padding, "", "", why))
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def _missing(candidates: Sequence[CandidateResult]) -> dict[str, list[str]]:
    """Names of unavailable kernels by reason."""
    found: dict[str, list[str]] = {}
    for row in candidates:
        if row.verdict == "unavailable":
            found.setdefault(row.reason or "no reason given", []).append(row.backend)
    return found


def _against(decision: Decision, chosen: CandidateResult) -> str:
    """The winner beside the best of the other form, or beside the next best."""
    timed = [row for row in decision.candidates if row.ms is not None and row is not chosen]
    other_form = [row for row in timed if (row.padding is None) != (chosen.padding is None)]
    rival = min(other_form or timed, key=lambda row: row.ms or 0.0, default=None)
    if rival is None or rival.ms is None or chosen.ms is None:
        return "the only kernel that can"
    form = "native" if rival.padding is None else "padded"
    if rival.verdict == "tie":
        return f"as fast as {form} {rival.label} at {_ms(rival.ms)} ms"
    cheaper = (rival.cost(decision.layers) or 0.0) / (chosen.cost(decision.layers) or 1.0)
    return f"{cheaper:.3g}x faster than {form} {rival.label} at {_ms(rival.ms)} ms"


def _candidate_cells(decision: Decision, row: CandidateResult) -> tuple[str, ...]:
    padding = describe(decision.bucket.shape, row.padding) if row.padding else "native"
    reason = ", ".join(filter(None, (row.reason, "leaks NaN" if row.leaks_nan and row.verdict != "disqualified" else None)))
    spread = "" if row.spread is None else f"{row.spread:.1%}"
    return (
        row.backend, padding, _ms(row.ms), _ms(row.plan_ms), spread, _figure(row.error), _figure(row.lse_error),
        row.verdict, reason,
    )  # fmt: skip


def _fastest_first(row: CandidateResult) -> tuple[bool, bool, float]:
    return row.verdict != "chosen", row.ms is None, row.ms or 0.0


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:#.4g}".rstrip(".")


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def _print(console: Console, header: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str]) -> None:
    if console.is_terminal:
        table = Table(*header, header_style="bold")
        for row, style in zip(rows, styles, strict=True):
            table.add_row(*(Text(cell) for cell in row), style=style)  # Text: a reason may hold brackets
        console.print(table)
        return
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        _say(console, "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _say(console: Console, text: str) -> None:
    """A line as it is: no markup, no colours of numbers, and off a terminal no wrapping."""
    console.print(text, markup=False, highlight=False, soft_wrap=not console.is_terminal)
