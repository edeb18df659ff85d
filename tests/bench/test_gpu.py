"""On a GPU: every peer that is installed gives the right answer, and the bench times it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mla_serve.bench.attention import RUN_ALONE, Bench
from mla_serve.bench.attention_contenders import OWN
from mla_serve.bench.attention_peers import load_peers
from mla_serve.bench.grids import DEEPSEEK, Case
from mla_serve.selection import Selector
from mla_serve.selection.timing import Effort
from mla_serve.shapes import AttentionShape

pytestmark = pytest.mark.gpu

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"


def decode(batch: int, kv_len: int, q_len: int = 1) -> AttentionShape:
    return AttentionShape.decode(
        DEEPSEEK, batch=batch, kv_len=kv_len, dtype="bfloat16", page_size=64, q_len=q_len, graph=True
    )  # fmt: skip


PREFILL = AttentionShape.prefill(DEEPSEEK, batch=2, q_len=300, dtype="bfloat16", lse=False)
CASES = {
    "decode": Case.uniform(decode(4, 1000)),
    "8 query tokens": Case.uniform(decode(4, 1000, 8)),
    "ragged decode": Case(decode(3, 700), (1, 1, 1), (2000, 70, 30)),
    "prefill": Case.uniform(PREFILL),
    "ragged prefill": Case(PREFILL, (500, 100), (500, 100)),
    "context": Case.uniform(AttentionShape.context(DEEPSEEK, batch=2, q_len=70, kv_len=300, dtype="bfloat16")),
}


@pytest.mark.timeout(600)  # FlashInfer and Triton compile on first use
@pytest.mark.parametrize("name", CASES)
def test_every_contender_is_right_and_timed(name: str) -> None:
    device = torch.device("cuda")
    bench = Bench(
        Selector(device, layers=RUN_ALONE, clean_pool=True), load_peers(PEERS), own=OWN, effort=Effort(3, 3, plans=2)
    )  # fmt: skip
    rows = bench.rows(CASES[name])
    wrong = [(row.name, row.padding, row.reason) for row in rows if row.verdict in ("disqualified", "crashed")]
    assert not wrong
    assert rows[0].us is not None
    assert all(row.reason for row in rows if row.us is None)
    if name == "prefill":
        assert {row.name for row in rows if row.us is not None} >= {"torch-flash", "torch-efficient", "torch-math"}
