"""What adapters of other people's kernels say and plan without a GPU: reasons, versions, lengths."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla_serve.backends import (
    AttentionError,
    Backend,
    BatchLayout,
    Kind,
    Limits,
    Padded,
    Padding,
    flash_attention_libraries,
    flashinfer,
    flashinfer_blackwell,
    flashmla,
    load_backends,
    transformer_engine,
)
from mla_serve.backends.base import State
from mla_serve.backends.flash_attention_libraries import Library
from mla_serve.backends.rows import blind, blind_rows, blind_rows_on_device
from mla_serve.selection import candidates
from mla_serve.shapes import AttentionShape, MLADims

CUDA = torch.device("cuda")
CPU = torch.device("cpu")
DEEPSEEK = MLADims(heads=16, nope=128, rope=64, v=128, latent=512)
MINICPM3 = MLADims(heads=40, nope=64, rope=32, v=64, latent=256)
PREFILL = AttentionShape.prefill(DEEPSEEK, batch=2, q_len=64, dtype="bfloat16", lse=False)
CONTEXT = AttentionShape.context(DEEPSEEK, batch=2, q_len=64, kv_len=128, dtype="bfloat16")
DECODE = AttentionShape.decode(DEEPSEEK, batch=2, kv_len=128, dtype="bfloat16", page_size=64)
NAMES = (
    "flashinfer-fa3", "flashinfer-fa2", "flashinfer-trtllm-gen", "flashinfer-cute-dsl", "flashinfer-cutlass", "flashinfer-xqa",
    "fa2", "fa3", "fa4", "flashmla", "transformer-engine",
)  # fmt: skip


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the compute capability that the only GPU claims to have; no library is installed unless a test says so."""

    def set_capability(major: int, minor: int = 0, *installed: str) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, minor))
        for module in (flashinfer, flashinfer_blackwell, flash_attention_libraries, flashmla, transformer_engine):
            monkeypatch.setattr(module, "find_spec", lambda name: name if name.split(".")[0] in installed else None)

    return set_capability


def backend(name: str) -> Backend:
    return load_backends(CUDA, [name])[0]


@pytest.mark.parametrize("name", NAMES)
def test_on_a_cpu_each_says_what_it_needs(name: str) -> None:
    assert load_backends(CPU, [name])[0].available() == "needs a CUDA device, this is cpu"


@pytest.mark.parametrize(
    ("name", "capability", "reason"),
    [
        ("flashinfer-fa3", (8, 0), "needs sm_90, this is sm_80"),
        ("flashinfer-fa2", (7, 5), "needs sm_80, this is sm_75"),
        ("flashinfer-fa3", (10, 0), "needs sm_90, this is sm_100"),
        ("flashinfer-fa2", (9, 0), "flashinfer is not installed (pip install flashinfer-python)"),
        ("flashinfer-trtllm-gen", (9, 0), "needs sm_100, this is sm_90"),
        ("flashinfer-cutlass", (9, 0), "needs sm_100 or sm_110, this is sm_90"),
        ("flashinfer-xqa", (10, 0), "needs sm_120, this is sm_100"),
        ("flashinfer-cute-dsl", (10, 0), "flashinfer is not installed (pip install flashinfer-python)"),
        ("fa3", (8, 9), "needs sm_90, this is sm_89"),
        ("fa3", (9, 0), "vLLM, which has a copy, is not installed; the package flash-attn-3 is not installed"),
        ("fa2", (8, 0), "vLLM, which has a copy, is not installed; the package flash-attn is not installed"),
        ("fa4", (8, 0), "needs sm_90, sm_100 or sm_110, this is sm_80"),
        ("flashmla", (10, 0), "needs sm_90, this is sm_100"),
        ("flashmla", (9, 0), "vllm is not installed; flash-mla is not installed"),
        ("transformer-engine", (7, 0), "needs sm_80, this is sm_70"),
        ("transformer-engine", (9, 0), "transformer_engine is not installed (pip install transformer-engine[pytorch])"),
    ],
)
def test_what_is_missing_is_named(name: str, capability: tuple[int, int], reason: str, gpu: Any) -> None:
    gpu(*capability)
    assert backend(name).available() == reason


