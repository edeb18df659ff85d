"""POST /v1/completions: text or token ids in, text out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from mla_serve.server.answers import STREAMED, Completion
from mla_serve.server.body import JsonRoute
from mla_serve.server.generation import Delta, plan
from mla_serve.server.logprobs import completion_logprobs, echoed_logprobs, prompt_logprobs
from mla_serve.server.protocol import CompletionBody
from mla_serve.server.respond import ChoiceShape, respond
from mla_serve.server.state import ServerState, State

router = APIRouter(tags=["generation"], route_class=JsonRoute)


class CompletionShape(ChoiceShape):
    """Choices with `text`; with `echo` the prompt's text, and its logprobs, stand in front of it."""

    def __init__(
        self, state: ServerState, body: CompletionBody, prompts: Sequence[Sequence[int]], echoes: Sequence[str]
    ) -> None:
        self._n = body.n or 1
        super().__init__(
            state, body, prefix="cmpl", whole="text_completion", chunk="text_completion", choices=len(prompts) * self._n
        )
        self._tokenizer, self._prompts, self._echoes = state.tokenizer, prompts, echoes
        self._logprobs, self._prompt_logprobs = body.logprobs, body.prompt_logprobs
        self._echoed: dict[int, int] = {}  # choice -> length of the prompt's text that went before

    def choice_part(self, delta: Delta) -> dict[str, Any]:
        return self._choice([delta])

    def choice(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        told = {}
        if self._prompt_logprobs is not None:
            told = {"prompt_logprobs": prompt_logprobs(self._prompt(deltas), deltas[0].prompt_logprobs or (), self._tokenizer)}
        return {**self._choice(deltas), **told}

    def _prompt(self, deltas: Sequence[Delta]) -> Sequence[int]:
        return self._prompts[deltas[-1].choice // self._n]

    def _choice(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        last = deltas[-1]
        text = "".join(delta.text for delta in deltas)
        before = None
        if self._echoes and last.choice not in self._echoed:
            text = self._echoes[last.choice // self._n] + text
            if self._logprobs is not None:
                before, length = echoed_logprobs(self._prompt(deltas), deltas[0].prompt_logprobs or (), self._tokenizer)
                self._echoed[last.choice] = length
            else:
                self._echoed[last.choice] = 0
        logprobs = None
        if self._logprobs is not None:
            tokens = [token for delta in deltas for token in delta.tokens]
            logprobs = completion_logprobs(tokens, self._tokenizer, self._echoed.get(last.choice, 0))
            if before is not None:
                logprobs = {name: before[name] + values for name, values in logprobs.items()}
        return {
            "index": last.choice,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": last.finish_reason,
            "stop_reason": last.stop_reason,
        }


@router.post("/v1/completions", response_model=Completion, responses=STREAMED)
async def create_completion(body: CompletionBody, request: Request, state: State) -> Response:
    """Continues one prompt or several; each sample of each prompt is a choice with its own index."""
    state.check_model(body.model)
    body.check()
    state.check_open()
    state.check_size(len(body.prompts) * (body.n or 1))
    special = body.add_special_tokens is not False
    limit = state.engine.info.max_model_len
    prompts = [
        await state.tokenizer.encode_async(prompt, add_special_tokens=special, limit=limit)
        if isinstance(prompt, str)
        else prompt
        for prompt in body.prompts
    ]
    generation = plan(state, body, prompts)  # before the echo: it refuses ids that stand for no token
    echoes = []
    if body.echo:
        asked = zip(body.prompts, prompts, strict=True)
        echoes = [prompt if isinstance(prompt, str) else state.tokenizer.decode(ids) for prompt, ids in asked]
    return await respond(request, state, body, generation, CompletionShape(state, body, prompts, echoes))
