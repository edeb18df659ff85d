"""What a start prints: the model, the address, the kernels and why, and a line to try."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mla_serve import __version__
from mla_serve.server.state import ServerState


def _name(decision: Mapping[str, Any]) -> str:
    """The kernel of a decision, and how it pads."""
    padding = decision.get("padding")
    winner = str(decision.get("winner"))
    if not padding:
        return winner
    bucket = decision["bucket"]
    widths = [(what, bucket[what], padding.get(what, bucket[what])) for what in ("qk", "v", "heads")]
    changed = [f"{what} {old} to {new}" for what, old, new in widths if old != new]
    return f"{winner}, {' and '.join(changed)}" if changed else f"{winner} padded"


def _why(decision: Mapping[str, Any]) -> str:
    """How far the winner is ahead of the next, or why there was no race."""
    timed = sorted(
        (c["ms"], c["backend"] + (" padded" if c.get("padding") else ""), c.get("verdict") == "chosen")
        for c in decision.get("candidates", ())
        if c.get("ms")
    )
    chosen = next((ms for ms, _, is_chosen in timed if is_chosen), None)
    others = [(ms, name) for ms, name, is_chosen in timed if not is_chosen]
    if chosen is not None and others:
        return f"{chosen:.3g} ms, {others[0][1]} takes {others[0][0]:.3g} ms"
    if chosen is not None:
        return f"{chosen:.3g} ms, the only one that runs this shape and is right"
    return f"by the policy {decision['policy']}" if decision.get("policy") else "not measured"


def kernel_lines(decisions: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line a phase and kernel: in how many buckets it was chosen, and why in the largest of them."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for decision in decisions:
        groups.setdefault((str(decision["bucket"]["phase"]), _name(decision)), []).append(decision)
    order = {"prefill": 0, "context": 1, "decode": 2}
    lines = []
    for (phase, name), group in sorted(groups.items(), key=lambda item: (order.get(item[0][0], 3), -len(item[1]))):
        largest = max(group, key=lambda d: d["bucket"]["batch"] * d["bucket"]["q_len"] * d["bucket"]["kv_len"])
        b = largest["bucket"]
        shapes = "1 shape" if len(group) == 1 else f"{len(group)} shapes"
        lines.append(f"{phase:<8} {name}: {shapes}, at {b['batch']} x {b['q_len']} on {b['kv_len']}: {_why(largest)}")
    return lines


def banner(state: ServerState, url: str, decisions: Sequence[Mapping[str, Any]]) -> str:
    """The lines that a start prints; the last ones are a command that works as it stands."""
    info, settings = state.engine.info, state.settings
    kernels = kernel_lines(decisions) or ["chosen when a shape is first met; see /attention/decisions"]
    key = " -H 'Authorization: Bearer KEY'" if settings.api_keys else ""
    route, body = "completions", '{"prompt": "Hello", "max_tokens": 16}'
    if state.tokenizer.has_chat_template:
        route, body = "chat/completions", '{"messages": [{"role": "user", "content": "What is MLA?"}]}'
    rows = [
        f"mla_serve {__version__}",
        f"  model     {state.model_name} ({settings.model_dir})",
        f"  engine    {state.engine.__class__.__name__} on {info.device}, {info.dtype}, up to {info.max_model_len} tokens",
        f"  sampling  {state.defaults}",
        *(f"  {'attention' if i == 0 else '':<9} {line}" for i, line in enumerate(kernels)),
        f"  address   {url}",
        "",
        f"curl {url}/v1/{route} -H 'Content-Type: application/json'{key} -d '{body}'",
    ]
    if settings.host not in ("127.0.0.1", "::1", "localhost") and not settings.api_keys:
        rows.insert(-2, f"  warning   anyone who reaches {settings.host} can use this server; set API keys")
    return "\n".join(rows) + "\n"