def installed(name: str, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """The backend on a GPU of its kind with its library there, as far as `supports` can tell."""
    capability = {"flashinfer-trtllm-gen": 10, "flashinfer-cutlass": 10, "flashinfer-xqa": 12}.get(name, 9)
    gpu(capability, 0, "flashinfer", "vllm")
    found = Library("vllm", lambda *_: None, (lambda *_: None) if name == "fa3" else None)  # type: ignore[arg-type,return-value]
    monkeypatch.setattr("mla_serve.backends.flash_attention.find", lambda version: found)
    return backend(name)


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        ("flashinfer-fa3", PREFILL, None),
        ("flashinfer-fa3", CONTEXT, None),
        ("flashinfer-fa3", DECODE, None),
        ("flashinfer-fa3", replace(DECODE, page_size=48, q_len=7, heads=20), None),
        ("flashinfer-fa3", replace(DECODE, cache_dtype="float8_e4m3fn"), None),
        ("flashinfer-fa2", replace(DECODE, cache_dtype="float8_e4m3fn"), "reads a float8 cache through its fa3 kernels only"),
        ("flashinfer-fa3", replace(PREFILL, v=192), "has kernels for widths 192/128, 64/64, 128/128, 256/256, not 192/192"),
        ("flashinfer-fa2", replace(PREFILL, dtype="float32"), "takes bfloat16 and float16, not float32"),
        ("flashinfer-fa2", replace(PREFILL, graph=True), "cannot be replayed"),
        ("fa3", PREFILL, None),
        ("fa3", replace(PREFILL, v=100), "needs widths in multiples of 8, not 192/100"),
        ("fa3", replace(PREFILL, qk=96, v=64), "takes unequal widths of 129 to 192"),
        ("fa3", DECODE, None),
        ("fa3", replace(DECODE, page_size=24), "takes pages of a multiple of 16 tokens, not 24"),
        ("fa3", replace(DECODE, cache_dtype="float8_e4m3fn"), "takes a cache of the queries' dtype"),
        ("fa2", PREFILL, "needs equal QK and V widths (192, 128)"),
        ("fa2", replace(PREFILL, v=192), None),
        ("fa2", DECODE, "has no absorbed form"),
        ("fa4", PREFILL, None),
        ("flashmla", DECODE, None),
        ("flashmla", PREFILL, "takes the absorbed form only"),
        ("flashmla", replace(DECODE, page_size=16), "takes pages of 64 tokens, not 16"),
        ("flashinfer-cutlass", DECODE, "takes 128 query heads, not 16"),
        ("flashinfer-xqa", replace(DECODE, heads=128, q_len=2), "takes 1 query token of each request, not 2"),
        ("flashinfer-trtllm-gen", replace(DECODE, page_size=16), "takes pages of 32 or 64 tokens, not 16"),
    ],
)
def test_shapes_are_taken_or_refused_with_a_reason(
    name: str, shape: AttentionShape, reason: str | None, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = installed(name, gpu, monkeypatch).supports(shape)
    assert said is None if reason is None else reason in (said or "")


@pytest.mark.parametrize("name", ["flashinfer-fa2", "flashinfer-fa3", "flashmla", "flashinfer-trtllm-gen"])
def test_other_latents_are_refused_by_their_widths(name: str, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = AttentionShape.decode(MINICPM3, batch=2, kv_len=64, dtype="bfloat16", page_size=64)
    assert "not 256 and 32" in (installed(name, gpu, monkeypatch).supports(odd) or "")


def test_fa2_is_a_candidate_padded_only(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {c.label: c.verdict for c in candidates(PREFILL, [installed("fa2", gpu, monkeypatch)])}
    assert found == {"fa2": "unsupported", "fa2+pad": None}


def test_flashmla_is_tried_with_its_own_heads_and_padded_to_its_tile(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = installed("flashmla", gpu, monkeypatch)
    monkeypatch.setattr(kernel, "available", lambda: None)
    found = [(c.padding and c.padding.heads, c.verdict) for c in candidates(DECODE, [kernel])]
    assert found == [(None, None), (64, None)]


def test_versions_of_all_libraries_that_may_serve_are_known_before_any_is_imported(gpu: Any) -> None:
    gpu(9)
    assert backend("fa3").libraries == ("vllm", "flash-attn-3")
    assert backend("flashmla").libraries == ("vllm", "flash-mla")
    assert Padded(backend("fa2"), Padding.of(PREFILL, v=192)).libraries == ("vllm", "flash-attn")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("q_lens", "kv_lens"),
    [([2, 0, 3], [2, 0, 3]), ([2, 3], [0, 5]), ([4, 6], [9, 3]), ([1, 1, 1], [0, 0, 0]), ([3], [1])],
)
def test_blind_rows_by_host_lengths_and_by_device_lengths(q_lens: list[int], kv_lens: list[int], causal: bool) -> None:
    expected = [
        kv_len - (q_len - 1 - row) <= 0 if causal else kv_len == 0
        for q_len, kv_len in zip(q_lens, kv_lens, strict=True)
        for row in range(q_len)
    ]
    batch = BatchLayout.make(q_lens, kv_lens, CPU)
    assert blind_rows_on_device(batch, causal=causal).tolist() == expected
    by_host = blind_rows(batch, causal=causal, device=CPU)
    assert by_host is None if not any(expected) else by_host is not None and by_host.tolist() == expected
    unknown = blind(replace(batch, kv_lens_host=None, q_lens_host=None), causal=causal)
    assert unknown is not None
    assert unknown.tolist() == expected


def mla_batch(q_lens: list[int], *, host: bool = True, live: int | None = None) -> BatchLayout:
    table = torch.zeros(len(q_lens), 2, dtype=torch.int32)
    batch = BatchLayout.make(q_lens, [64] * len(q_lens), CPU, block_table=table, page_size=64, live_requests=live)
    return batch if host else replace(batch, q_lens_host=None, kv_lens_host=None)


@pytest.mark.parametrize("name", ["flashmla", "flashinfer-trtllm-gen"])
@pytest.mark.parametrize(
    ("q_lens", "host", "live", "taken"),
    [
        ([3, 3], True, 2, True), ([3, 3, 0], True, 2, True), ([3, 3], False, 2, True), ([3, 3, 0], False, 2, True),
        ([1, 3, 2], True, 3, False), ([0, 3, 3], True, 3, False), ([1, 3, 2], False, 3, False), ([0, 3, 3], False, 3, False),
    ],
)  # fmt: skip
def test_uneven_queries_are_refused_also_without_host_lengths(
    name: str, q_lens: list[int], host: bool, live: int, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel: Any = backend(name)
    kernel._found = SimpleNamespace(get_mla_metadata=lambda: (SimpleNamespace(), None))
    state = State(replace(DECODE, q_len=3), Limits(max_requests=3, max_tokens=9, max_kv_tokens=192))
    if taken:
        assert kernel.plan(state, mla_batch(q_lens, host=host, live=live), scale=0.1).kv_lens.shape[0] == 2
    else:
        with pytest.raises(AttentionError, match="the same number of query tokens"):
            kernel.plan(state, mla_batch(q_lens, host=host, live=live), scale=0.1)


class Answers:
    """Transformer Engine's `get_attention_backend` with these answers by (qk, v); both shapes of its result."""

    def __init__(self, by_width: dict[tuple[int, int], Kind], *, long: bool) -> None:
        self.by_width, self.long, self.asked = by_width, long, 0

    def AttentionParams(self, **parameters: Any) -> Any:
        return SimpleNamespace(**parameters)

    def get_attention_backend(self, parameters: Any) -> tuple[Any, ...]:
        self.asked += 1
        assert parameters.qkv_layout == "bshd_bshd_bshd"
        kind = self.by_width[parameters.head_dim_qk, parameters.head_dim_v]
        flash, fused = kind is Kind.FLASH, kind is Kind.FUSED
        flags = (flash, "2", fused, 1, True) if self.long else (flash, fused, 1, True)
        return (*flags, [flash, fused, True])


@pytest.mark.parametrize("long", [True, False])
@pytest.mark.parametrize(
    ("native", "padded", "chosen"),
    [
        (Kind.FUSED, Kind.FUSED, "transformer-engine"),
        (Kind.FLASH, Kind.FUSED, "transformer-engine"),
        (Kind.UNFUSED, Kind.FUSED, "transformer-engine+pad"),
        (Kind.UNFUSED, Kind.FLASH, "transformer-engine+pad"),
        (Kind.UNFUSED, Kind.UNFUSED, "transformer-engine"),
    ],
)
def test_padding_where_only_the_padded_form_is_fused(
    native: Kind, padded: Kind, chosen: str, long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mla_serve.selection import Selector

    answers = Answers({(192, 128): native, (192, 192): padded}, long=long)
    monkeypatch.setattr(transformer_engine, "import_module", lambda name: answers)
    kernel = backend("transformer-engine")
    monkeypatch.setattr(kernel, "available", lambda: None)
    kernel.device = CPU
    with torch.inference_mode():
        decision = Selector(CPU, policy="availability", backends=[kernel]).decide(PREFILL)
        assert (kernel.kind(PREFILL), decision.label) == (native, chosen)
        asked = answers.asked
        assert kernel.kind(PREFILL) is native
        assert answers.asked == asked, "an answer is kept"


def test_transformer_engine_takes_no_part_where_states_are_merged() -> None:
    kernel = backend("transformer-engine")
    assert kernel.supports(CONTEXT) == "returns no LSE, which this call needs for merging"
    assert kernel.supports(DECODE) == "takes the un-absorbed form only, not the paged latent cache"
