"""What the page shows, as plain data: buckets with how much their kernel wins, heat maps of them, hosts, figures on top."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from mla_serve.pages.chart import Chart, chart
from mla_serve.selection.decision import CandidateResult, Decision
from mla_serve.selection.fingerprint import Fingerprint
from mla_serve.selection.paddings import describe
from mla_serve.selection.report import decision_sentence
from mla_serve.shapes import AttentionShape, Phase

STEPS = (1.02, 1.1, 1.5, 2.0, 4.0, 10.0)
"""Upper ends of the heat map's colours; the last colour is all above."""

HOWS = {
    "measured": "measured here",
    "borrowed": "as in the nearest measured bucket",
    "by class": "by kernel class, untimed",
    "invariant": "the same for every batch, so that results do not depend on it",
    "pinned": "pinned",
}


@dataclass(frozen=True, slots=True)
class Win:
    """How many times faster the choice is than `rival`; `step` names the colour: "0" to "6", or "none" without a ratio."""

    ratio: float | None
    rival: str | None

    @property
    def step(self) -> str:
        return "none" if self.ratio is None else str(sum(self.ratio > end for end in STEPS))

    @property
    def text(self) -> str:
        if self.ratio is None:
            return "–"
        if self.ratio <= STEPS[0]:
            return "tie"
        return f"{self.ratio:.{0 if self.ratio >= 9.95 else 1 if self.ratio >= 1.095 else 2}f}×"


@dataclass(frozen=True, slots=True)
class BucketView:
    """One decision. `runner_up` and `other_form` are the wins over the next best, and over the best of native or padded."""

    id: str
    decision: Decision
    in_force: bool
    how: str
    sentence: str
    runner_up: Win
    other_form: Win
    best_native: float | None
    best_padded: float | None
    chart: Chart | None

    @property
    def shape(self) -> AttentionShape:
        return self.decision.bucket.shape

    @property
    def form(self) -> str:
        return "padded" if self.decision.padding else "native"

    @property
    def padding(self) -> str:
        return describe(self.shape, self.decision.padding) if self.decision.padding else "native"

    @property
    def candidates(self) -> list[tuple[CandidateResult, str]]:
        """The chosen one, then by time, then those that were not timed; each with its padding in words."""
        rows = sorted(self.decision.candidates, key=lambda r: (r.verdict != "chosen", r.ms is None, r.ms or 0.0))
        return [(row, describe(self.shape, row.padding) if row.padding else "native") for row in rows]

    @property
    def command(self) -> list[str]:
        """What measures or reads this bucket on a terminal, in parts that belong together."""
        s = self.shape
        words = ["mla-serve explain", f"--phase {s.phase.value}", f"--batch {s.batch}", f"--heads {s.heads}"]
        words += [f"--q-len {s.q_len}"] if not s.absorbed or s.q_len > 1 else []
        words += [f"--kv-len {s.kv_len}"] if s.phase is not Phase.PREFILL else []
        words += [f"--dtype {s.dtype}", f"--qk {s.qk}", f"--v {s.v}", f"--rope {s.rope}"]
        words += [f"--page-size {s.page_size}"] if s.page_size else []
        return words + [f"--{flag}" for flag in ("lse", "ragged") if getattr(s, flag) and s.phase is not Phase.CONTEXT]

    @property
    def search(self) -> str:
        """All that a search looks at."""
        parts = [str(self.decision.bucket), self.decision.label, self.padding, self.how, self.form]
        parts += [f"{row.label} {row.verdict} {row.reason or ''}" for row in self.decision.candidates]
        return " ".join(parts).lower()


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Buckets alike in all but sizes: `rows` are batches (with query tokens and flags), `columns` lengths."""

    title: str
    subtitle: str
    column_name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, str, tuple[BucketView | None, ...]], ...]


@dataclass(frozen=True, slots=True)
class View:
    """The whole page."""

    buckets: tuple[BucketView, ...]
    maps: tuple[HeatMap, ...]
    hosts: tuple[Fingerprint, ...]

    @property
    def tiles(self) -> list[tuple[str, str, str]]:
        """Figure, name and remark of each number on top."""
        timed = [b for b in self.buckets if b.how == "measured"]
        padded = [b for b in timed if b.form == "padded"]
        gains = [b.other_form.ratio for b in padded if b.other_form.ratio]
        forced = sum(b.other_form.ratio is None for b in padded)
        live = sum(b.in_force for b in self.buckets)
        tiles = [
            (str(len(self.buckets)), "buckets", f"{live} of them in force now" if live else "in this file"),
            (str(len(timed)), "measured here", f"{len(self.buckets) - len(timed)} borrowed, pinned or by class"),
            (str(len(padded)), "won by padding", f"in {forced} nothing runs unpadded" if forced else "of those measured"),
        ]
        if gains:
            tiles.append((f"{median(gains):.3g}×", "faster by padding", f"median of {len(gains)}; at most {max(gains):.3g}×"))
        return tiles

    def values(self, of: str) -> list[str]:
        """The choices of a filter."""
        return sorted({getattr(b.decision, of) if of == "winner" else getattr(b, of) for b in self.buckets})

    @property
    def phases(self) -> list[str]:
        return [phase.value for phase in Phase if any(b.shape.phase is phase for b in self.buckets)]


def make_view(in_force: Iterable[Decision], table: Iterable[Decision] = ()) -> View:
    """Decisions in force first; of the table's only those of buckets and hosts that are not among them."""
    seen, found = set(), []
    for decision, live in [*((d, True) for d in in_force), *((d, False) for d in table)]:
        key = decision.bucket, decision.fingerprint.device, decision.fingerprint.threads, decision.fingerprint.sm_count
        if key not in seen:
            seen.add(key)
            found.append((decision, live))
    order = list(Phase)
    found.sort(key=lambda pair: (order.index((s := pair[0].bucket.shape).phase), s.batch, s.q_len, s.kv_len, str(s)))
    buckets = tuple(_bucket(f"b{i}", decision, live) for i, (decision, live) in enumerate(found))
    hosts: list[Fingerprint] = []
    for bucket in buckets:
        if bucket.decision.fingerprint not in hosts:
            hosts.append(bucket.decision.fingerprint)
    return View(buckets, tuple(_maps(buckets, len({(h.device, h.threads) for h in hosts}) > 1)), tuple(hosts))


