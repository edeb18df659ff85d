"""Every kernel that might serve a shape, native and padded, and why each of the others may not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mla_serve.backends.base import Backend
from mla_serve.backends.padded import Padded, Padding
from mla_serve.selection import paddings
from mla_serve.selection.decision import CandidateResult, Verdict, label
from mla_serve.shapes import AttentionShape

_FLOAT8 = "float8_e4m3fn"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kernel in one form. `verdict` and `reason` are None for one that may be tried, else why it may not."""

    backend: Backend
    padding: Padding | None
    reason: str | None = None
    verdict: Verdict | None = None

    @property
    def native(self) -> Backend:
        return native(self.backend)

    @property
    def label(self) -> str:
        return label(self.native.name, self.padding)

    def result(self, verdict: Verdict | None = None, reason: str | None = None) -> CandidateResult:
        """Its row in a Decision while nothing was measured."""
        verdict, reason = (self.verdict, self.reason) if self.verdict else (verdict or "not-measured", reason)
        return CandidateResult(self.native.name, self.padding, verdict, reason)


def native(backend: Backend) -> Backend:
    """The backend itself, or the one inside its padded form."""
    return backend.inner if isinstance(backend, Padded) else backend


def candidates(shape: AttentionShape, backends: Sequence[Backend], *, host_lens: bool = True) -> list[Candidate]:
    """Native and padded forms of every backend in their order, each checked; see `padded_forms` for which are tried.

    A padded form that is refused for the very reason of the native one is left out: padding has nothing to do with it.
    `host_lens` False says that batches come without exact host lengths, which rules out kernels that plan from them.
    """
    found: list[Candidate] = []
    for backend in backends:
        plain = check(backend, shape, host_lens=host_lens)
        found.append(plain)
        if plain.verdict == "unavailable":
            continue
        if plain.verdict is None and not shape.absorbed and shape.qk == shape.v:
            continue  # equal widths that the kernel takes: nothing to pad
        forms = padded_forms(backend, shape, host_lens=host_lens, native_runs=plain.verdict is None)
        found.extend(form for form in forms if form.verdict is None or form.reason != plain.reason)
    return found


def padded_forms(
    backend: Backend, shape: AttentionShape, *, host_lens: bool = True, native_runs: bool = False
) -> Iterator[Candidate]:
    """The padded forms of an available backend, checked one by one as they are taken.

    Prefill and context: equal widths first, shown also where they are refused; the next usual widths that are supported only
    where neither the native (`native_runs`) nor the equal ones are, since more padding is more work. Decode: the next legal
    head counts.
    """
    first = paddings.equal_widths(shape)
    if first is not None:
        equal = check(Padded(backend, first), shape, host_lens=host_lens)
        yield equal
        if equal.verdict is None or native_runs:
            return
    for padding in paddings.wider(shape):
        candidate = check(Padded(backend, padding), shape, host_lens=host_lens)
        if candidate.verdict is None:
            yield candidate
    for padding in paddings.more_heads(shape, backend.head_counts or backend.padded_head_counts):
        yield check(Padded(backend, padding), shape, host_lens=host_lens)


def check(backend: Backend, shape: AttentionShape, *, host_lens: bool = True) -> Candidate:
    """Asks one backend (maybe a `Padded`) whether it may serve `shape`. Cheap refusals come before the library is asked."""
    padding = backend.padding if isinstance(backend, Padded) else None
    missing = native(backend).available()
    if missing is not None:
        return Candidate(backend, padding, missing, "unavailable")
    reason = _flag_refusal(native(backend), padding, shape, host_lens) or backend.supports(shape)
    return Candidate(backend, padding, reason, None if reason is None else "unsupported")


def _flag_refusal(backend: Backend, padding: Padding | None, shape: AttentionShape, host_lens: bool) -> str | None:
    """What the class flags of `backend` already rule out, in words that name it."""
    name, heads = backend.name, padding.heads if padding else shape.heads
    if shape.batch_invariant and not backend.batch_invariant:
        return f"{name} lets batch mates change a request's result"
    if shape.lse and not backend.gives_lse:
        return f"{name} gives no LSE, which this call needs for merging"
    if backend.needs_host_lens and not host_lens:
        return f"{name} plans from exact host lengths, which this deployment does not have"
    if shape.graph and not backend.capturable:
        return f"{name} cannot be captured in a CUDA graph"
    if not shape.absorbed:
        return None
    if backend.page_sizes is not None and shape.page_size not in backend.page_sizes:
        return f"{name} takes pages of {_either(backend.page_sizes)} tokens, not {shape.page_size}"
    if shape.cache_dtype == _FLOAT8 and not backend.takes_cache_scale:
        return f"{name} takes no scale for a float8 cache"
    if backend.head_counts is not None and heads not in backend.head_counts:
        above = [count for count in sorted(backend.head_counts) if count > heads]
        far = f"; the next count, {above[0]}, is {above[0] / heads:.3g}x as many" if above else ""
        return f"{name} takes {_either(backend.head_counts)} query heads, not {heads}{far}"
    return None


def _either(numbers: tuple[int, ...]) -> str:
    """ "32 or 64", "1, 2 or 4"."""
    *rest, last = (str(number) for number in sorted(numbers))
    return f"{', '.join(rest)} or {last}" if rest else last
