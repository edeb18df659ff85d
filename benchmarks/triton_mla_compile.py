"""Compiles `triton-mla` for GPUs that are not here, and prints what ptxas made of it: registers, spills, shared memory.

    python benchmarks/triton_mla_compile.py
    python benchmarks/triton_mla_compile.py --capability 90 --markdown

Needs Triton and no GPU. A spill or a tile that does not fit is seen here before anybody has to time it.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mla_serve.backends.triton_mla_kernel import decode_kernel
from mla_serve.backends.triton_mla_schedule import plan_kernel
from mla_serve.backends.triton_mla_tuning import Gpu, Tuning, choose, up
from mla_serve.shapes import AttentionShape, MLADims

GPUS = {
    80: Gpu(80, 108, 166_912),  # A100
    86: Gpu(86, 84, 101_376),  # A10, RTX 3090
    89: Gpu(89, 142, 101_376),  # L40S, RTX 4090
    90: Gpu(90, 132, 232_448),  # H100, H200
}
"""What `torch.cuda.get_device_properties` says of a GPU of each class."""

_TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float8_e4m3fn": "fp8e4nv"}
_POINTERS = {"out_lse": "fp32", "state": "fp32", "state_lse": "fp32"}


@dataclass(frozen=True, slots=True)
class Compiled:
    """`stack` is bytes of local memory for each thread, which is where spilled registers go; `shared` in bytes."""

    registers: int
    stack: int
    shared: int
    wgmma: int
    mma: int


def decode_shape(
    heads: int, q_len: int = 1, *, dtype: str = "bfloat16", cache_dtype: str | None = None, latent: int = 512, rope: int = 64
) -> AttentionShape:
    dims = MLADims(heads=heads, nope=128, rope=rope, v=128, latent=latent)
    return AttentionShape.decode(
        dims, batch=16, kv_len=4096, q_len=q_len, dtype=dtype, cache_dtype=cache_dtype, page_size=64, lse=True, graph=True
    )  # type: ignore[arg-type]  # fmt: skip


def compile_decode(shape: AttentionShape, gpu: Gpu, tuning: Tuning | None = None) -> Compiled:
    """The decode kernel of `shape` with `tuning` (None: the table's). Raises what Triton raises where it cannot be done."""
    tuning = tuning or choose(shape, gpu)
    width = up(max(16, shape.v))
    constants = {
        "NEED_LSE": shape.lse, "HEADS": shape.heads, "LATENT": shape.v, "ROPE": shape.rope, "PAGE": shape.page_size,
        "BLOCK_M": tuning.block_m, "BLOCK_N": tuning.block_n, "BLOCK_L": width, "BLOCK_R": up(max(16, shape.rope)),
        "PART": min(tuning.part, width), "SWAP": tuning.swap, "INTERPRETED": False,
    }  # fmt: skip
    query = _TYPES[shape.dtype]
    pointers = _POINTERS | {
        "q_nope": query, "q_pe": query, "out": query, "cache": _TYPES[shape.cache_dtype or shape.dtype],
        **dict.fromkeys(("table", "schedule", "requests", "starts", "counters"), "i32"),
    }  # fmt: skip
    return _compile(decode_kernel, gpu, constants, pointers, ("logit_scale", "cache_scale"), tuning.warps, tuning.stages)


def compile_plan(gpu: Gpu, *, heads: int = 16, requests: int = 256) -> Compiled:
    """The schedule's kernel for up to `requests`, a power of two."""
    constants = {
        "HEADS": heads, "PROGRAMS": gpu.multiprocessors, "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_REQUESTS": requests,
        "BLOCK_PROGRAMS": up(gpu.multiprocessors), "LOG_REQUESTS": requests.bit_length() - 1,
    }  # fmt: skip
    pointers = dict.fromkeys(("query_start", "kv_lens", "schedule", "requests", "starts", "counters"), "i32")
    return _compile(plan_kernel, gpu, constants, pointers, (), 4, 1)


def _compile(
    kernel: Any, gpu: Gpu, constants: dict[str, Any], pointers: dict[str, str], floats: Sequence[str], warps: int, stages: int
) -> Compiled:
    """As a launch would, with pointers and strides divisible by 16."""
    signature, attributes = {}, {}
    for number, name in enumerate(kernel.arg_names):
        kind = "constexpr" if name in constants else f"*{pointers[name]}" if name in pointers else "i32"
        signature[name] = "fp32" if name in floats else kind
        if name in pointers or name.startswith("stride"):
            attributes[(number,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    made = triton.compile(
        source, target=GPUTarget("cuda", gpu.capability, 32), options={"num_warps": warps, "num_stages": stages}
    )
    registers, stack = _resources(made.asm["cubin"])
    ptx = made.asm["ptx"]
    return Compiled(registers, stack, made.metadata.shared, ptx.count("wgmma.mma_async"), ptx.count("mma.sync"))


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes of a thread, as cuobjdump reads them."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found is not None, said
    return int(found[1]), int(found[2])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--capability", type=int, choices=GPUS, action="append")
    parser.add_argument("--markdown", action="store_true")
    asked = parser.parse_args()
    shapes = [decode_shape(16), decode_shape(32), decode_shape(128), decode_shape(16, cache_dtype="float8_e4m3fn")]
    names = [
        "sm",
        "heads",
        "cache",
        "rows",
        "keys",
        "warps",
        "stages",
        "swap",
        "programs",
        "registers",
        "stack",
        "shared",
        "products",
    ]
    print("| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|" if asked.markdown else "  ".join(names))
    fits = True
    for gpu in (GPUS[capability] for capability in asked.capability or GPUS):
        for shape in shapes:
            if shape.cache_dtype is not None and gpu.capability < 89:
                continue
            tuning = choose(shape, gpu)
            made = compile_decode(shape, gpu, tuning)
            t = asdict(tuning)
            row = [gpu.capability, shape.heads, shape.cache_dtype or shape.dtype]
            row += [t[name] for name in ("block_m", "block_n", "warps", "stages", "swap", "programs")]
            row += [made.registers, made.stack, made.shared, f"{made.wgmma} wgmma" if made.wgmma else f"{made.mma} mma"]
            print("| " + " | ".join(map(str, row)) + " |" if asked.markdown else "  ".join(map(str, row)), flush=True)
            fits = fits and made.shared <= gpu.shared_bytes
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main())
