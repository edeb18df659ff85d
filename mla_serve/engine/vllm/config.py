"""Settings of a vLLM engine, and the command line that vLLM is given for them."""

from __future__ import annotations

import json

import msgspec

__all__ = ["VllmConfig", "vllm_arguments"]


class VllmConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a vLLM engine: `model` is a Hugging Face directory, `arguments` are vLLM's own flags, last word included.

    `policy`, `pins`, `decisions` and `probe` reach the plugin as its MLA_SERVE_* variables. vLLM is never at rest for long, so
    "on-demand" measures at start what no table holds, and "idle" nothing.
    """

    model: str
    arguments: tuple[str, ...] = ()
    policy: str = "measured"
    pins: str = ""
    decisions: str | None = None
    probe: str = "idle"

    @property
    def variables(self) -> dict[str, str]:
        """What the plugin reads in each of vLLM's processes."""
        asked = {
            "MLA_SERVE_DEFAULT": "1",
            "MLA_SERVE_POLICY": self.policy,
            "MLA_SERVE_PINS": self.pins,
            "MLA_SERVE_DECISIONS": self.decisions,
            "MLA_SERVE_PROBE": "missing" if self.probe == "on-demand" else None,
        }
        return {name: value for name, value in asked.items() if value}


def vllm_arguments(config: VllmConfig, *, cpu: bool) -> list[str]:
    """vLLM's command line: ours first, so that the operator's own flags win.

    On a CPU vLLM's RoPE operator is wrong for MLA (its kernel takes [tokens, heads * rope] only), so it is switched off there.
    """
    ours = ["--model", config.model, "--seed", "0", "--scheduling-policy", "priority"]
    if not cpu:
        ours += ["--attention-backend", "CUSTOM", "--attention-config.mla_prefill_backend", "CUSTOM"]
    elif not any(flag.startswith(("--compilation-config", "-O", "-cc")) for flag in config.arguments):
        ours += ["--compilation-config", json.dumps({"custom_ops": ["-rotary_embedding"]})]
    return [*ours, *config.arguments]
