"""What a request is refused for, and what it is told."""

import math

import pytest

from mla_serve.engine.base import EngineInfo, Request, Sampling
from mla_serve.engine.embedded.limits import MAX_LOGPROBS, check_request

INFO = EngineInfo(vocab_size=512, max_model_len=64, eos_token_ids=[1], dtype="float32", device="cpu")


def request(prompt, **sampling):
    return Request("r", prompt, Sampling(**{"max_tokens": 4} | sampling))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (request([]), "empty"),
        (request([5, 512]), "token id 512 is not in the vocabulary of 512"),
        (request([-1]), "token id -1"),
        (request([1] * 64), "limit is 64 tokens for prompt and answer together, and the prompt has 64 and max_tokens is 4"),
        (request([1] * 8, max_tokens=57), "limit is 64 .* has 8 and max_tokens is 57"),
        (request([1], max_tokens=0), "max_tokens must be at least 1, got 0"),
        (request([1], temperature=-0.1), "temperature"),
        (request([1], temperature=math.nan), "temperature"),
        (request([1], top_p=0.0), "top_p"),
        (request([1], top_p=1.1), "top_p"),
        (request([1], top_k=-1), "top_k"),
        (request([1], seed=2**64), "seed must fit 64 bits, got 18446744073709551616"),
        (request([1], seed=-(2**63) - 1), "seed"),
        (request([1], stop_token_ids=(3, 512)), "stop token id 512"),
        (request([1], logprobs=MAX_LOGPROBS + 1), "logprobs must be from 0 to 100, got 101"),
        (request([1], logprobs=-1), "logprobs"),
        (request([1], prompt_logprobs=MAX_LOGPROBS + 1), "prompt_logprobs must be from 0 to 100, got 101"),
        (request([1], min_p=1.1), "min_p must be from 0 to 1, got 1.1"),
        (request([1], min_p=math.nan), "min_p"),
        (request([1], min_tokens=-1), "min_tokens"),
        (request([1], min_tokens=5), r"min_tokens must be from 0 to max_tokens \(4\), got 5"),
        (request([1], presence_penalty=math.nan), "presence_penalty must be from -2 to 2, got nan"),
        (request([1], frequency_penalty=-2.1), "frequency_penalty must be from -2 to 2, got -2.1"),
        (request([1], repetition_penalty=0.0), "repetition_penalty must be from 0.01 to 100"),
        (request([1], repetition_penalty=math.inf), "repetition_penalty"),
        (request([1], logit_bias=((512, 1.0),)), "token id 512 of logit_bias is not in the vocabulary of 512"),
        (request([1], logit_bias=((-1, 1.0),)), "token id -1 of logit_bias"),
        (request([1], logit_bias=((3, math.nan),)), "logit_bias must be from -100 to 100, got nan for token id 3"),
        (request([1], logit_bias=((3, -math.inf),)), "logit_bias must be from"),
        (
            request([1], logit_bias=tuple((i % 512, 1.0) for i in range(1025))),
            "logit_bias has 1025 entries, and the limit is 1024",
        ),
    ],
)
def test_refused(asked, message):
    with pytest.raises(ValueError, match=message):
        check_request(asked, INFO)


@pytest.mark.parametrize(
    "asked",
    [
        request([0, 511] * 30),
        request([1], max_tokens=63),
        request([1], seed=2**64 - 1, logprobs=100, top_p=1e-9, top_k=10**9, temperature=1e-300),
        request([1], min_tokens=4, min_p=1.0, prompt_logprobs=100, presence_penalty=-2.0, frequency_penalty=2.0),
        request([1], repetition_penalty=0.01, logit_bias=tuple((i % 512, 100.0) for i in range(1024))),
        request([1], seed=-(2**63), logprobs=0, stop_token_ids=(0, 511), temperature=0.0),
    ],
)
def test_taken(asked):
    check_request(asked, INFO)
