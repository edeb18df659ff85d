"""POST /v1/chat/completions: messages in, through the model's chat template, a message out."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from mla_serve.server.body import JsonRoute
from mla_serve.server.errors import bad_request
from mla_serve.server.generation import Delta, plan
from mla_serve.server.logprobs import chat_logprobs
from mla_serve.server.protocol import ChatBody, Message
from mla_serve.server.respond import respond
from mla_serve.server.responses import ChatCompletion
from mla_serve.server.state import ServerState, State
from mla_serve.server.text import IN_LOOP

router = APIRouter(tags=["generation"], route_class=JsonRoute)

# Arguments of transformers' apply_chat_template, which a client must not reach through chat_template_kwargs.
RESERVED = frozenset({
    "self", "conversation", "conversations", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "sanitize_control_tokens", "tokenize", "tokenizer_kwargs", "padding", "truncation",
    "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
})  # fmt: skip


class ChatShape:
    """Choices with a `message`, or with a `delta` that names the role first."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, state: ServerState, body: ChatBody) -> None:
        self._tokenizer = state.tokenizer
        self._logprobs = bool(body.logprobs)

    def opening(self, choice: int) -> dict[str, Any]:
        return {"index": choice, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def part(self, delta: Delta) -> dict[str, Any]:
        return {"index": delta.choice, "delta": {"content": delta.text} if delta.text else {}, **self._end([delta])}

    def choice(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        text = "".join(delta.text for delta in deltas)
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": deltas[-1].choice, "message": message, **self._end(deltas)}

    def _end(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        tokens = [token for delta in deltas for token in delta.tokens]
        return {
            "logprobs": chat_logprobs(tokens, self._tokenizer) if self._logprobs else None,
            "finish_reason": deltas[-1].finish_reason,
            "stop_reason": deltas[-1].stop_reason,
        }


def _for_template(message: Message) -> dict[str, Any]:
    """A message as templates read it: plain text content, and no keys that are not there."""
    data = message.model_dump(exclude_none=True, include=set(Message.model_fields))
    return {**data, "content": message.text}


def _tokens(state: ServerState, body: ChatBody) -> list[int]:
    """The prompt's token ids; the template writes the special tokens itself."""
    extra = body.chat_template_kwargs or {}
    if taken := RESERVED & extra.keys():
        name = min(taken)
        raise bad_request(f"chat_template_kwargs may not hold {name}.", "chat_template_kwargs")
    continued = bool(body.continue_final_message)
    prompt = state.tokenizer.render(
        [_for_template(message) for message in body.messages],
        add_generation_prompt=body.add_generation_prompt is not False and not continued,
        continue_final_message=continued,
        **extra,
    )
    limit = state.engine.info.max_model_len
    return state.tokenizer.encode(prompt, add_special_tokens=bool(body.add_special_tokens), limit=limit)


@router.post("/v1/chat/completions", response_model=ChatCompletion)
async def create_chat_completion(body: ChatBody, request: Request, state: State) -> Response:
    """Answers a conversation."""
    state.check_model(body.model)
    body.check()
    state.check_open()
    short = sum(len(message.text or "") for message in body.messages) <= IN_LOOP
    prompt = _tokens(state, body) if short else await asyncio.to_thread(_tokens, state, body)
    return await respond(request, state, body, plan(state, body, [prompt]), ChatShape(state, body))
