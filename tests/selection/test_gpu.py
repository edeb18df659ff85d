"""The whole path on a GPU: gate, CUDA clock, floor, rank."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest
import torch

from mla_serve.backends.registry import load_backends
from mla_serve.selection.fingerprint import Fingerprint
from mla_serve.selection.isolated import Isolated
from mla_serve.selection.selector import Selector
from mla_serve.selection.timing import Effort
from mla_serve.shapes import AttentionShape
from tests.selection.fakes import DEEPSEEK, context, decode, prefill
from tests.selection.misbehaving import Aborts, HoardsCuda, SpoilsCuda

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "shape",
    [
        prefill(DEEPSEEK, q_len=512),
        prefill(DEEPSEEK, batch=4, q_len=128, lse=True),
        context(DEEPSEEK, q_len=128, kv_len=1024),
        decode(DEEPSEEK, batch=8, kv_len=1024, page_size=64),
        decode(DEEPSEEK, batch=8, kv_len=1024, page_size=64, ragged=True, q_len=2),
    ],
    ids=str,
)
def test_a_bucket_is_measured(shape: AttentionShape) -> None:
    chooser = Selector(torch.device("cuda"), effort=Effort(3, 5, 200.0, 2))
    decision = chooser.measure(replace(shape, dtype="bfloat16"))
    timed = [row for row in decision.candidates if row.ms is not None]
    assert timed
    assert all((row.error or 0.0) < 1e-2 and (row.ms or 0.0) > 0.0 for row in timed)
    assert not [row.label for row in decision.candidates if row.verdict in ("disqualified", "crashed")]
    assert decision.floor_ms is not None
    assert 0.0 < decision.floor_ms < min(row.ms or 0.0 for row in timed)
    assert shape.absorbed or len(timed) > 1
    assert chooser.decide(replace(shape, dtype="bfloat16")) == decision


def test_the_fingerprint_names_the_gpu() -> None:
    here = Fingerprint.here(torch.device("cuda"))
    assert here.device == torch.cuda.get_device_name()
    assert here.sm_count
    assert here.capability
    assert here.threads is None
    assert here.driver


def test_k15_a_spoilt_context_and_a_hoarder_cost_only_themselves() -> None:
    gpu = torch.device("cuda")
    measurer = Isolated(gpu, effort=Effort(3, 5, 200.0, 2), seconds=60.0)
    backends = [SpoilsCuda(gpu), HoardsCuda(gpu), Aborts(gpu), *load_backends(gpu, only={"torch-mla"})]
    chooser = Selector(gpu, backends=backends, measurer=measurer)
    free = torch.cuda.mem_get_info()[0]
    with closing(chooser):
        decision = chooser.measure(replace(decode(DEEPSEEK, batch=8, kv_len=1024, page_size=64), dtype="bfloat16"))
    rows = {row.backend: row for row in decision.candidates}
    assert {rows[name].verdict for name in ("spoilscuda", "hoardscuda", "aborts")} == {"crashed"}, rows
    assert "device-side assert" in (rows["spoilscuda"].reason or "")
    assert "out of memory" in (rows["hoardscuda"].reason or "")
    assert (decision.winner, rows["torch-mla"].verdict) == ("torch-mla", "chosen")
    torch.cuda.synchronize()  # here nothing is spoilt
    assert torch.cuda.mem_get_info()[0] > free - (1 << 28)
