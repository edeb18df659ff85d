"""Is the CPU's RoPE kernel wrong in this vLLM, and who is told?"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

from tests.vllm.inside import engine, plug_in, report

plug_in()


def main(directory: str) -> None:
    from mla_serve.vllm_plugin import rope
    from tests.vllm.checkpoints import write

    def told(model: Any, *ops: str) -> bool:
        from transformers import AutoConfig

        text = AutoConfig.from_pretrained(model)
        return rope.warn_if_faulty(
            SimpleNamespace(
                compilation_config=SimpleNamespace(custom_ops=list(ops)), model_config=SimpleNamespace(hf_text_config=text)
            )
        )

    plain, yarn = write("v2", f"{directory}/plain"), write("v3-yarn-40", f"{directory}/yarn")
    engine(plain, compilation_config={})
    report(
        faulty=rope.kernel_is_faulty(),
        told={"plain": told(plain), "flag": told(plain, "-rotary_embedding"), "yarn": told(yarn)},
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
