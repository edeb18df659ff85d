"""What differs between vLLM's versions, on stand-ins that have each version's fields."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from mla_serve.errors import UserError
from mla_serve.vllm_plugin import compat

STARTS = torch.tensor([0, 3, 5, 9], dtype=torch.int32)


def test_chunks_of_032() -> None:
    """A chunk is of neighbouring requests and has its own query starts."""
    chunk = SimpleNamespace(
        index=0, request_slice=slice(1, 3), query_start_loc=torch.tensor([0, 2, 6]), cu_seq_lens=torch.tensor([0, 7, 12]),
        seq_lens=torch.tensor([7, 5]),
    )  # fmt: skip
    metadata = SimpleNamespace(query_start_loc=STARTS, chunked_context=SimpleNamespace(chunks=[chunk]))
    (found,) = compat.chunks_of(metadata, [3, 2, 4])
    assert (found.q_lens, found.kv_lens) == ((2, 4), (7, 5))
    assert found.q_starts is chunk.query_start_loc
    assert found.kv_starts is chunk.cu_seq_lens


def test_chunks_of_026() -> None:
    """Each chunk is of all requests, some of which may have no keys in it."""
    context = SimpleNamespace(
        cu_seq_lens=torch.tensor([[0, 4, 8, 8], [0, 0, 3, 3]]), seq_lens=torch.tensor([[4, 4, 0], [0, 3, 0]])
    )
    found = compat.chunks_of(SimpleNamespace(query_start_loc=STARTS, chunked_context=context), [3, 2, 4])
    assert [chunk.kv_lens for chunk in found] == [(4, 4, 0), (0, 3, 0)]
    assert all(chunk.q_starts is STARTS and chunk.q_lens == (3, 2, 4) for chunk in found)


def test_no_context_no_chunks() -> None:
    assert compat.chunks_of(SimpleNamespace(chunked_context=None), [3]) == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"decode_context_parallel_size": 2}, "--decode-context-parallel-size above 1"),
        ({"prefill_context_parallel_size": 2}, "--prefill-context-parallel-size above 1"),
        ({"enable_dbo": True}, "dual-batch overlap; leave out --enable-dbo"),
    ],
)
def test_what_is_not_served_is_refused_by_name(flags: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        compat.refuse_parallelism(SimpleNamespace(parallel_config=SimpleNamespace(**flags)))
    compat.refuse_parallelism(SimpleNamespace(parallel_config=SimpleNamespace(**dict.fromkeys(flags, 0))))


def test_dtypes() -> None:
    assert compat.dtype_name(torch.bfloat16) == "bfloat16"
    with pytest.raises(UserError, match="pass --dtype bfloat16"):
        compat.dtype_name(torch.float64)
    assert [compat.cache_dtype_of(name) for name in ("auto", "bfloat16", "fp8", "fp8_e4m3")] == [
        None,
        None,
        *["float8_e4m3fn"] * 2,
    ]


def test_speculation() -> None:
    assert compat.verified_tokens(SimpleNamespace(speculative_config=None)) == 1
    assert compat.verified_tokens(SimpleNamespace(speculative_config=SimpleNamespace(num_speculative_tokens=3))) == 4


def test_host_lengths() -> None:
    assert compat.host_kv_lens(SimpleNamespace(seq_lens_cpu_upper_bound=torch.tensor([3, 4]))) == (3, 4)
    assert compat.host_kv_lens(SimpleNamespace()) is None


def test_a_vllm_that_is_not_known_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for a version that has no such module."""
    old = ModuleType("vllm")
    old.__version__ = "0.19.0"  # type: ignore[attr-defined]
    for name in [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", old)
    with pytest.raises(UserError) as error:
        compat.register_classes("a", "b", default=False)
    assert "works with vLLM 0.26 to 0.33; this is 0.19.0" in str(error.value)
    assert "install one of those" in str(error.value)
