"""Decisions as a page meets them: all phases, both forms, a tie, nothing timed, borrowed, and a name that would be HTML."""

from __future__ import annotations

from dataclasses import replace

from mla_serve.backends.padded import Padding
from mla_serve.selection.decision import CandidateResult, Decision
from mla_serve.selection.fingerprint import Fingerprint
from mla_serve.shapes import Bucket
from tests.selection.fakes import a_decision, context, decode, prefill

HERE = Fingerprint("a CPU <of sorts>", "2.13.0", threads=2, libraries={"flashinfer-python": "0.6.14"})
EVIL = '"><script>document.title="owned"</script><img src=x onerror=alert(1)>'
PAD, WIDE = Padding(192, 192, 4), Padding(256, 256, 4)


def measured(shape_bucket: Bucket, *rows: tuple[str, Padding | None, float | None], floor: float = 0.1) -> Decision:
    """A decision whose first row won; rows without a time are refused."""
    results = [
        CandidateResult(
            name, padding, "chosen" if i == 0 else "slower" if ms else "unsupported",
            None if ms else f"refuses {name}", ms, 0.003 if ms else None, 0.02 if ms else None,
            2e-3 if ms else None, 4e-5 if ms else None,
        )
        for i, (name, padding, ms) in enumerate(rows)
    ]  # fmt: skip
    made = a_decision(
        shape_bucket.shape, HERE, winner=rows[0][0], rows=tuple(results), layers=3, floor_ms=floor, probe_seconds=1.25
    )
    return replace(made, padding=rows[0][1])


def decisions() -> list[Decision]:
    """Twelve of them."""
    found = [
        measured(
            Bucket.of(prefill(q_len=size)),
            ("torch-flash", PAD, 0.01 * size),
            ("torch-flash", WIDE, 0.013 * size),
            ("torch-math", None, 0.01 * size * (1 + size / 64)),
            ("torch-flash", None, None),
        )
        for size in (16, 64, 256, 1024, 2048)
    ]
    found.append(measured(Bucket.of(prefill(q_len=64, lse=True)), ("torch-math", None, 1.0), ("torch-flash", PAD, 1.01)))
    found.append(measured(Bucket.of(context(q_len=64, kv_len=1024)), ("torch-flash", PAD, 2.0), ("torch-math", None, 236.0)))
    found += [measured(Bucket.of(decode(batch=batch)), ("torch-mla", None, 0.5 * batch)) for batch in (1, 4)]
    untimed = (CandidateResult("torch-mla", None, "chosen", "flash"),)
    by_class = a_decision(decode(batch=16), HERE, winner="torch-mla", rows=untimed, measured_at=None)
    found.append(replace(by_class, policy="availability"))
    found.append(replace(found[7], bucket=Bucket.of(decode(batch=4, ragged=True)), note="not measured; as in X <b>"))
    found.append(measured(Bucket.of(decode(batch=1, kv_len=4096)), (EVIL, None, 1.0), ("torch-mla", None, 1.3)))
    return found
