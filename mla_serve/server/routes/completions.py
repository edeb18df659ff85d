"""POST /v1/completions: text or token ids in, text out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from mla_serve.server.body import JsonRoute
from mla_serve.server.generation import Delta, plan
from mla_serve.server.logprobs import completion_logprobs
from mla_serve.server.protocol import CompletionBody
from mla_serve.server.respond import respond
from mla_serve.server.responses import Completion
from mla_serve.server.state import ServerState, State

router = APIRouter(tags=["generation"], route_class=JsonRoute)


class CompletionShape:
    """Choices with `text`; with `echo` the prompt's text stands in front of it."""

    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def __init__(self, state: ServerState, body: CompletionBody, echoes: Sequence[str]) -> None:
        self._tokenizer, self._echoes = state.tokenizer, echoes
        self._n = body.n or 1
        self._logprobs = body.logprobs is not None
        self._echoed: set[int] = set()

    def opening(self, choice: int) -> None:
        """None: text needs no opening."""

    def part(self, delta: Delta) -> dict[str, Any]:
        return self.choice([delta])

    def choice(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        index, last = deltas[-1].choice, deltas[-1]
        text = "".join(delta.text for delta in deltas)
        if self._echoes and index not in self._echoed:
            self._echoed.add(index)
            text = self._echoes[index // self._n] + text
        tokens = [token for delta in deltas for token in delta.tokens]
        return {
            "index": index,
            "text": text,
            "logprobs": completion_logprobs(tokens, self._tokenizer) if self._logprobs else None,
            "finish_reason": last.finish_reason,
            "stop_reason": last.stop_reason,
        }


@router.post("/v1/completions", response_model=Completion)
async def create_completion(body: CompletionBody, request: Request, state: State) -> Response:
    """Continues one prompt or several; each sample of each prompt is a choice with its own index."""
    state.check_model(body.model)
    body.check()
    state.check_open()
    special = body.add_special_tokens is not False
    limit = state.engine.info.max_model_len
    prompts, echoes = [], []
    for prompt in body.prompts:
        ids = (
            await state.tokenizer.encode_async(prompt, add_special_tokens=special, limit=limit)
            if isinstance(prompt, str)
            else prompt
        )
        prompts.append(ids)
        if body.echo:
            echoes.append(prompt if isinstance(prompt, str) else state.tokenizer.decode(ids))
    return await respond(request, state, body, plan(state, body, prompts), CompletionShape(state, body, echoes))
