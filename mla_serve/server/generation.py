"""From a request to the engine and back: prompts times n become engine requests, their Steps become text.

Both routes, streamed or not, read the same Deltas, so that their texts cannot differ.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

from mla_serve.engine.base import Engine, Request, Sampling, Step, Structured, TokenLogprobs
from mla_serve.server.errors import ApiError, RequestFailedError, bad_request
from mla_serve.server.protocol import GenerationBody
from mla_serve.server.state import ServerState
from mla_serve.server.stops import StopStrings
from mla_serve.server.text import Detokenizer

GREEDY = 1e-5  # temperatures below are greedy: dividing by them would overflow


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token; `offset` is where its text begins, in characters of the choice's text before stop strings."""

    id: int
    offset: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new in one choice. The last one has `finish_reason`, and in `stop_reason` the stop string or stop id.

    `cached_tokens` counts the prompt tokens that the prefix cache had; `prompt_logprobs` goes with the first Delta.
    """

    choice: int
    text: str
    tokens: list[Token]
    completion_tokens: int
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] | None = None


class Choice:
    """One engine request of a client's request, and the text made of its tokens."""

    def __init__(self, index: int, request: Request, detokenizer: Detokenizer, stops: StopStrings, state: ServerState) -> None:
        self.index, self.request = index, request
        self._detokenizer, self._stops, self._metrics = detokenizer, stops, state.metrics
        self._ends = {*state.engine.info.eos_token_ids, *request.sampling.stop_token_ids}
        self._prompt_logprobs: list[TokenLogprobs] | None = None
        self._cached = 0
        self._tokens: list[Token] = []  # not yet in a Delta
        self._length = 0
        self._count = 0

    async def run(self, engine: Engine) -> AsyncGenerator[Delta, None]:
        """Yields Deltas until one has a finish reason; closing it early aborts the engine request.

        Raises ApiError 400 where the engine refuses the request, RequestFailedError where it gives it up, EngineDeadError.
        """
        try:
            # The protocol promises that closing the iterator aborts the request, so it is a generator.
            steps = cast(AsyncGenerator[Step, None], engine.generate(self.request))
        except ValueError as error:
            raise _refused(error) from error
        watch = self._metrics.watch()
        async with aclosing(steps):
            while True:
                try:
                    step = await anext(steps)
                except ValueError as error:
                    raise _refused(error) from error
                except StopAsyncIteration:
                    raise RequestFailedError("it ended without a finish reason") from None
                watch.step(step)
                delta = self._push(step)
                if delta is not None:
                    if delta.finish_reason is not None:
                        watch.finish(delta.finish_reason, step.prompt_tokens, self._count)
                    yield delta
                    if delta.finish_reason is not None:
                        return

    def _push(self, step: Step) -> Delta | None:
        """The Delta of a Step, or None while nothing can be shown."""
        if step.finish_reason in ("error", "abort"):
            raise RequestFailedError(step.error or "it was aborted")
        self._cached = step.cached_tokens
        if step.prompt_logprobs is not None:
            self._prompt_logprobs = step.prompt_logprobs
        text = ""
        last = len(step.token_ids) - 1
        for position, token_id in enumerate(step.token_ids):
            logprobs = step.logprobs[position] if step.logprobs is not None else None
            self._tokens.append(Token(token_id, self._length, logprobs))
            self._count += 1
            if step.finish_reason == "stop" and position == last and token_id in self._ends:
                break  # the stop token itself has no text; a grammar may also end with a token that has
            piece = self._detokenizer.push(token_id)
            self._length += len(piece)
            text += self._stops.push(piece)
            if self._stops.matched is not None:
                return self._delta(text, "stop", self._stops.matched)
        if step.finish_reason is None:
            return self._delta(text) if text else None
        stop_reason = None
        if step.finish_reason == "stop" and step.token_ids and step.token_ids[-1] in self.request.sampling.stop_token_ids:
            stop_reason = step.token_ids[-1]
        return self._delta(text + self._stops.rest(), step.finish_reason, stop_reason)

    def _delta(self, text: str, finish_reason: str | None = None, stop_reason: str | int | None = None) -> Delta:
        tokens, self._tokens = self._tokens, []
        told, self._prompt_logprobs = self._prompt_logprobs, None
        return Delta(self.index, text, tokens, self._count, finish_reason, stop_reason, self._cached, told)


def _refused(error: ValueError) -> ApiError:
    """The engine's reason as a sentence."""
    reason = str(error).rstrip(".")
    return bad_request(f"{reason[:1].upper()}{reason[1:]}.")


@dataclass(frozen=True, slots=True)
class Generation:
    """All choices of one client request, `samples` to a prompt."""

    choices: list[Choice]
    prompts: list[list[int]]
    samples: int

    @property
    def prompt_tokens(self) -> int:
        """Each prompt counts once."""
        return sum(map(len, self.prompts))

    def run(self, engine: Engine) -> AsyncGenerator[Delta, None]:
        return merge([choice.run(engine) for choice in self.choices])


