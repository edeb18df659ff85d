"""Writes docs/kernels.md, and its plots, from the results files that `benchmarks/h200.sh` leaves.

    python benchmarks/kernels_doc.py --results benchmarks/results --out docs/kernels.md

Every figure in the page comes out of a file; where a file is missing, the page says so. The prose is in this script.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from mla_serve.bench.attention_plot import plot
from mla_serve.bench.attention_table import RowData, groups, label, title

MAIN = "h200-attention.json"
TORCH = "h200-attention-torch.json"
EMULATED = "h200-attention-sm80-emulated.json"
PROBES = "h200-probes.json"

INTRODUCTION = """\
# Attention kernels

<!-- Written by benchmarks/kernels_doc.py from benchmarks/results; change the script, not this page. -->

MLA attention has two forms. Prefill and context chunks are *un-absorbed*: as many key heads as query heads, Q/K width
nope + rope, value width v (DeepSeek: 192 and 128). Decode is *absorbed*: all query heads attend to one latent per
cached token, Q/K width latent + rope, value width latent (576 and 512), straight from the paged cache. Which kernel is
fastest depends on the form, on the batch, on the lengths and on the number of heads, so mla_serve measures; this page
holds what the kernels are and what was measured.
"""

KERNELS = {
    "flashinfer-fa3": "FlashInfer's kernels for Hopper: `BatchMLAPagedAttentionWrapper` in decode, "
    "`BatchPrefillWithRaggedKVCacheWrapper` in prefill and context. It compiles on first use and plans from "
    "host lengths.",
    "flashinfer-fa2": "The same wrappers with FlashInfer's kernels for Ampere and later.",
    "fa3": "FlashAttention-3: Q/K and V widths may differ; decode takes the absorbed query beside the rope part "
    "(`qv`). In vLLM it is the default on Hopper.",
    "fa2": "FlashAttention-2: equal widths only, so V is padded; no absorbed form.",
    "fa4": "FlashAttention-4, where it is installed.",
    "flashmla": "DeepSeek's dense decode kernel for Hopper: pages of 64 tokens; its tiles hold 64 query heads, so fewer "
    "are served natively or padded, whichever is faster.",
    "transformer-engine": "NVIDIA Transformer Engine's `DotProductAttention`. Its own `get_attention_backend` is asked "
    "natively and with padded widths; it returns no LSE, so it serves no context chunks.",
    "torch-flash": "torch's flash attention: equal widths only.",
    "torch-efficient": "torch's memory-efficient attention.",
    "torch-cudnn": "cuDNN's attention through torch.",
    "torch-math": "torch's plain matrix products and softmax: the last resort in prefill.",
    "triton-mla": "Our own decode kernel in Triton, one launch, from Ampere up: docs/triton-mla.md.",
    "torch-mla": "The absorbed form in plain torch: the last resort in decode.",
    "vllm-triton-mla": "A peer only: vLLM's Triton decode kernel, with vLLM's rule for the number of KV splits.",
}

METHOD = """\
## How it was measured

One process, one GPU. All contenders of a shape run on the same inputs in interleaved rounds, each round in an order of
its own; a figure is the median. The L2 cache is flushed before every run. Decode is replayed from a CUDA graph for
everybody, prefill and context are called eagerly, as they are served. A plan (wrappers, schedules) is outside the timed
region for everybody. Padding and trimming are inside. `chosen` is the kernel that the Selector's table names, from a
probe in an earlier process, ranked by the run alone, as the peers are compared; a deployment also weighs a plan by the
number of layers that share it. Peers are called through their own public API with their own best settings
(`benchmarks/peers`). The floor is the larger of traffic (each input read once, each output written once) and
arithmetic, at the rates of a large copy and a large matrix product in the same run. Errors are the largest relative L2
of a query's output against float32 over a sample of rows.
"""

MISSES = """\
### What misses, and why

- **Emulated Ampere, 2.2x where 3x was asked.** The target came from timings with launches inside, and vLLM's Triton decode
  needs several; replayed from a CUDA graph, as a server runs it, it loses that handicap in small batches. From batch 16
  on FlashInfer fa2 itself is the bound: its tiles hold 64 query rows, of which 16 heads fill a quarter, and it reads at
  43 % of the measured bandwidth (85 us against a floor of 36.5). No other library here has an MLA decode for Ampere.
