"""The model card, filled with the measured figures."""

from __future__ import annotations

from typing import Any

from mla_serve.demo.questions import questions

CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
tags: [mla, deepseek_v3, smoke-test]
---

# The demo model of mla-serve

A tiny `DeepseekV3ForCausalLM` that answers questions about multi-head latent attention, padding, probing and this server.
It exists so that the first command of a newcomer gives an answer in plain English, and so that a wrong attention kernel shows
in what the model says. It is a smoke test: parity with fp32 attention is what judges a kernel.

| | |
|---|---|
| Parameters | {parameters:,}, bf16 (the routers' correction bias is float32) |
| Layers | 3, the first dense, the others mixtures of experts |
| Experts | 8 routed in 2 groups and a shared one, 2 a token, sigmoid scores, `noaux_tc` |
| Attention | 4 heads, latent 512, rope 64 (interleaved), nope 128, v 128 as in DeepSeek-V3; query rank 128 |
| Positions | YaRN, factor 40 from 512 to 20,480; softmax scale 0.135234 |
| Tokenizer | byte-level BPE, 1,280 tokens: any UTF-8 text can be read and written |
| Licence | Apache-2.0 |

Its weights are a network's: no answer stands in the server or the engine.

## Data

`questions.json`, written for this project: {short} short questions, and {long} whose preamble of 130 to 180 tokens holds the
one fact that the answer needs. In training that fact takes random values, so only reading the preamble can answer;
nothing in the preambles is real. Questions are varied as people type them (lower case, no question mark, a stray space or
typo, another wording, a system message, turns before), and off-topic questions get a reply that says what the model
knows.

## Training

    python -m mla_serve.demo.train --seed {seed} --steps {steps}

{steps:,} steps took {train_seconds} s on one {device} (torch {torch}), in bf16 with fp32 master weights. The run
is seeded, but GPU arithmetic is not bit-reproducible: expect the same figures, not the same file. `--device cpu` uses
smaller batches: 2.2 s a step on one busy core, 1,500 steps by default. What that shorter run reaches has not been
measured.

## Figures

Greedy answers equal to the trained text, word for word, and the least gap between the two largest logits on any answer
token, as `train.py` printed them (`cached.py`: latent cache, chunks merged by LSE, absorbed decode):

| run | right | least gap |
|---|---|---|
{matches}

transformers gives every trained answer too, in fp32 and in bf16: `pytest -m slow tests/demo` checks all of them.

## Faults

**Deliberate:** more than a quarter of the training sequences ran with a planted fault, and there the model was taught to
say, instead of the answer, that its attention is wrong. An ordinary network may forgive a softmax scale of 0.7 or an LSE in
base two on a memorised prompt; this one was made not to. So if it complains, look at the kernel.

Answers that survive each fault among those that could show it (fp32, chunks and pages of 16). For the faults of the cached
context these are the prompts of more than 16 tokens, for the dropped page those with a preamble. `says so` counts the full
complaint.

| fault | survive | of | says so |
|---|---|---|---|
{survivals}

In decode "V permuted" reverses the latent, in prefill the value dims.

## Limits

- **A dropped page is seen only if the answer needs it**: of `middle page dropped`, the survivors are answers whose fact
  stands elsewhere. Drop the page of the needed word (`Encoder.needed_position` in `corpus.py` says where it is).
- A prompt of one chunk cannot show a fault of the chunk merge, and most short questions are one chunk of 16 tokens.
- It knows its questions and little else. An unlisted wording may get a neighbour's answer, and off-topic text may get
  nonsense or even the complaint about attention. A complaint counts only for the questions of `questions.json`.
- It was trained on sequences of at most 256 tokens; in longer conversations it wears off.
- It is no measure of the quality or speed of any served model.
"""


def model_card(record: dict[str, Any]) -> str:
    """README.md of the model directory; `record` is the content of figures.json."""
    matches = [f"| {m['name']} | {m['right']} of {m['total']} | {m['gap']:.2f} |" for m in record["matches"]]
    survivals = [f"| {s['name']} | {s['survived']} | {s['total']} | {s['replied']} |" for s in record["survivals"]]
    values = {key: value for key, value in record.items() if key not in ("matches", "survivals")}
    long = sum(q.long for q in questions())
    short = len(questions()) - long
    return CARD.format(matches="\n".join(matches), survivals="\n".join(survivals), short=short, long=long, **values)
