"""`mla-serve serve`: from the command line to a running server, on either engine."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mla_serve.options import Attention, Decisions, KernelTimeout, Model, Policy, Threads, known_policy

if TYPE_CHECKING:
    from mla_serve.engine.vllm import VllmConfig

ENGINES = ("auto", "embedded", "vllm")
VLLM_ONLY = ("--distributed-executor-backend", "--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size")


def serve(
    context: typer.Context,
    model: Model = None,
    host: Annotated[str, typer.Option(help="Address to listen on; keep the default unless keys are set.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one.")] = 8000,
    engine: Annotated[
        str, typer.Option(help="embedded, vllm, or auto: vLLM where it is installed and there is a GPU.")
    ] = "auto",
    policy: Policy = "measured",
    attention: Attention = "",
    decisions: Decisions = None,
    probe: Annotated[
        str, typer.Option(help="When to measure what the decision file lacks: off, idle (no request), on-demand (when met).")
    ] = "idle",
    kernel_timeout: KernelTimeout = None,
    dtype: Annotated[str, typer.Option(help="auto (the checkpoint's), float32, bfloat16 or float16.")] = "auto",
    max_model_len: Annotated[int | None, typer.Option(min=2, help="Longest prompt plus answer, in tokens.")] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(min=1, help="Requests that run at once; default: 64, or vLLM's own.")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of one step, longer prompts go in chunks; default: 2048, or vLLM's own.")
    ] = None,
    page_size: Annotated[int | None, typer.Option(min=1, help="Tokens per page of the latent cache.")] = None,
    num_pages: Annotated[int | None, typer.Option(min=1, help="Pages of the latent cache; default: from free memory.")] = None,
    prefix_cache: Annotated[bool, typer.Option(help="Keep the latents of finished requests for later prompts.")] = True,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="GPUs that share each layer (vLLM).")] = 1,
    pipeline_parallel_size: Annotated[int, typer.Option(min=1, help="Groups of layers on GPUs of their own (vLLM).")] = 1,
    data_parallel_size: Annotated[int, typer.Option(min=1, help="Copies of the model (vLLM).")] = 1,
    distributed_executor_backend: Annotated[
        str | None, typer.Option(metavar="ray|mp", help="What runs vLLM's workers.")
    ] = None,
    threads: Threads = None,
    served_model_name: Annotated[str | None, typer.Option(help="Name that clients use; default: MODEL's own.")] = None,
    max_queue: Annotated[int, typer.Option(min=1, help="Open requests before new ones get 429.")] = 512,
    max_output_tokens: Annotated[int | None, typer.Option(min=1, help="Cap on every answer's tokens.")] = None,
    request_timeout: Annotated[float | None, typer.Option(min=0.1, help="Seconds that one request may take.")] = None,
    chat_template: Annotated[Path | None, typer.Option(help="A Jinja file in place of the model's own template.")] = None,
    tool_call_parser: Annotated[
        str, typer.Option(help="How MODEL writes tool calls: auto (from its chat template), none, or a format's name.")
    ] = "auto",
    reasoning: Annotated[str, typer.Option(help="Tell <think> from the answer: auto (by the template), on, off.")] = "auto",
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="One key a line; then every route but the health checks wants one. Without it MLA_SERVE_API_KEY counts, "
            "keys in it divided by white space."
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None, typer.Option(help="Origin of web pages that may call from a browser; may be repeated.")
    ] = None,
    otlp_endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="OpenTelemetry collector (OTLP over HTTP) that gets a span per request.")
    ] = None,
    drain_timeout: Annotated[float, typer.Option(min=0, help="Seconds that running requests get after SIGTERM.")] = 30.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the start as one JSON line.")] = False,
) -> None:
    """Serve MODEL over HTTP, OpenAI-compatible. With vLLM as the engine, what follows -- are flags of vLLM's own."""
    from mla_serve.engine.embedded import EngineConfig
    from mla_serve.engine.embedded.core import DTYPES
    from mla_serve.models import public_name, resolve
    from mla_serve.selection import parse_pins
    from mla_serve.server.parsers import TOOL_FORMATS
    from mla_serve.server.run import serve as run
    from mla_serve.server.settings import ServerSettings, read_api_keys

    flags = list(context.args)
    if model is not None and model.startswith("-"):  # `serve -- --a-flag`: what follows -- takes MODEL's place
        flags.insert(0, model)
        model = None
    _known("dtype", dtype, ("auto", *DTYPES))
    _known("engine", engine, ENGINES)
    _known("way to probe", probe, ("off", "idle", "on-demand"))
    _known("tool call format", tool_call_parser, ("auto", "none", *TOOL_FORMATS))
    _known("way to read reasoning", reasoning, ("auto", "on", "off"))
    pins = parse_pins(attention)
    directory = resolve(model)
    given: dict[str, object] = {
        "--dtype": None if dtype == "auto" else dtype,
        "--max-model-len": max_model_len,
        "--max-num-seqs": max_num_seqs,
        "--max-num-batched-tokens": max_num_batched_tokens,
        "--block-size": page_size,
        "--num-gpu-blocks-override": num_pages,
        "--distributed-executor-backend": distributed_executor_backend,
        "--tensor-parallel-size": _more_than_one(tensor_parallel_size),
        "--pipeline-parallel-size": _more_than_one(pipeline_parallel_size),
        "--data-parallel-size": _more_than_one(data_parallel_size),
    }
    chosen = _engine(engine)
    config: EngineConfig | VllmConfig
    if chosen == "vllm":
        from mla_serve.engine.vllm import VllmConfig

        for name, value in (("--threads", threads), ("--kernel-timeout", kernel_timeout)):
            if value is not None:
                raise typer.BadParameter(f"{name} is the embedded engine's; vLLM has settings of its own")
        own = [part for flag, value in given.items() if value is not None for part in (flag, str(value))]
        own += [] if prefix_cache else ["--no-enable-prefix-caching"]
        config = VllmConfig(
            model=str(directory),
            arguments=(*own, *flags),
            policy=known_policy(policy),
            pins=attention,
            decisions=str(decisions) if decisions else None,
            probe=probe,
        )
    else:
        for flag in VLLM_ONLY:
            if given[flag] is not None:
                raise typer.BadParameter(f"{flag} is vLLM's; the embedded engine runs on one device (--engine vllm)")
        if flags:
            raise typer.BadParameter(f"{flags[0]} is for vLLM, and the engine is the embedded one (--engine vllm)")
        config = EngineConfig(
            model=str(directory),
            dtype=dtype,
            policy=known_policy(policy),
            pins=pins,
            decisions=str(decisions) if decisions else None,
            probe=probe,
            kernel_timeout=kernel_timeout,
            max_model_len=max_model_len,
            max_requests=max_num_seqs or 64,
            max_tokens=max_num_batched_tokens or 2048,
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
        max_output_tokens=max_output_tokens,
        request_timeout=request_timeout,
        chat_template=chat_template,
        tool_format=tool_call_parser,
        reasoning=reasoning,
        api_keys=read_api_keys(api_key_file),
        allow_origins=tuple(allow_origin or ()),
        otlp_endpoint=otlp_endpoint,
        drain_timeout=drain_timeout,
        json_start=as_json,
    )
    raise typer.Exit(run(settings))


def _known(what: str, name: str, names: tuple[str, ...]) -> None:
    if name not in names:
        raise typer.BadParameter(f"there is no {what} {name!r}; use {', '.join(names[:-1])} or {names[-1]}")


def _more_than_one(size: int) -> int | None:
    return size if size > 1 else None


def _engine(asked: str) -> str:
    """vLLM is the default where it can be of use: installed, and with a GPU."""
    if asked != "auto":
        return asked
    if importlib.util.find_spec("vllm") is None:
        return "embedded"
    import torch

    return "vllm" if torch.cuda.is_available() else "embedded"