- **Ragged decode, up to 28 % behind.** A ragged bucket is measured on one request of three times the mean among equals.
  At 128 heads and at 8 query tokens FlashMLA wins that, and FA3 the batch that the bench draws, whose lengths are
  log-uniform between 100 and 32,768.
- **Context chunks, up to 10 % behind.** Our FA3 adapter copied the LSE twice on its way from [heads, tokens] to
  [tokens, heads]; it hands out a view since, which was not measured again. FlashInfer's LSE is in base 2 there, and
  turning it into a natural logarithm costs a small kernel. That these account for the gap of 2 to 7 us was not measured.
"""

NO_FIGURES = "There are no figures of this yet; `benchmarks/h200.sh` makes them."


def read(directory: Path, name: str) -> dict[str, Any] | None:
    path = directory / name
    return json.loads(path.read_text()) if path.is_file() else None


def host(result: dict[str, Any]) -> str:
    """Where and when, in a line."""
    device = result["host"]["devices"][0]
    versions = ", ".join(f"{name} {version}" for name, version in result["host"]["versions"].items())
    return f"{device['name']}, {result['date'][:10]}, Python {result['host']['python']}, {versions}. `{result['command']}`"


def cell(us: float | None) -> str:
    return "" if us is None else f"{us:,.1f}" if us < 1000 else f"{us:,.0f}"


def measured(rows: Sequence[RowData], phases: Sequence[str]) -> Iterator[str]:
    """A table: a line per shape, a column per kernel, the best of a line in bold."""
    kept = [row for row in rows if row["phase"] in phases]
    names = [name for name in dict.fromkeys(label(row) for row in kept if row["us"] is not None) if name != "chosen"]
    if not names:
        yield NO_FIGURES
        return
    yield "| shape | floor | **chosen** | is | " + " | ".join(names) + " |"
    yield "|---|---|---|---|" + "---|" * len(names)
    for group in groups(kept):
        timed = {label(row): row["us"] for row in group if row["us"] is not None}
        others = {name: us for name, us in timed.items() if name != "chosen"}
        best = min(others.values(), default=None)
        marked = [f"**{cell(us)}**" if (us := others.get(name)) is not None and us == best else cell(us) for name in names]
        kernel = next((row.get("kernel") for row in group if row["name"] == "chosen"), None)
        start = [title(group[0]), cell(group[0]["floor_us"]), cell(timed.get("chosen")), kernel or ""]
        yield "| " + " | ".join([*start, *marked]) + " |"
    worst = {name: max(row["error"] for row in kept if label(row) == name and row["us"] is not None) for name in names}
    yield ""
    yield "Largest error: " + ", ".join(f"{name} {error:.2g}" for name, error in worst.items()) + "."


def refused(rows: Sequence[RowData]) -> Iterator[str]:
    """Contenders that gave a wrong answer or crashed, and where."""
    for row in rows:
        if row["verdict"] in ("disqualified", "crashed"):
            yield f"- {label(row)}, {title(row)}: {row['verdict']}: {row.get('reason')}"


def kernel_section(name: str, about: str, result: dict[str, Any] | None) -> Iterator[str]:
    """What a kernel is, what it takes and what it refuses, in its backend's words on the host that was measured."""
    yield f"### {name}"
    yield ""
    yield about
    yield ""
    backends = {backend["name"]: backend for backend in (result or {}).get("backends", [])}
    backend = backends.get(name)
    if backend is None:
        rows = [row for row in (result or {}).get("rows", []) if row["name"] == name and row["us"] is None]
        for reason in dict.fromkeys(row.get("reason") for row in rows):
            yield f"- Refused: {reason}."
        return
    if backend["unavailable"]:
        yield f"- Not usable on the host that was measured: {backend['unavailable']}."
        return
    yield f"- Library: {backend['library']} {(result or {})['host']['versions'].get(backend['library'], '')}".rstrip() + "."
    yield f"- Takes: {'; '.join(backend['takes']) or 'none of the shapes that were asked'}."
    if backend["padded"]:
        yield f"- Takes padded: {'; '.join(backend['padded'])}."
    facts = [
        "gives an LSE" if backend["gives_lse"] else "gives no LSE",
        "runs in CUDA graphs" if backend["capturable"] else "cannot be captured in a CUDA graph",
    ]
    if backend["needs_host_lens"]:
        facts.append("plans from exact host lengths")
    if backend["page_sizes"]:
        facts.append(f"pages of {', '.join(map(str, backend['page_sizes']))}")
    if backend["head_counts"]:
        facts.append(f"{', '.join(map(str, backend['head_counts']))} query heads")
    yield f"- It {', '.join(facts)}."
    for reason, shapes in backend["refuses"].items():
        yield f"- Refuses {'; '.join(shapes)}: {reason}."


