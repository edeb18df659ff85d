"""/tokenize and /detokenize: what the model's tokenizer makes of a text or a chat, and back."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter

from mla_serve.server.answers import Detokenized, Tokenized
from mla_serve.server.body import JsonRoute
from mla_serve.server.errors import bad_request
from mla_serve.server.protocol import AnyTokenizeBody, ChatBody, DetokenizeBody, TokenizeBody
from mla_serve.server.routes.chat import render_async
from mla_serve.server.state import State

router = APIRouter(tags=["tokens"], route_class=JsonRoute)


@router.post("/tokenize")
async def tokenize(body: AnyTokenizeBody, state: State) -> Tokenized:
    """Token ids of a text, or of a chat as the model would be given it."""
    state.check_model(body.model)
    if isinstance(body, TokenizeBody):
        special = body.add_special_tokens is not False
        ids = await state.tokenizer.encode_async(body.prompt, add_special_tokens=special)
    else:
        fields = ChatBody.model_fields.keys() & body.model_fields_set
        chat = ChatBody.model_validate({name: getattr(body, name) for name in fields})
        chat.check()
        _, ids = await render_async(state, chat, limited=False)
    return {
        "count": len(ids),
        "max_model_len": state.engine.info.max_model_len,
        "tokens": ids,
        "token_strs": [state.tokenizer.token_text(token_id) for token_id in ids] if body.return_token_strs else None,
    }


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, state: State) -> Detokenized:
    """The text of token ids, special tokens included."""
    state.check_model(body.model)
    vocab = state.engine.info.vocab_size
    if any(not 0 <= token_id < vocab for token_id in body.tokens):
        raise bad_request(f"tokens must hold ids from 0 to {vocab - 1}.", "tokens")
    # In a thread: a body may hold millions of ids.
    return {"prompt": await asyncio.to_thread(state.tokenizer.decode, body.tokens, skip_special_tokens=False)}
