"""The bundled demo model inside vLLM, asked the questions that it was trained for."""

from __future__ import annotations

import sys

from tests.vllm.inside import counts, engine, plug_in, report

plug_in()


def main(every: str, dtype: str) -> None:
    from vllm import SamplingParams

    from mla_serve.demo import MODEL_DIR
    from mla_serve.demo.questions import questions

    asked = questions()[:: int(every)]
    llm = engine(MODEL_DIR, skip_tokenizer_init=False, max_model_len=1024, dtype=dtype)
    outputs = llm.chat(
        [question.messages() for question in asked], SamplingParams(temperature=0.0, max_tokens=200), use_tqdm=False
    )
    given = [output.outputs[0].text for output in outputs]
    report(given=given, wanted=[question.answer for question in asked], counts=counts())


if __name__ == "__main__":
    main(*sys.argv[1:])
