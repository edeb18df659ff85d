"""`mla-serve bench ...`: the commands; what they measure is in the files beside this one."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from mla_serve.bench.attention_command import attention

bench = typer.Typer(no_args_is_help=True, help="Measure: attention kernels, the server, the look-up.")

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Out = Annotated[Path | None, typer.Option(help="Write the result, with host and versions, to this file too.")]


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _report(data: dict[str, Any], out: Path | None, *, as_json: bool) -> None:
    """Adds date, host and command to `data`, writes and prints it."""
    from mla_serve.bench.results import save_result, stamped

    data = stamped(data, command=" ".join(["mla-serve", *sys.argv[1:]]))
    if out is not None:
        save_result(out, data)
    if as_json:
        print(json.dumps(data, indent=1))


bench.command("attention")(attention)


@bench.command("serve")
def serve(
    against: Annotated[str, typer.Option(help="The peer: transformers.")] = "transformers",
    model: Annotated[
        Path | None, typer.Option(help="Directory made by an earlier run; default: makes the random checkpoint.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1)] = 16,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 256,
    output_tokens: Annotated[int, typer.Option(min=1)] = 64,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of each side.")] = 2,
    layers: Annotated[bool, typer.Option("--layers", help="What HTTP costs: the same engine with it and without.")] = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Output tokens per second of this server, over HTTP, beside a peer's on the same requests."""
    import asyncio

    from mla_serve.bench.checkpoint import make_checkpoint
    from mla_serve.bench.layers import measure
    from mla_serve.bench.serve import Load, against_transformers

    if against != "transformers":
        raise typer.BadParameter(f"there is no peer {against!r}; use transformers")
    load = Load(requests, prompt_tokens, output_tokens, threads)
    with tempfile.TemporaryDirectory() as scratch:
        directory = model or Path(scratch)
        if model is None:
            make_checkpoint(directory)
        result = asyncio.run(measure(directory, load, _note)) if layers else against_transformers(directory, load, _note)
    _report(result, out, as_json=as_json)
    if as_json:
        return
    if layers:
        print(f"HTTP adds {result['first_token_added_ms']:.2f} ms to the median time to the first token", end=" ")
        print(f"({result['first_token_ms']['engine']:.2f} ms without it)")
        print(f"and takes {result['throughput_lost']:.1%} of {result['tokens_per_s']['engine']:.1f} tokens/s")
        return
    rates, faster, equal = result["tokens_per_s"], result["times_faster"], result["tokens_equal"]
    print(f"mla_serve over HTTP            {rates['mla_serve']:8.1f} tokens/s")
    for name, label in (("sequential", "transformers, one by one"), ("batch", "transformers, one batch")):
        print(f"{label:30} {rates[f'transformers_{name}']:8.1f} tokens/s   {faster[name]:.1f}x slower,", end=" ")
        print(f"same tokens in {equal[name]} of {equal['of']} requests")


@bench.command("selector")
def selector(out: Out = None, as_json: Json = False) -> None:
    """The look-up on the hot path, in microseconds, and the load of a decision file of 500 buckets, in milliseconds."""
    import torch

    from mla_serve.backends.base import Limits
    from mla_serve.bench.grids import DEEPSEEK
    from mla_serve.bench.table import benchmark_load
    from mla_serve.selection import Selector, benchmark_lookup

    limits = Limits(max_requests=64, max_tokens=2048, max_kv_tokens=4096)
    bound = Selector(torch.device("cpu"), policy="availability").bind(DEEPSEEK, dtype="float32", page_size=16, limits=limits)
    figures = benchmark_lookup(bound) | benchmark_load()
    _report(figures, out, as_json=as_json)
    if as_json:
        return
    print(f"look-up  median {figures['median_us']:.2f} us, p99 {figures['p99_us']:.2f} us")
    print(f"load     median {figures['load_ms']:.1f} ms for {figures['buckets']:.0f} buckets")
