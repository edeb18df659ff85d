"""mla_serve inside vLLM: its attention backend `CUSTOM`, for decode and for MLA prefill.

    vllm serve MODEL --attention-backend CUSTOM -ac.mla_prefill_backend=CUSTOM

vLLM calls `register` in each of its processes. Names of classes are registered as text, so nothing heavy is imported, and a
model without MLA never notices.
"""

from __future__ import annotations

__all__ = ["register"]

BACKEND = "mla_serve.vllm_plugin.decode.Backend"
PREFILL = "mla_serve.vllm_plugin.prefill.Prefill"


def register() -> None:
    """Registers both classes as CUSTOM, and in the place of vLLM's own where MLA_SERVE_DEFAULT asks for it.

    May be called any number of times. Raises UserError, one sentence with the remedy, for a vLLM that this package does not
    know, and for MLA_SERVE_* settings that are wrong: a server that would ignore them is not started.
    """
    from mla_serve.vllm_plugin.compat import require_vllm, take_place
    from mla_serve.vllm_plugin.config import PluginSettings
    from mla_serve.vllm_plugin.shared import share

    require_vllm()
    settings = PluginSettings.read()
    share()
    take_place(BACKEND, PREFILL, default=settings.default)
