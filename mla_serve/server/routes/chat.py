"""POST /v1/chat/completions: messages in, through the model's chat template, a message out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from mla_serve.server.answers import STREAMED, ChatCompletion
from mla_serve.server.body import JsonRoute
from mla_serve.server.errors import bad_request
from mla_serve.server.generation import Delta, Token, plan
from mla_serve.server.logprobs import chat_logprobs, prompt_logprobs
from mla_serve.server.protocol import ChatBody, Message
from mla_serve.server.respond import ChoiceShape, respond
from mla_serve.server.state import ServerState, State
from mla_serve.server.text import IN_LOOP
from mla_serve.server.voice import Voice, as_delta, as_message

router = APIRouter(tags=["generation"], route_class=JsonRoute)

# Arguments of transformers' apply_chat_template, which a client must not reach through chat_template_kwargs.
RESERVED = frozenset({
    "self", "conversation", "conversations", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "sanitize_control_tokens", "tokenize", "tokenizer_kwargs", "padding", "truncation",
    "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
})  # fmt: skip


class ChatShape(ChoiceShape):
    """Choices with a `message`, or with a `delta` that names the role first."""

    def __init__(self, state: ServerState, body: ChatBody, prompt: Sequence[int], voices: Callable[[], Voice]) -> None:
        choices = body.n or 1
        super().__init__(
            state, body, prefix="chatcmpl", whole="chat.completion", chunk="chat.completion.chunk", choices=choices
        )
        self._tokenizer, self._prompt = state.tokenizer, prompt
        self._logprobs, self._prompt_logprobs = bool(body.logprobs), body.prompt_logprobs
        self._voices = [voices() for _ in range(choices)]
        self._tokens: list[list[Token]] = [[] for _ in range(choices)]  # of text that a parser holds back

    def choice_opening(self, index: int) -> dict[str, Any]:
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def choice_part(self, delta: Delta) -> dict[str, Any] | None:
        last = delta.finish_reason is not None
        events = self._voices[delta.choice].push(delta.text, last=last)
        self._tokens[delta.choice] += delta.tokens
        if not events and not last:
            return None
        tokens, self._tokens[delta.choice] = self._tokens[delta.choice], []
        return {"index": delta.choice, "delta": as_delta(events), **self._end(delta, tokens)}

    def choice(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        last = deltas[-1]
        events = self._voices[last.choice].push("".join(delta.text for delta in deltas), last=True)
        tokens = [token for delta in deltas for token in delta.tokens]
        return {"index": last.choice, "message": as_message(events), **self._end(last, tokens)}

    def beside(self, choices: Sequence[Sequence[Delta]]) -> dict[str, Any]:
        if self._prompt_logprobs is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(self._prompt, choices[0][0].prompt_logprobs or (), self._tokenizer)}

    def _end(self, last: Delta, tokens: Sequence[Token]) -> dict[str, Any]:
        return {
            "logprobs": chat_logprobs(tokens, self._tokenizer) if self._logprobs else None,
            "finish_reason": self._voices[last.choice].finish_reason(last.finish_reason),
            "stop_reason": last.stop_reason,
        }


def _for_template(message: Message) -> dict[str, Any]:
    """A message as templates read it: plain text content, reasoning under its one name there, no keys that are not there."""
    data = message.model_dump(exclude_none=True, include=set(Message.model_fields))
    thought = data.pop("reasoning", None)
    return {**({"reasoning_content": thought} if thought is not None else {}), **data, "content": message.text}


def render(state: ServerState, body: ChatBody, *, limited: bool = True) -> tuple[str, list[int]]:
    """The prompt and its token ids; the template writes the special tokens itself.

    `limited`: a prompt that is too long by its bytes alone is refused before it is tokenized.
    """
    extra: dict[str, Any] = dict(body.chat_template_kwargs or {})
    if taken := RESERVED & extra.keys():
        name = min(taken)
        raise bad_request(f"chat_template_kwargs may not hold {name}.", "chat_template_kwargs")
    if body.offered:
        extra["tools"] = [tool.model_dump(exclude_none=True) for tool in body.offered]
    continued = bool(body.continue_final_message)
    prompt = state.tokenizer.render(
        [_for_template(message) for message in body.messages],
        add_generation_prompt=body.add_generation_prompt is not False and not continued,
        continue_final_message=continued,
        **extra,
    )
    limit = state.engine.info.max_model_len if limited else None
    return prompt, state.tokenizer.encode(prompt, add_special_tokens=bool(body.add_special_tokens), limit=limit)


async def render_async(state: ServerState, body: ChatBody, *, limited: bool = True) -> tuple[str, list[int]]:
    """As `render`; a long chat does not hold up the event loop."""
    short = not body.offered and sum(len(message.text or "") for message in body.messages) <= IN_LOOP
    return render(state, body, limited=limited) if short else await asyncio.to_thread(render, state, body, limited=limited)


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=STREAMED)
async def create_chat_completion(body: ChatBody, request: Request, state: State) -> Response:
    """Answers a conversation."""
    state.check_model(body.model)
    body.check()
    state.formats.check(body)
    state.check_open()
    text, prompt = await render_async(state, body)
    generation = plan(state, body, [prompt], kept=state.formats.kept(body))
    shape = ChatShape(state, body, prompt, state.formats.voices(body, text))
    return await respond(request, state, body, generation, shape)
