"""POST /v1/responses: OpenAI's newer route, stateless. The request is read as a chat; only the answer's form is its own."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from mla_serve.server.answers import STREAMED, ResponseObject
from mla_serve.server.body import JsonRoute
from mla_serve.server.generation import Delta, Tally, Token, plan
from mla_serve.server.items import Items, Json
from mla_serve.server.logprobs import chat_logprobs
from mla_serve.server.parsers import Event, Reasoning
from mla_serve.server.protocol import ResponsesBody
from mla_serve.server.respond import respond
from mla_serve.server.routes.chat import render_async
from mla_serve.server.state import ServerState, State
from mla_serve.server.streaming import event
from mla_serve.server.voice import Voice

TOOL_FIELDS = {"type", "name", "description", "parameters", "strict"}

router = APIRouter(tags=["generation"], route_class=JsonRoute)


class ResponseShape:
    """One response object, or the events that build it up."""

    def __init__(self, state: ServerState, body: ResponsesBody, voice: Voice, temperature: float, top_p: float) -> None:
        self._tokenizer, self._voice, self._logprobs = state.tokenizer, voice, body.wants_logprobs
        self._items = Items()
        self._tokens: list[Token] = []  # of text that the parser holds back
        self._reasoning_tokens = 0
        self._number = 0
        self._finish: str | None = None
        self._head = {
            "id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": int(time.time()), "model": state.model_name,
            "error": None, "instructions": body.instructions, "metadata": body.metadata or {},
            "max_output_tokens": body.max_output_tokens, "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None, "background": False, "store": False, "truncation": "disabled", "user": body.user,
            "temperature": temperature, "top_p": top_p, "top_logprobs": body.top_logprobs or 0,
            "tools": [tool.model_dump(include=TOOL_FIELDS) for tool in body.tools or ()],
            "tool_choice": _choice(body), "text": _text(body),
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
        }  # fmt: skip

    def whole(self, choices: Sequence[Sequence[Delta]], tally: Tally) -> Json:
        for delta in choices[0]:
            for _ in self._take(delta):
                pass
        for _ in self._items.end(whole=self._finish != "length"):
            pass
        return self._response(tally)

    def opening(self) -> Iterator[bytes]:
        for name in ("response.created", "response.in_progress"):
            yield self._event(name, {"response": self._response(None)})

    def part(self, delta: Delta, tally: Tally) -> Iterator[bytes]:
        for name, fields in self._take(delta):
            yield self._event(name, fields)

    def ending(self, tally: Tally) -> Iterator[bytes]:
        for name, fields in self._items.end(whole=self._finish != "length"):
            yield self._event(name, fields)
        name = "response.incomplete" if self._finish == "length" else "response.completed"
        yield self._event(name, {"response": self._response(tally)})

    def _take(self, delta: Delta) -> Iterator[tuple[str, Json]]:
        self._finish = delta.finish_reason
        events = self._voice.push(delta.text, last=delta.finish_reason is not None)
        self._tokens += delta.tokens
        if not events:
            return iter(())
        tokens, self._tokens = self._tokens, []
        self._count(events, len(tokens))
        logprobs = chat_logprobs(tokens, self._tokenizer)["content"] if self._logprobs else ()
        return self._items.take(events, logprobs)

    def _count(self, events: Sequence[Event], tokens: int) -> None:
        """Tokens that came with reasoning alone count as reasoning."""
        if all(isinstance(one, Reasoning) for one in events):
            self._reasoning_tokens += tokens

    def _event(self, name: str, fields: Json) -> bytes:
        data = event({"type": name, **fields, "sequence_number": self._number}, name=name)
        self._number += 1
        return data

    def _response(self, tally: Tally | None) -> Json:
        """The object as it stands; `tally` None: nothing has been generated yet."""
        if tally is None:
            return {**self._head, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        cut = self._finish == "length"
        return {
            **self._head,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._items.done,
            "usage": {
                "input_tokens": tally.prompt_tokens,
                "input_tokens_details": {"cached_tokens": tally.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": tally.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
                "total_tokens": tally.prompt_tokens + tally.completion_tokens,
            },
        }


def _choice(body: ResponsesBody) -> Any:
    if body.tool_choice is None or isinstance(body.tool_choice, str):
        return body.tool_choice or "auto"
    return {"type": "function", "name": body.tool_choice.name}


def _text(body: ResponsesBody) -> Json:
    form = body.text and body.text.format
    if not form:
        return {"format": {"type": "text"}}
    names = {"type", "name", "description", "schema_", "strict"}
    return {"format": form.model_dump(include=names, exclude_none=True, by_alias=True)}


@router.post("/v1/responses", response_model=ResponseObject, responses=STREAMED)
async def create_response(body: ResponsesBody, request: Request, state: State) -> Response:
    """Answers a conversation in OpenAI's newer form. Nothing is stored."""
    state.check_model(body.model)
    body.check()
    chat = body.chat()
    chat.check()
    state.formats.check(chat)
    state.check_open()
    text, prompt = await render_async(state, chat)
    generation = plan(state, chat, [prompt], kept=state.formats.kept(chat))
    sampling = generation.choices[0].request.sampling
    shape = ResponseShape(state, body, state.formats.voices(chat, text)(), sampling.temperature, sampling.top_p)
    return await respond(request, state, body, generation, shape)