def _bucket(name: str, decision: Decision, live: bool) -> BucketView:
    own = {"availability": "by class", "batch-invariant": "invariant", "pinned": "pinned"}
    how = own.get(decision.policy, "borrowed" if decision.note else "measured")
    chosen = decision.chosen
    rivals = [row for row in decision.candidates if row is not chosen]
    padded = decision.padding is not None
    native, other = (
        min((row.ms for row in decision.candidates if row.ms and bool(row.padding) == form), default=None)
        for form in (False, True)
    )
    return BucketView(
        name, decision, live, how, decision_sentence(decision),
        _win(decision, chosen, rivals), _win(decision, chosen, [row for row in rivals if bool(row.padding) != padded]),
        native, other, chart(decision),
    )  # fmt: skip


def _win(decision: Decision, chosen: CandidateResult | None, rivals: Sequence[CandidateResult]) -> Win:
    costs = [(cost, row.label) for row in rivals if (cost := row.cost(decision.layers)) is not None]
    own = chosen.cost(decision.layers) if chosen else None
    if not costs or not own:
        return Win(None, None)
    cost, rival = min(costs)
    return Win(max(cost / own, 1.0), rival)


def _maps(buckets: Sequence[BucketView], many_hosts: bool) -> Iterable[HeatMap]:
    groups: dict[tuple[object, ...], list[BucketView]] = {}
    for bucket in buckets:
        s, host = bucket.shape, bucket.decision.fingerprint
        key = (s.phase, s.heads, s.qk, s.v, s.dtype, s.page_size, s.cache_dtype, host.device, host.threads)
        groups.setdefault(key, []).append(bucket)
    for members in groups.values():
        s = members[0].shape
        subtitle = f"{s.heads} heads, {s.qk}/{s.v}, {s.dtype}" + (f", page {s.page_size}" if s.page_size else "")
        subtitle += f", {s.cache_dtype} cache" if s.cache_dtype else ""
        subtitle += f", on {members[0].decision.fingerprint.device}" if many_hosts else ""
        columns = sorted({b.shape.kv_len for b in members})
        rows = sorted({_row(b.shape) for b in members})
        cells = {(_row(b.shape), b.shape.kv_len): b for b in members}
        yield HeatMap(
            s.phase.value, subtitle, "prompt tokens" if s.phase is Phase.PREFILL else "keys per request",
            tuple(short(length) for length in columns),
            tuple((f"{batch}" + (f" × {short(q)}" if q else ""), flags, tuple(cells.get((row, n)) for n in columns))
                  for row in rows for flags, batch, q in [row]),
        )  # fmt: skip


def _row(s: AttentionShape) -> tuple[str, int, int]:
    flags = [text for name, text in (("lse", "LSE"), ("ragged", "ragged"), ("graph", "graph"), ("batch_invariant", "invariant"))
             if getattr(s, name) and not (name == "lse" and s.phase is Phase.CONTEXT)]  # fmt: skip
    return ", ".join(flags), s.batch, s.q_len if s.phase is Phase.CONTEXT or (s.absorbed and s.q_len > 1) else 0


def short(tokens: int) -> str:
    """1024 as 1k."""
    return f"{tokens // 1024}k" if tokens >= 1024 and tokens % 1024 == 0 else str(tokens)