def plan(
    state: ServerState, body: GenerationBody, prompts: Sequence[list[int]], *, kept: frozenset[str] = frozenset()
) -> Generation:
    """Checks the prompts (token ids) against the model and makes the engine requests: choice i * n + j is sample j of prompt i.

    `kept` are special tokens that are to appear in the text.
    Raises ApiError 400 for an empty prompt, an id outside the vocabulary, or lengths that do not fit.
    """
    n = body.n or 1
    state.check_size(len(prompts) * n)
    vocab = state.engine.info.vocab_size
    if any(not 0 <= token_id < vocab for token_id in body.stop_token_ids or ()):
        raise bad_request(f"stop_token_ids must hold ids from 0 to {vocab - 1}.", "stop_token_ids")
    structure, biases = body.requested_structure, body.biases(vocab)
    choices: list[Choice] = []
    for prompt in prompts:
        if not prompt:
            raise bad_request("The prompt is empty; give at least one token.", "prompt")
        if any(not 0 <= token_id < vocab for token_id in prompt):
            raise bad_request(f"prompt must hold token ids from 0 to {vocab - 1}.", "prompt")
        max_tokens = _max_tokens(state, body, len(prompt))
        for sample in range(n):
            choices.append(
                Choice(
                    len(choices),
                    Request(
                        uuid.uuid4().hex,
                        prompt,
                        _sampling(state, body, max_tokens, sample, structure, biases),
                        priority=body.priority or 0,
                    ),
                    state.tokenizer.detokenizer(skip_special_tokens=body.skip_special_tokens is not False, kept=kept),
                    StopStrings(body.stops, include=bool(body.include_stop_str_in_output)),
                    state,
                )
            )
    return Generation(choices, list(prompts), n)


def _max_tokens(state: ServerState, body: GenerationBody, prompt_tokens: int) -> int:
    """The bound on the answer: what the request asks for, which must fit; else the model's default and all that fits."""
    limit, cap = state.engine.info.max_model_len, state.settings.max_output_tokens
    field, wanted = body.requested_max_tokens
    room = limit - prompt_tokens
    if room < 1 or (wanted is not None and wanted > room):
        asked = f"{field} asks for {wanted} more" if wanted is not None else "the answer needs at least 1 more"
        raise ApiError(
            400, f"This model's maximum context length is {limit} tokens; the prompt has {prompt_tokens} tokens and {asked}.",
            param="prompt" if room < 1 else field, code="context_length_exceeded",
        )  # fmt: skip
    if cap is not None and wanted is not None and wanted > cap:
        raise bad_request(f"{field} may be at most {cap} on this server.", field)
    return wanted or min(x for x in (room, cap, state.defaults.max_tokens or None) if x is not None)


def _sampling(
    state: ServerState, body: GenerationBody, max_tokens: int, sample: int, structure: Structured | None,
    biases: tuple[tuple[int, float], ...],
) -> Sampling:  # fmt: skip
    """`sample` numbers the n answers to one prompt; each has a seed of its own, counted up from the request's."""
    if (body.min_tokens or 0) > max_tokens:
        raise bad_request(f"min_tokens asks for more than the answer may have, {max_tokens} tokens.", "min_tokens")
    defaults = state.defaults
    temperature = defaults.temperature if body.temperature is None else body.temperature
    top_k = defaults.top_k if body.top_k is None else max(0, body.top_k)
    seed = None if body.seed is None else (body.seed + sample + 2**63) % 2**64 - 2**63
    return Sampling(
        max_tokens=max_tokens,
        temperature=0.0 if temperature < GREEDY else float(temperature),
        top_p=float(defaults.top_p if body.top_p is None else body.top_p),
        top_k=min(top_k, state.engine.info.vocab_size),
        seed=seed,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        min_p=float(defaults.min_p if body.min_p is None else body.min_p),
        min_tokens=body.min_tokens or 0,
        logprobs=body.requested_logprobs,
        prompt_logprobs=body.requested_prompt_logprobs,
        logit_bias=biases,
        presence_penalty=float(body.presence_penalty or 0),
        frequency_penalty=float(body.frequency_penalty or 0),
        repetition_penalty=float(defaults.repetition_penalty if body.repetition_penalty is None else body.repetition_penalty),
        structured=structure,
    )


async def merge(streams: Sequence[AsyncGenerator[Delta, None]]) -> AsyncGenerator[Delta, None]:
    """Deltas of several choices as they come. Closing it closes all; the first error ends all."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for delta in only:
                yield delta
        return
    queue: asyncio.Queue[Delta | asyncio.Task[None]] = asyncio.Queue()

    async def pump(stream: AsyncGenerator[Delta, None]) -> None:
        async with aclosing(stream) as deltas:
            async for delta in deltas:
                queue.put_nowait(delta)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    for task in tasks:
        task.add_done_callback(queue.put_nowait)
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if isinstance(item, Delta):
                yield item
            else:
                running -= 1
                item.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Tally:
    """Counts a request's tokens as its Deltas pass. A prompt counts once however many samples it has."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._completion = [0] * len(generation.choices)
        self._cached = [0] * len(generation.choices)

    def add(self, delta: Delta) -> None:
        self._completion[delta.choice] = delta.completion_tokens
        self._cached[delta.choice] = delta.cached_tokens

    @property
    def prompt_tokens(self) -> int:
        return self._generation.prompt_tokens

    @property
    def completion_tokens(self) -> int:
        return sum(self._completion)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache had, as each prompt's first sample met it."""
        return sum(self._cached[:: self._generation.samples])

    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


async def collect(deltas: AsyncIterator[Delta], tally: Tally, choices: int) -> list[list[Delta]]:
    """All Deltas, by choice, counted."""
    found: list[list[Delta]] = [[] for _ in range(choices)]
    async for delta in deltas:
        tally.add(delta)
        found[delta.choice].append(delta)
    return found