def page(directory: Path, pictures: dict[str, str]) -> Iterator[str]:
    """The page, line by line. `pictures`: links of the plots that were drawn, by results file."""
    main, torch, emulated, probes = (read(directory, name) for name in (MAIN, TORCH, EMULATED, PROBES))
    yield INTRODUCTION
    yield "## Measured on one H200"
    yield ""
    yield host(main) if main else NO_FIGURES
    if main:
        rates = ", ".join(f"{name} {value:,.0f}" for name, value in main["rates"].items())
        yield ""
        yield f"Rates beside it: {rates}. Times in microseconds; the best kernel of a line is bold."
        for heading, phases in (("Decode", ("decode",)), ("Prefill and context", ("prefill", "context"))):
            yield ""
            yield f"### {heading}"
            yield ""
            yield from measured(main["rows"], phases)
        yield from ("", *refused(main["rows"]))
        if MAIN in pictures:
            yield f"\n![Times over the choice's, by shape]({pictures[MAIN]})"
    yield ""
    yield "## Targets"
    yield ""
    if main:
        for verdict in verdicts().verdicts(main, torch, emulated, probes):
            yield f"- {str(verdict).strip()}"
        yield ""
        yield MISSES
    else:
        yield NO_FIGURES
    yield ""
    yield "## torch alone"
    yield ""
    yield "Nothing but torch installed: which of its kernels, natively or padded, serves a prefill."
    yield ""
    if torch:
        yield host(torch)
        yield ""
        yield from measured(torch["rows"], ("prefill",))
    else:
        yield NO_FIGURES
    yield ""
    yield "## sm_80, emulated"
    yield ""
    if emulated:
        yield f"**This is no result of an Ampere GPU.** It is {emulated['note']}."
        yield ""
        yield host(emulated)
        yield ""
        yield from measured(emulated["rows"], ("decode",))
        yield from ("", *refused(emulated["rows"]))
        if EMULATED in pictures:
            yield f"\n![Emulated sm_80: times over the choice's]({pictures[EMULATED]})"
    else:
        yield NO_FIGURES
    yield ""
    yield METHOD
    yield "## The kernels"
    yield ""
    yield "What each takes and refuses, in its backend's own words" + (" on the host above." if main else ".")
    others = {backend["name"]: backend["about"] for backend in (main or {}).get("backends", [])}
    for name, about in {**others, **KERNELS}.items():
        yield ""
        yield from kernel_section(name, about, main)


def verdicts() -> ModuleType:
    """benchmarks/verdicts.py, which is in no package."""
    name = "benchmarks_verdicts"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("verdicts.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


def draw(directory: Path, below: Path) -> dict[str, str]:
    """Plots beside the page; their names by results file."""
    drawn = {}
    for name in (MAIN, EMULATED):
        result = read(directory, name)
        if result is None:
            continue
        picture = below / "images" / f"{Path(name).stem}.png"
        device = result["host"]["devices"][0]["name"]
        what = f"EMULATED {result['emulated']} on one {device}, no Ampere result" if result.get("emulated") else f"one {device}"
        plot(result["rows"], picture, f"{what}, {result['date'][:10]}; decode by CUDA-graph replay, the rest eager, L2 flushed")
        drawn[name] = f"images/{picture.name}"
    return drawn


def write(results: Path, out: Path) -> None:
    """The page and its plots."""
    out.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join(page(results, draw(results, out.parent)))
    while "\n\n\n" in text:
        text = text.replace("\n\n\n", "\n\n")
    out.write_text(text.rstrip() + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--out", type=Path, default=Path("docs/kernels.md"))
    asked = parser.parse_args()
    write(asked.results, asked.out)


if __name__ == "__main__":
    main()
