"""The command line. It parses, calls, prints; what is worth knowing lives in the rooms it calls.

torch and the server are imported inside the commands, so that `mla-serve --help` answers at once.
"""

from __future__ import annotations

import json
import logging
import sys
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mla_serve import __version__
from mla_serve.bench.commands import bench
from mla_serve.errors import UserError
from mla_serve.tables.commands import table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mla_serve.selection.decision import Decision
    from mla_serve.selection.probe import Progress

app = typer.Typer(
    name="mla-serve", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="Serves Multi-head Latent Attention models, each attention call through the kernel measured best for its shape.",
)  # fmt: skip
app.add_typer(bench, name="bench")
app.add_typer(table, name="table")

Model = Annotated[
    str | None, typer.Argument(metavar="[MODEL]", help="Hugging Face directory or name; default: the demo model.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Policy = Annotated[
    str,
    typer.Option(
        help="measured: the fastest kernel that is right; availability: by kernel class, untimed; "
        "batch-invariant: the same bits in any company, each request computed alone."
    ),
]
Attention = Annotated[str, typer.Option(metavar="PINS", help="Pin kernels: prefill=torch-flash+pad,decode=torch-mla.")]
Decisions = Annotated[Path | None, typer.Option(help="Decision file to read and write; default: one per user.")]
KernelTimeout = Annotated[
    float | None, typer.Option(min=0.1, help="Seconds one kernel gets at one shape; default: 60, on a GPU 300.")
]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; default: the physical cores.")]


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def emit(data: Any) -> None:
    print(json.dumps(data, indent=2))


def _print_version(asked: bool) -> None:
    if asked:
        print(f"mla-serve {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def serve(
    model: Model = None,
    host: Annotated[str, typer.Option(help="Address to listen on; keep the default unless keys are set.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one.")] = 8000,
    engine: Annotated[str, typer.Option(help="auto or embedded.")] = "auto",
    policy: Policy = "measured",
    attention: Attention = "",
    decisions: Decisions = None,
    probe: Annotated[
        str, typer.Option(help="When to measure what the decision file lacks: off, idle (no request), on-demand (when met).")
    ] = "idle",
    kernel_timeout: KernelTimeout = None,
    dtype: Annotated[str, typer.Option(help="auto (the checkpoint's), float32, bfloat16 or float16.")] = "auto",
    max_model_len: Annotated[int | None, typer.Option(min=2, help="Longest prompt plus answer, in tokens.")] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Requests that run at once.")] = 64,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Tokens of one step; longer prompts go in chunks.")] = 2048,
    page_size: Annotated[int | None, typer.Option(min=1, help="Tokens per page of the latent cache.")] = None,
    num_pages: Annotated[int | None, typer.Option(min=1, help="Pages of the latent cache; default: from free memory.")] = None,
    prefix_cache: Annotated[bool, typer.Option(help="Keep the latents of finished requests for later prompts.")] = True,
    threads: Threads = None,
    served_model_name: Annotated[str | None, typer.Option(help="Name that clients use; default: MODEL's own.")] = None,
    max_queue: Annotated[int, typer.Option(min=1, help="Open requests before new ones get 429.")] = 512,
    api_key_file: Annotated[
        Path | None, typer.Option(help="One key a line; then every route but the health checks wants one.")
    ] = None,
    drain_timeout: Annotated[float, typer.Option(min=0, help="Seconds that running requests get after SIGTERM.")] = 30.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the start as one JSON line.")] = False,
) -> None:
    """Serve MODEL over HTTP, OpenAI-compatible."""
    from mla_serve.engine.embedded import EngineConfig
    from mla_serve.engine.embedded.core import DTYPES
    from mla_serve.models import public_name, resolve
    from mla_serve.selection import parse_pins
    from mla_serve.server.run import serve as run
    from mla_serve.server.settings import ServerSettings, read_api_keys

    if dtype not in ("auto", *DTYPES):
        raise typer.BadParameter(f"there is no dtype {dtype!r}; use auto, {', '.join(DTYPES)}")
    if engine not in ("auto", "embedded"):
        raise typer.BadParameter(f"there is no engine {engine!r}; use auto or embedded")
    if probe not in ("off", "idle", "on-demand"):
        raise typer.BadParameter(f"there is no way to probe {probe!r}; use off, idle or on-demand")
    directory = resolve(model)
    config = EngineConfig(
        model=str(directory),
        dtype=dtype,
        policy=_policy(policy),
        pins=parse_pins(attention),
        decisions=str(decisions) if decisions else None,
        probe=probe,
        kernel_timeout=kernel_timeout,
        max_model_len=max_model_len,
        max_requests=max_num_seqs,
        max_tokens=max_num_batched_tokens,
        page_size=page_size,
        num_pages=num_pages,
        prefix_cache=prefix_cache,
        threads=threads,
    )
    settings = ServerSettings(
        engine=config,
        host=host,
        port=port,
        served_model_name=served_model_name or public_name(model),
        max_queue=max_queue,
        api_keys=read_api_keys(api_key_file),
        drain_timeout=drain_timeout,
        json_start=as_json,
    )
    raise typer.Exit(run(settings))


