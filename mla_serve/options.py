"""Options that several commands share, and what they have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

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


def known_policy(name: str) -> Any:
    """The policy of that name. Raises BadParameter (exit status 2) if there is none."""
    from mla_serve.selection.selector import POLICIES

    if name not in POLICIES:
        raise typer.BadParameter(f"there is no policy {name!r}; use {', '.join(POLICIES)}")
    return name
