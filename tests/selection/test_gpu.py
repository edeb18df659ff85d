"""The whole path on a GPU: gate, CUDA clock, floor, rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mla_serve.selection.fingerprint import Fingerprint
from mla_serve.selection.selector import Selector
from mla_serve.selection.timing import Effort
from mla_serve.shapes import AttentionShape
from tests.selection.fakes import DEEPSEEK, context, decode, prefill

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
