from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from mla_serve.backends import AttentionError, Kind, Limits, load_backends
from mla_serve.backends.registry import BUILT_IN
from mla_serve.backends.triton_mla import TritonMLA
from mla_serve.backends.triton_mla_tuning import INTERPRETER, Gpu, Tuning, choose, shared_bytes
from mla_serve.selection import fingerprint
from mla_serve.shapes import AttentionShape, MLADims
from tests.backends.cases import SCALE, make
from tests.backends.judging import agree
from tests.conftest import SEED

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
DIMS = MLADims(heads=16, nope=128, rope=64, v=128, latent=512)
DECODE = AttentionShape.decode(DIMS, batch=4, kv_len=4096, dtype="bfloat16", page_size=64, lse=True)


def without_interpreter() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


@pytest.mark.triton
def test_the_laws_hold_under_the_interpreter() -> None:
    """In a process of its own: the interpreter is chosen for a whole process. Its tests are listed where one fails."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/backends/interpreted.py"]
    env = {**os.environ, "TRITON_INTERPRET": "1", "MLA_SERVE_TEST_SEED": str(SEED), "PYTEST_ADDOPTS": ""}
    for name in [name for name in env if name.startswith("PYTEST_XDIST")]:
        del env[name]
    ran = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]


def test_without_a_gpu_or_the_interpreter_it_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    backend = TritonMLA(CPU)
    reason = "needs a CUDA device of sm_80 or newer, or Triton's interpreter (TRITON_INTERPRET=1)"
    assert backend.available() == reason
    with pytest.raises(AttentionError, match="triton-mla cannot run decode attention here: needs a CUDA device of sm_80"):
        backend.prepare(DECODE, Limits(4, 4, 4096))


def test_triton_is_not_imported_with_the_package() -> None:
    script = (
        "import sys, torch, mla_serve.backends as b\n"
        "before = 'triton' in sys.modules\n"  # torch may have brought it
        "b.load_backends(torch.device('cpu'), ['triton-mla'])[0].available()\n"
        "sys.exit('mla_serve.backends.triton_mla_kernel' in sys.modules or ('triton' in sys.modules) != before)"
    )
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=without_interpreter(), timeout=120).returncode == 0


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (AttentionShape.prefill(DIMS, batch=1, q_len=8, dtype="bfloat16", lse=False), "absorbed form only"),
        (replace(DECODE, dtype="float8_e4m3fn"), "takes float32, bfloat16 and float16, not float8_e4m3fn"),
        (DECODE.widened(qk=640), "keys of latent and rope, 512 + 64, not 640 wide"),
        (DECODE.widened(qk=2112, v=2048), "latents up to 1024 wide, not 2048"),
        (DECODE, None),
        (DECODE.widened(heads=7), None),
        (replace(DECODE, page_size=48, graph=True, q_len=64, cache_dtype="float8_e4m3fn"), None),
    ],
)
def test_what_it_takes(shape: AttentionShape, reason: str | None) -> None:
    found = TritonMLA(CPU).supports(shape)
    if reason is None:
        assert found is None
    else:
        assert found is not None
        assert reason in found


def test_it_is_a_candidate_of_every_decode_that_nobody_gets_unmeasured() -> None:
    """Until a GPU has run it: last among its class, and no part of the hash by which the shipped decisions hold."""
    (backend,) = load_backends(CPU, ["triton-mla"])
    assert isinstance(backend, TritonMLA)
    assert (backend.capturable, backend.takes_cache_scale, backend.needs_host_lens) == (True, True, False)
    assert backend.kind(DECODE) is Kind.UNFUSED
    assert BUILT_IN.index("triton-mla") > BUILT_IN.index("torch-mla")
    assert all(name.startswith(fingerprint._ADAPTERS) for name in ("triton_mla.py", "triton_mla_kernel.py"))


A100, A10 = Gpu(80, 108, 166_912), Gpu(86, 84, 101_376)
H200, RTX5090 = Gpu(90, 132, 232_448), Gpu(120, 170, 101_376)


@pytest.mark.parametrize("gpu", [A100, A10, H200, RTX5090], ids=lambda gpu: f"sm{gpu.capability}")
@pytest.mark.parametrize("heads", [1, 16, 20, 40, 128])
@pytest.mark.parametrize("latent", [64, 256, 512])
@pytest.mark.parametrize(("dtype", "cache"), [("bfloat16", None), ("float32", None), ("bfloat16", "float8_e4m3fn")])
def test_what_is_chosen_fits(gpu: Gpu, heads: int, latent: int, dtype: str, cache: str | None) -> None:
    dims = replace(DIMS, heads=heads, latent=latent)
    shape = AttentionShape.decode(dims, batch=1, kv_len=64, dtype=dtype, page_size=64, cache_dtype=cache)  # type: ignore[arg-type]
    tuning = choose(shape, gpu)
    assert shared_bytes(shape, tuning, gpu) <= gpu.shared_bytes
    assert tuning.block_m >= 16
    assert not tuning.swap or (dtype == "bfloat16" and tuning.block_n == 64)
    assert choose(replace(shape, q_len=8), gpu).block_m >= tuning.block_m or dtype == "float32"


def test_the_interpreter_has_a_tuning_of_its_own() -> None:
    assert choose(DECODE, INTERPRETER).least_keys <= choose(DECODE, INTERPRETER).block_n


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.triton
@pytest.mark.parametrize(
    ("capability", "heads", "cache", "products"),
    [(80, 16, None, "mma"), (89, 16, "float8_e4m3fn", "mma"), (90, 16, None, "wgmma"), (90, 128, None, "wgmma")],
)
def test_it_compiles_for_gpus_that_are_not_here(
    capability: int, heads: int, cache: str | None, products: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the interpreter lets pass, a compiler may not; and what is chosen must fit by the compiler's count too."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # as it is; unset, Triton 3.9 warns that it will change
    offline = script("triton_mla_compile")
    shape, gpu = offline.decode_shape(heads, cache_dtype=cache), offline.GPUS[capability]
    made = offline.compile_decode(shape, gpu)
    assert made.shared <= min(gpu.shared_bytes, shared_bytes(shape, choose(shape, gpu), gpu))
    assert getattr(made, products) > 0
    if heads == 16:
        assert offline.compile_plan(gpu).registers > 0


def test_a_tuning_that_does_not_fit_is_seen_by_the_count() -> None:
    large = Tuning(64, 64, 8, 4, 1, 128, 8)
    assert shared_bytes(DECODE, large, H200) > H200.shared_bytes


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
def test_runs_repeat_to_the_bit_and_leave_the_counters_at_zero(heads: int) -> None:
    """Pieces are united in the order of their keys, whoever comes last, so nothing depends on which program was faster."""
    device = torch.device("cuda")
    backend = TritonMLA(device)
    shape = replace(DECODE, heads=heads)
    for kv_lens in ([8192], [20000, 5, 0, 300], [1000] * 40):
        case = make(shape, [1] * len(kv_lens), kv_lens, device)
        plan = backend.plan(case.prepare(backend), case.batch, scale=SCALE)
        first = case.run(backend, plan)
        agree("right", backend, case, first, case.expected())
        for _ in range(50):
            again = case.run(backend, plan)
            assert torch.equal(first[0], again[0])
            assert first[1] is not None
            assert again[1] is not None
            assert torch.equal(first[1], again[1])
        assert not plan.counters.any()


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True])
def test_nothing_waits_for_the_device(graph: bool) -> None:
    device = torch.device("cuda")
    backend = TritonMLA(device)
    case = make(replace(DECODE, graph=graph), [1, 1, 1], [700, 0, 64], device)
    state = case.prepare(backend)
    plan = backend.plan(state, case.batch, scale=SCALE)
    case.run(backend, plan)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        out, lse = case.run(backend, backend.plan(state, case.batch, scale=SCALE, reuse=plan))
        case.run(backend, backend.plan(state, case.batch, scale=SCALE))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    agree("right", backend, case, (out, lse), case.expected())
