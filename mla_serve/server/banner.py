"""What a start prints: the model, the address, the kernels and why, and a line to try."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mla_serve import __version__
from mla_serve.engine.embedded.messages import EngineConfig
from mla_serve.engine.vllm import VllmConfig
from mla_serve.selection.decision import Decision
from mla_serve.selection.report import in_short
from mla_serve.server.state import ServerState
from mla_serve.shapes import Phase

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def kernel_lines(decisions: Sequence[Mapping[str, Any]], unmeasured: str = "") -> list[str]:
    """One line a phase: the kernel of the largest of its shapes in force. `unmeasured` follows one that was not measured."""
    largest: dict[Phase, Decision] = {}
    for data in decisions:
        decision = Decision.from_json(data)
        phase = decision.bucket.shape.phase
        if phase not in largest or _size(decision) > _size(largest[phase]):
            largest[phase] = decision
    return [
        f"{phase.value:<8} {in_short(largest[phase])}{unmeasured if largest[phase].policy == 'availability' else ''}"
        for phase in Phase
        if phase in largest
    ]


def _size(decision: Decision) -> int:
    shape = decision.bucket.shape
    return shape.batch * shape.q_len * shape.kv_len


def _unmeasured(engine: EngineConfig | VllmConfig) -> str:
    """What becomes of shapes that nobody has measured yet."""
    if engine.policy != "measured":
        return ""
    return "; not measured yet, probing while idle" if engine.probe == "idle" else "; not measured yet (mla-serve probe)"


def start_record(state: ServerState, url: str, decisions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The same for a program: one flat object."""
    info = state.engine.info
    return {
        "version": __version__,
        "url": url,
        "model": state.model_name,
        "directory": str(state.settings.model_dir),
        "device": info.device,
        "dtype": info.dtype,
        "max_model_len": info.max_model_len,
        "attention": kernel_lines(decisions),
    }


def banner(state: ServerState, url: str, decisions: Sequence[Mapping[str, Any]]) -> str:
    """The lines that a start prints; the last is a command that works as it stands."""
    info, settings = state.engine.info, state.settings
    kernels = kernel_lines(decisions, _unmeasured(settings.engine)) or ["kernels are chosen when a shape is first met"]
    key = " -H 'Authorization: Bearer KEY'" if settings.api_keys else ""
    route, body = "completions", '{"prompt": "Hello", "max_tokens": 16}'
    if state.tokenizer.chat_template:
        route, body = "chat/completions", '{"messages": [{"role": "user", "content": "What is MLA?"}]}'
    rows = [
        f"mla_serve {__version__}",
        f"  model      {state.model_name} ({settings.model_dir})",
        f"  engine     {state.engine.__class__.__name__} on {info.device}, {info.dtype}, up to {info.max_model_len} tokens",
        f"  sampling   {state.defaults}",
        *(f"  {'attention' if i == 0 else '':<10} {line}" for i, line in enumerate(kernels)),
        f"  details    {url}/attention/decisions",
    ]
    if settings.host not in LOOPBACK and not settings.api_keys:
        rows.append(f"  warning    anyone who reaches {settings.host} can use this server; set API keys")
    return "\n".join(
        [*rows, f"  address    {url}", "", f"curl {url}/v1/{route} -H 'Content-Type: application/json'{key} -d '{body}'", ""]
    )
