"""The attention backend inside vLLM: `--attention-backend CUSTOM -ac.mla_prefill_backend=CUSTOM`.

vLLM calls `register` in each of its processes, through the entry point `vllm.general_plugins`.
"""

from __future__ import annotations

__all__ = ["register"]

ATTENTION = "mla_serve.vllm_plugin.decode.AttentionBackend"
PREFILL = "mla_serve.vllm_plugin.prefill.PrefillBackend"


def register() -> None:
    """Registers the classes by name; imports none of them, so that a model without MLA never pays for them.

    May be called any number of times. With MLA_SERVE_DEFAULT=1 it also takes the place of vLLM's own choice. Raises UserError
    for a vLLM that it does not know.
    """
    from mla_serve.vllm_plugin.compat import register_classes
    from mla_serve.vllm_plugin.config import takes_default

    register_classes(ATTENTION, PREFILL, default=takes_default())
