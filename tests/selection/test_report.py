from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from mla_serve.backends.padded import Padding
from mla_serve.selection.decision import CandidateResult
from mla_serve.selection.fingerprint import Fingerprint
from mla_serve.selection.report import choices, decision_sentence, in_short, render_decision, render_table
from tests.selection.fakes import a_decision, decode, prefill

HERE = Fingerprint("a CPU", "2.13.0", threads=2, libraries={"flashinfer-python": "0.6.14"})
PAD = Padding(192, 192, 4)
ROWS = (
    CandidateResult("torch-math", None, "slower", None, 1056.1, 0.004, 0.03, 1.7e-7, 4e-7),
    CandidateResult("torch-flash", None, "unsupported", "needs equal QK and V widths (192, 128)"),
    CandidateResult("torch-flash", PAD, "chosen", None, 311.0, 0.004, 0.01, 2e-7, 4e-7),
    CandidateResult("wild", None, "disqualified", "LSE off by 44% [base 2]", error=1e-7, lse_error=2.2),
    CandidateResult("leaky", None, "slower", None, 2000.0, 0.0, 0.0, 1e-7, 1e-7, leaks_nan=True),
)
PADDED = replace(a_decision(prefill(q_len=2048), HERE, winner="torch-flash", rows=ROWS, layers=3, floor_ms=9.8), padding=PAD)


def plain(render: object, *args: object) -> str:
    out = io.StringIO()
    render(*args, Console(file=out, width=40))  # type: ignore[operator]
    return out.getvalue()


def test_in_short() -> None:
    padded = "torch-flash (padded, widths 192/128 to 192/192, 1.2x), measured 3.4x faster than native torch-math at 1056 ms"
    assert in_short(PADDED) == padded
    assert in_short(replace(PADDED, note="borrowed")) == f"{padded} in the nearest bucket"
    assert in_short(a_decision(decode(), HERE)) == "fake (native), measured, the only kernel that can"
    assert in_short(replace(PADDED, policy="availability")).endswith("1.2x), by kernel class")


def test_one_sentence_says_why() -> None:
    assert decision_sentence(PADDED) == (
        "torch-flash+pad (widths 192/128 to 192/192, 1.2x) serves prefill 1 x 2048 on 2048, 4 heads, 192/128 float32: "
        "311.0 ms, 3.4x faster than native torch-math at 1056 ms."
    )
    alone = a_decision(decode(), HERE)
    assert decision_sentence(alone).endswith(": 1.000 ms, the only kernel that can.")
    tie = (
        CandidateResult("a", None, "chosen", None, 1.01, 0.0, 0.02),
        CandidateResult("a", PAD, "tie", "1.0% faster, within the noise; ties go to native", 1.0, 0.0, 0.02),
    )
    assert "as fast as padded a+pad at 1.000 ms" in decision_sentence(a_decision(prefill(), HERE, winner="a", rows=tie))


def test_the_sentence_of_what_was_not_measured() -> None:
    flash = (CandidateResult("torch-flash", PAD, "chosen", "flash"),)
    by_class = replace(PADDED, policy="availability", candidates=flash)
    assert decision_sentence(by_class).endswith("float32: by kernel class (flash), nothing was timed.")
    assert decision_sentence(replace(by_class, note="not measured")).endswith("nothing was timed; not measured.")
    pin = replace(by_class, policy="pinned", candidates=(replace(flash[0], reason="pinned by prefill=torch-flash+pad"),))
    assert decision_sentence(pin).endswith(": pinned by prefill=torch-flash+pad.")
    borrowed = replace(PADDED, note="not measured; as in the nearest measured bucket, X")
    assert decision_sentence(borrowed).endswith(": not measured; as in the nearest measured bucket, X.")


def test_plain_lines_hold_every_candidate_unwrapped() -> None:
    lines = plain(render_decision, PADDED).splitlines()
    assert lines[0] == decision_sentence(PADDED)
    assert lines[1].split()[:2] == ["backend", "padding"]
    assert len(lines) == 2 + len(ROWS) + 1
    assert lines[2].startswith("torch-flash  widths 192/128 to 192/192, 1.2x  311.0")
    text = "\n".join(lines)
    for part in (
        "needs equal QK and V widths (192, 128)",
        "LSE off by 44% [base 2]",
        "leaks NaN",
        "1.7e-07",
        "3.0%",
        "unsupported",
    ):
        assert part in text
    assert lines[-1].startswith("measured 2026-12-01T10:00:00Z for 3 layers, floor 9.800 ms, device a CPU, torch 2.13.0")
    assert "flashinfer-python 0.6.14" in lines[-1]
    assert "\x1b" not in text


def test_a_table_has_a_line_per_decision_with_both_forms() -> None:
    borrowed = replace(a_decision(decode(), HERE), note="not measured; as in X")
    text = plain(render_table, [PADDED, borrowed])
    header, first, second = text.splitlines()
    assert header.split("  ")[0] == "bucket"
    cells = [cell.strip() for cell in first.split("  ") if cell]
    assert cells[1:] == ["torch-flash", "widths 192/128 to 192/192, 1.2x", "311.0", "1056", "311.0", "9.800", "measured"]
    assert second.endswith("measured, borrowed")
    assert plain(render_table, []).startswith("bucket")


def test_a_terminal_gets_a_table_with_the_same_words() -> None:
    out = io.StringIO()
    render_decision(PADDED, Console(file=out, force_terminal=True, width=200, color_system="truecolor"))
    text = out.getvalue()
    assert "\x1b[" in text
    assert "LSE off by 44% [base 2]" in text
    assert "┃" in text


def test_a_logs_table_says_the_runner_up_and_why() -> None:
    """What has no figures shares a line by phase, kernel, form and reason."""
    guessed = [
        replace(
            a_decision(decode(batch=batch), HERE, rows=(CandidateResult("fake", None, "chosen", "flash"),)),
            policy="availability",
        )
        for batch in (1, 8)
    ]
    header, first, second = choices([guessed[0], PADDED, guessed[1]]).splitlines()
    assert header.split() == ["bucket", "kernel", "padding", "run", "ms", "runner-up", "reason"]
    assert first.startswith("prefill 1 x 2048 on 2048")
    assert "torch-flash" in first
    assert "311.0" in first
    assert "torch-math 1056" in first
    assert first.endswith("measured, 3.4x faster than native torch-math at 1056 ms")
    assert second.split() == ["decode,", "2", "buckets", "fake", "native", "flash"]


def test_kernels_that_are_not_here_share_a_line_by_reason() -> None:
    missing = [CandidateResult(name, None, "unavailable", "needs a CUDA device, this is cpu") for name in ("fa2", "fa3")]
    other = CandidateResult("flashmla", None, "unavailable", "vllm is not installed")
    text = plain(render_decision, replace(PADDED, candidates=(*ROWS, *missing, other)))
    assert "\nnot here: fa2, fa3 (needs a CUDA device, this is cpu)\nnot here: flashmla (vllm is not installed)\n" in text
    assert "unavailable" not in text