@app.command()
def probe(
    model: Model = None,
    out: Annotated[Path | None, typer.Option(help="Decision file to write; default: the one that serve reads.")] = None,
    grid: Annotated[str | None, typer.Option(help="cpu, decode, prefill, small or full in place of MODEL's own.")] = None,
    tp: Annotated[int, typer.Option(min=1, help="Tensor parallel size: the heads are divided by it.")] = 1,
    dtype: Annotated[str, typer.Option(help="auto (the checkpoint's), float32, bfloat16 or float16.")] = "auto",
    max_model_len: Annotated[int | None, typer.Option(min=2, help="Longest prompt plus answer, in tokens.")] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Requests that run at once.")] = 64,
    page_size: Annotated[int | None, typer.Option(min=1, help="Tokens per page of the latent cache.")] = None,
    graph: Annotated[bool, typer.Option(help="Decode as it is replayed from CUDA graphs, as vLLM serves it.")] = False,
    policy: Policy = "measured",
    again: Annotated[bool, typer.Option(help="Measure also what the file already holds.")] = False,
    budget: Annotated[float | None, typer.Option(min=0, help="Seconds after which the rest is left unmeasured.")] = None,
    kernel_timeout: KernelTimeout = None,
    report: Annotated[Path | None, typer.Option(metavar="FILE.html", help="Write the page of /attention as one file.")] = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Measure every kernel on MODEL's grid of shapes, native and padded, and write the decision file."""
    import torch

    from mla_serve.bench.grids import named_grid
    from mla_serve.engine.embedded.threads import available_threads
    from mla_serve.models import attention_grid, public_name
    from mla_serve.selection import DecisionTable, Selector, default_table_path, render_table
    from mla_serve.selection import probe as run
    from mla_serve.selection.invariant import mode
    from mla_serve.selection.isolated import Isolated

    torch.set_num_threads(threads or available_threads())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if grid is not None:
        shapes, layers = named_grid(grid), 1
    else:
        shapes, layers = attention_grid(
            model, device, tp=tp, dtype=dtype, page_size=page_size, max_model_len=max_model_len, max_batch=max_num_seqs,
            graph=graph,
        )  # fmt: skip
    if _policy(policy) == "batch-invariant":
        shapes = list(dict.fromkeys(map(mode, shapes)))
    path = out or default_table_path()
    measurer = Isolated(device, clean_pool=True, seconds=kernel_timeout)
    selector = Selector(device, table=DecisionTable.load(path), layers=layers, clean_pool=True, measurer=measurer)
    with closing(selector), _progress(len(shapes)) as progress:
        decisions = run(selector, shapes, progress=progress, again=again, budget_s=budget)
    selector.table.save(path)
    if report is not None:
        _write_report(report, decisions, subject=f"the grid {grid}" if grid else public_name(model))
    if as_json:
        emit([decision.to_json() for decision in decisions])
        return
    render_table(decisions)
    padded = sum(decision.padding is not None and decision.policy == "measured" for decision in decisions)
    left = sum(decision.policy != "measured" for decision in decisions)
    unmeasured = f"; {left} more were not measured in {budget:g} s" if left else ""
    note(f"{len(decisions) - left} buckets in {path}; a padded kernel won {padded} of them{unmeasured}")


def _write_report(path: Path, decisions: Sequence[Decision], *, subject: str) -> None:
    from mla_serve.pages import render_page

    try:
        path.write_text(render_page((), decisions, subject=subject), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write the report {path} ({error.strerror or error}); the decisions are kept") from error
    note(f"the report is in {path}")


@contextmanager
def _progress(total: int) -> Iterator[Progress]:
    """A bar on a terminal, a line per bucket elsewhere; both on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done, of, decision: note(
            f"probed {done} of {of}: {f'{decision.bucket}: {decision.label}' if decision else 'no kernel can'}"
        )
        return
    columns = TextColumn("probing"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=total)

        def advance(done: int, of: int, decision: Decision | None) -> None:
            bar.update(task, completed=done, description=f"{decision.bucket}: {decision.label}" if decision else "")

        yield advance


@app.command()
def explain(
    phase: Annotated[str, typer.Option(help="prefill, context or decode.")] = "decode",
    batch: Annotated[int, typer.Option(min=1, help="Requests.")] = 1,
    heads: Annotated[int, typer.Option(min=1, help="Query heads of one rank.")] = 16,
    q_len: Annotated[
        int | None, typer.Option(min=1, help="New tokens per request; default: 1 in decode, else --kv-len.")
    ] = None,
    kv_len: Annotated[int | None, typer.Option(min=1, help="Key tokens per request; default: --q-len, or 1024.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    qk: Annotated[int | None, typer.Option(min=1, help="Q/K width; default: DeepSeek's, 192, in decode 576.")] = None,
    v: Annotated[int | None, typer.Option(min=1, help="Value width; default: DeepSeek's, 128, in decode 512.")] = None,
    rope: Annotated[int, typer.Option(min=0, help="The rope part of the Q/K width.")] = 64,
    lse: Annotated[bool, typer.Option(help="Prefill that is merged with cached context needs the LSE.")] = False,
    ragged: Annotated[bool, typer.Option(help="Decode in which the longest request has over twice the mean.")] = False,
    page_size: Annotated[int | None, typer.Option(min=1, help="Tokens per page; default: 16 on a CPU, 64 on a GPU.")] = None,
    policy: Policy = "measured",
    attention: Attention = "",
    decisions: Decisions = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Why this kernel: every candidate with its time, error and reason. Measures if the table has no entry."""
    import torch

    from mla_serve.engine.embedded.threads import available_threads
    from mla_serve.selection import DecisionTable, Selector, decision_sentence, default_table_path, parse_pins, render_decision
    from mla_serve.shapes import AttentionShape, Phase

    if phase not in [p.value for p in Phase]:
        raise typer.BadParameter(f"there is no phase {phase!r}; use prefill, context or decode")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise typer.BadParameter(f"there is no dtype {dtype!r} here; use float32, bfloat16 or float16")
    torch.set_num_threads(threads or available_threads())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    absorbed = phase == "decode"
    q = q_len or (1 if absorbed else kv_len or 1024)
    kv = kv_len or (1024 if absorbed else q)
    if phase == "prefill" and kv != q:
        raise typer.BadParameter(
            "prefill is new tokens on themselves, so --kv-len equals --q-len; cached keys are --phase context"
        )
    if absorbed and kv < q:
        raise typer.BadParameter("in decode --kv-len counts the new tokens too, so it is at least --q-len")
    widths = (qk or (576 if absorbed else 192), v or (512 if absorbed else 128))
    if absorbed and widths[0] != widths[1] + rope:
        raise typer.BadParameter(f"in decode --qk is --v (the latent rank) plus --rope: {widths[1]} + {rope}, not {widths[0]}")
    shape = AttentionShape(
        Phase(phase), batch, q, kv, heads, *widths, rope, dtype,  # type: ignore[arg-type]
        causal=phase != "context", lse=lse or phase == "context",
        page_size=(page_size or (64 if device.type == "cuda" else 16)) if absorbed else None,
        ragged=ragged and absorbed,
    )  # fmt: skip
    selector = Selector(
        device, policy=_policy(policy), pins=parse_pins(attention), clean_pool=True, on_demand=True,
        table=DecisionTable.load(decisions or default_table_path()),
    )  # fmt: skip
    with closing(selector):
        decision = selector.decide(shape)
    if as_json:
        emit(decision.to_json() | {"why": decision_sentence(decision)})
    else:
        render_decision(decision)


def _policy(name: str) -> Any:
    from mla_serve.selection.selector import POLICIES

    if name not in POLICIES:
        raise typer.BadParameter(f"there is no policy {name!r}; use {', '.join(POLICIES)}")
    return name


@app.command()
def doctor(as_json: Json = False) -> None:
    """This host's device and versions, and for each attention backend: usable, or why not."""
    from mla_serve.doctor import examine, render

    report = examine()
    emit(report.to_json()) if as_json else render(report)


def main() -> None:
    """Entry point of the console script: a UserError is one sentence on standard error and exit status 1."""
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    try:
        app()
    except UserError as error:
        note(f"mla-serve: {error}")
        sys.exit(1)


if __name__ == "__main__":
    main()
