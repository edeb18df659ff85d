"""The one table of parity cases: prompts, batching, chunks, policy and pins, over all checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from tests.parity.checkpoints import SPECS
from tests.parity.reference import PROMPTS

BATCHES = {**{f"alone-{length}": (length,) for length in PROMPTS}, "mixed": PROMPTS}
CHUNKS = {"whole": None, "chunks-64": 64, "chunks-16": 16}
CHOICES: dict[str, dict[str, str]] = {
    "availability": {"policy": "availability"},
    "measured": {"policy": "measured"},
    **{
        f"{prefill}+{decode}": {"prefill": prefill, "decode": decode}
        for prefill in ("torch-math+native", "torch-math+pad", "torch-flash+pad")
        for decode in ("torch-mla+native", "torch-mla+pad")
    },
}


@dataclass(frozen=True)
class Case:
    """One engine core's settings and one batch of prompts."""

    checkpoint: str
    chunk: str
    choice: str
    batch: str

    def __str__(self) -> str:
        return "-".join((self.checkpoint, self.chunk, self.choice, self.batch))


PRODUCT = [Case(*row) for row in product([spec.name for spec in SPECS], CHUNKS, CHOICES, BATCHES)]


def is_quick(case: Case) -> bool:
    """Every checkpoint whole and in chunks of 16 under one policy; one checkpoint in chunks of 64 under everything."""
    if case.choice == "availability" and case.chunk != "chunks-64":
        return True
    return case.checkpoint == "v3-odd" and case.chunk == "chunks-64"


QUICK = [case for case in PRODUCT if is_quick(case)]
