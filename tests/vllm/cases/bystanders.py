"""Who the plugin leaves alone: other enum members, an MLA model that nobody sent to it, a Llama; and registering twice."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.vllm.inside import bases, counts, engine, expected, greedy, plug_in, report

plug_in(MLA_SERVE_DEFAULT="0")


def members() -> dict[str, str]:
    """Every attention and prefill backend of vLLM, and the path behind it."""
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    found = {}
    for kind, enum in (("attention", AttentionBackendEnum), ("prefill", MLAPrefillBackendEnum)):
        for name, member in enum.__members__.items():
            try:
                found[f"{kind} {name}"] = member.get_path()
            except ValueError:  # CUSTOM, before anybody registers
                found[f"{kind} {name}"] = ""
    return found


def loaded() -> list[str]:
    """Modules of the plugin, and of the selection, that this process has imported."""
    rooms = ("mla_serve.vllm_plugin.", "mla_serve.selection", "mla_serve.backends.")
    return sorted(name for name in sys.modules if name.startswith(rooms))


def main(directory: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.parity.reference import prompt
    from tests.vllm.checkpoints import write

    states = {"before": members()}
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    states["loaded"], light = members(), loaded()
    from mla_serve.vllm_plugin import register

    register()
    register()
    states["again"] = members()

    llama = Path(directory) / "llama"
    size = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    net = LlamaForCausalLM(
        LlamaConfig(**size, num_key_value_heads=2, max_position_embeddings=1024, bos_token_id=0, eos_token_id=1)
    )
    net.save_pretrained(llama)
    prompts = [prompt(9), prompt(80)]
    llm = engine(llama)
    llama_run = {"ours": greedy(llm, prompts), "theirs": expected(llama, prompts), "bases": bases(llm)}
    del llm

    mla = write("v3-yarn-40", f"{directory}/mla")
    llm = engine(mla)
    mla_run = {"ours": greedy(llm, prompts), "theirs": expected(mla, prompts), "bases": bases(llm)}
    unused = "mla_serve.vllm_plugin.decode" not in sys.modules
    del llm

    os.environ["MLA_SERVE_DEFAULT"] = "1"
    register()
    states["default"] = members()
    report(states=states, light=light, llama=llama_run, mla=mla_run, unused=unused, counts=counts())


if __name__ == "__main__":
    main(*sys.argv[1:])
