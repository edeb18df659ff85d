"""What a start prints: the model, the address, the kernels and why, and a line to try."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mla_serve import __version__
from mla_serve.selection.decision import Decision
from mla_serve.selection.report import decision_sentence
from mla_serve.server.state import ServerState
from mla_serve.shapes import Phase

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def kernel_lines(decisions: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line a phase and kernel: why it was chosen for the largest of its shapes, and for how many more."""
    groups: dict[tuple[Phase, str], list[Decision]] = {}
    for data in decisions:
        decision = Decision.from_json(data)
        groups.setdefault((decision.bucket.shape.phase, decision.label), []).append(decision)
    phases = list(Phase)
    lines = []
    for (phase, _), group in sorted(groups.items(), key=lambda item: (phases.index(item[0][0]), -len(item[1]))):
        largest = max(group, key=lambda d: d.bucket.shape.batch * d.bucket.shape.q_len * d.bucket.shape.kv_len)
        more = f" And {len(group) - 1} more of {phase.value}." if len(group) > 1 else ""
        lines.append(decision_sentence(largest) + more)
    return lines


def banner(state: ServerState, url: str, decisions: Sequence[Mapping[str, Any]]) -> str:
    """The lines that a start prints; the last is a command that works as it stands."""
    info, settings = state.engine.info, state.settings
    kernels = kernel_lines(decisions) or ["kernels are chosen when a shape is first met"]
    key = " -H 'Authorization: Bearer KEY'" if settings.api_keys else ""
    route, body = "completions", '{"prompt": "Hello", "max_tokens": 16}'
    if state.tokenizer.has_chat_template:
        route, body = "chat/completions", '{"messages": [{"role": "user", "content": "What is MLA?"}]}'
    rows = [
        f"mla_serve {__version__}",
        f"  model      {state.model_name} ({settings.model_dir})",
        f"  engine     {state.engine.__class__.__name__} on {info.device}, {info.dtype}, up to {info.max_model_len} tokens",
        f"  sampling   {state.defaults}",
        *(f"  {'attention' if i == 0 else '':<10} {line}" for i, line in enumerate(kernels)),
        f"  all shapes {url}/attention/decisions",
    ]
    if settings.host not in LOOPBACK and not settings.api_keys:
        rows.append(f"  warning    anyone who reaches {settings.host} can use this server; set API keys")
    return "\n".join(
        [*rows, f"  address    {url}", "", f"curl {url}/v1/{route} -H 'Content-Type: application/json'{key} -d '{body}'", ""]
    )
