"""The availability policy: by kernel class, nothing timed. Transformer Engine's pull request 3339, for many libraries.

Native fused or flash: native, and the padded form is never asked about. Native unfused and padded fused or flash: pad. Both
unfused: native. Of several kernels the best class wins, native before padded at equal class, then the order of the list.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mla_serve.backends.base import Backend, Kind
from mla_serve.selection.candidates import Candidate, check, padded_forms
from mla_serve.selection.decision import CandidateResult
from mla_serve.shapes import AttentionShape


def choose(
    shape: AttentionShape, backends: Sequence[Backend], *, host_lens: bool = True
) -> tuple[Candidate | None, list[CandidateResult]]:
    """The kernel for `shape`, None if no backend takes it, and a row per form that was asked about.

    Each backend is asked at most twice: natively, then in its first padded form that it takes. Asking stops at the first
    kernel that is not unfused.
    """
    winner: Candidate | None = None
    asked: list[tuple[Candidate, Kind | None]] = []
    for candidate in _in_order(shape, backends, host_lens):
        kind = candidate.backend.kind(shape) if candidate.verdict is None else None
        asked.append((candidate, kind))
        if kind is None:
            continue
        if kind is not Kind.UNFUSED:
            winner = candidate
            break
        winner = winner or candidate
    rows = []
    for candidate, kind in asked:
        if kind is None:
            rows.append(candidate.result())
        else:
            rows.append(candidate.result("chosen" if candidate is winner else "not-measured", kind.name.lower()))
    met = {row.backend for row in rows}
    rows.extend(CandidateResult(b.name, None, "not-measured", "not asked") for b in backends if b.name not in met)
    return winner, rows


def _in_order(shape: AttentionShape, backends: Sequence[Backend], host_lens: bool) -> Iterator[Candidate]:
    """All native forms, then the first padded form of each backend for which there is something to pad; asked when taken."""
    paddable = []
    for backend in backends:
        candidate = check(backend, shape, host_lens=host_lens)
        takes_equal_widths = candidate.verdict is None and not shape.absorbed and shape.qk == shape.v
        if candidate.verdict != "unavailable" and not takes_equal_widths:
            paddable.append(backend)
        yield candidate
    for backend in paddable:
        for candidate in padded_forms(backend, shape, host_lens=host_lens):
            yield candidate
            if candidate.verdict is None:
                break
