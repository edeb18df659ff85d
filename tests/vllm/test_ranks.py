"""Tensor parallelism on a CPU: E03's two ranks, and who measures when several start at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.vllm.conftest import DIRECTORY

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

Case = Callable[..., dict[str, Any]]


def winners(rank: dict[str, Any]) -> list[str]:
    return sorted(
        json.dumps([decision["bucket"], decision["winner"], decision["padding"]], sort_keys=True)
        for decision in rank["decisions"]
    )


def check(found: dict[str, Any], heads: int) -> None:
    """Tokens of transformers; both ranks have their share of the heads, made the same choices and ran as often."""
    assert found["ours"] == found["theirs"]
    first, second = found["ranks"]
    assert {decision["bucket"]["heads"] for rank in (first, second) for decision in rank["decisions"]} == {heads}
    assert winners(first) == winners(second)
    assert first["counts"] == second["counts"]
    assert {run["phase"] for run in first["counts"][0]["runs"]} >= {"prefill", "decode"}


def test_e03_two_ranks(case: Case) -> None:
    check(case("ranks", "v3-yarn-40", DIRECTORY), heads=2)


@pytest.mark.slow("vllm")
def test_ten_heads_a_rank_padded(case: Case) -> None:
    found = case("ranks", "v3-20-heads", DIRECTORY, "prefill=torch-flash+pad,decode=torch-mla+pad")
    check(found, heads=10)
    assert all(decision["padding"] for decision in found["ranks"][0]["decisions"])


@pytest.mark.slow("vllm")
def test_the_first_rank_measures_and_all_read(case: Case) -> None:
    """Each bucket is in the one file once, and the log tells of one measurement."""
    found = case("ranks", "v2", DIRECTORY, "", "missing")
    check(found, heads=2)
    buckets = [json.dumps(decision["bucket"], sort_keys=True) for decision in found["held"]]
    assert buckets
    assert len(set(buckets)) == len(buckets)
    assert found["log"].count("measured attention kernels for") == 1
    assert {decision["policy"] for rank in found["ranks"] for decision in rank["decisions"]} == {"measured"}
