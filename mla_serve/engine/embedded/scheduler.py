"""What to compute next: continuous batching by priority and arrival, with chunked prefill and preemption by recomputation.

Sequences move between two lines, both in the order of their rank (priority, then arrival). `waiting` holds no pages; `running`
does. Admission takes the head of the one, preemption the end of the other. Who runs is not stopped for who waits: priority
decides who starts, and who goes on where pages run out.
"""

from __future__ import annotations

import itertools
import secrets
import time
from bisect import insort
from collections.abc import Iterable

from mla_serve.engine.base import FinishReason, Request, Step
from mla_serve.engine.embedded.kv_cache import PageAllocator, extend_page_keys
from mla_serve.engine.embedded.sequence import Matcher, Sampled, Sequence, Work

NOT_A_NUMBER = "the model's output for this request was not a number (NaN or infinity), so it was ended; the others go on"
OFF_GRAMMAR = "a token was picked that the request's grammar does not allow, so it was ended; this is a fault of the engine"
PROMPT_ROWS = 256  # tokens of one prompt computed in a step where each needs its logits: a row may be half a megabyte


class Scheduler:
    """Requests in, Work out; then sampled tokens in, Steps out.

    At most `max_requests` run at once, and one step computes at most `max_tokens` tokens. No request may need more tokens than
    the whole pool holds. With `chunk` a request is cut by its own positions alone, never by what others leave it of a step: its
    prompt at multiples of `chunk`, and what it has generated token by token, also when it is computed again after a preemption.
    """

    def __init__(
        self, pages: PageAllocator, *, max_requests: int, max_tokens: int, eos_token_ids: Iterable[int] = (),
        chunk: int | None = None,
    ) -> None:  # fmt: skip
        assert max_requests <= max_tokens, "every running sequence must fit one step with one token at least"
        assert chunk is None or max_requests + chunk <= max_tokens, "a chunk must fit one step beside all that decode"
        self.pages = pages
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.chunk = chunk
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.prompt_tokens = self.generated_tokens = self.preemptions = 0
        self.prefix_queries = self.prefix_hits = 0  # prompt tokens looked for and found in the prefix cache
        self._eos = frozenset(eos_token_ids)
        self._zero: list[int] = []
        self._numbers = itertools.count()

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request, *, matcher: Matcher | None = None, arrived: float | None = None) -> None:
        """Puts a request in line. It must have passed `limits.check_request`.

        `matcher` holds it to a grammar; `arrived` is when it came (monotonic), if not just now.
        """
        seed = request.sampling.seed
        seq = Sequence.of(request, seed=secrets.randbits(64) if seed is None else seed)
        seq.number, seq.end_token_ids, seq.matcher = next(self._numbers), self._eos, matcher
        seq.arrived = time.monotonic() if arrived is None else arrived
        insort(self.waiting, seq, key=_rank)

    def find(self, request_id: str) -> Sequence | None:
        return next((seq for line in (self.running, self.waiting) for seq in line if seq.id == request_id), None)

    def take_suspect_pages(self) -> list[int]:
        """Pages freed since the last call that may hold NaN: the runner must zero them before its next step."""
        zero, self._zero = self._zero, []
        return zero

    def schedule(self) -> list[Work]:
        """The next step's work, single-token continuations first; empty only without requests."""
        counts: dict[Sequence, int] = {}
        budget = self.max_tokens
        for seq in list(self.running):  # first in rank first: those that decode
            if budget and seq.pages and seq.num_pending == 1 and self._grow(seq):
                counts[seq] = 1
                budget -= 1
        for seq in self.running:  # then those that have a prompt to finish
            if seq not in counts and (count := self._count(seq, budget)):
                counts[seq] = count
                budget -= count
        while self._room_for_head(budget) and (admitted := self._admit()):
            counts[admitted] = self._count(admitted, budget)
            budget -= counts[admitted]
        works = [Work(seq, seq.num_computed, count) for seq, count in counts.items()]
        return sorted(works, key=lambda work: work.count != 1 or work.start == 0)

    def advance(self, works: Iterable[Work], sampled: Iterable[Sampled | str | None]) -> list[Step]:
        """Takes in a step's results: one entry of `sampled` per Work that samples.

        None where its logits were no numbers, a sentence where it cannot go on for another reason.
        """
        finals = []
        for work in works:
            work.seq.num_computed = work.start + work.count
            if work.samples:
                finals.append(work.seq)
        return [
            self._accept(seq, pick) if isinstance(pick, Sampled) else self.fail(seq, pick or NOT_A_NUMBER)
            for seq, pick in zip(finals, sampled, strict=True)
        ]

    def abort(self, seq: Sequence) -> Step:
        """Ends a sequence at its client's wish and frees its pages."""
        return self._end(seq, "abort")

    def fail(self, seq: Sequence, reason: str) -> Step:
        """Ends a sequence by a fault of its own; whatever it wrote into the cache is not to be trusted."""
        seq.num_sound = 0
        return self._end(seq, "error", error=reason)

    def _count(self, seq: Sequence, budget: int) -> int:
        """How many of its tokens `seq` gets of `budget`."""
        if self.chunk is None:
            most = PROMPT_ROWS if seq.owes_prompt_logprobs else seq.num_pending
            return min(budget, seq.num_pending, most)
        at = seq.num_computed
        end = at + 1 if at >= seq.num_prompt else min(seq.num_prompt, (at // self.chunk + 1) * self.chunk)
        return end - at if end - at <= budget else 0

    def _room_for_head(self, budget: int) -> int:
        """Whether the head of the line, if there is one, could compute something."""
        return self._count(self.waiting[0], budget) if self.waiting else 0

    def _admit(self) -> Sequence | None:
        """Moves the head of the line to the running ones, if there is room for all its tokens.

        One page per running sequence is left free: admitting into the last page would only have the newcomer thrown out again.
        """
        if not self.waiting or len(self.running) >= self.max_requests:
            return None
        seq = self.waiting[0]
        size = self.pages.page_size
        if self.pages.prefix_cache:
            extend_page_keys(seq.page_keys, seq.token_ids, size)
        # The last token is always computed, since its logits are what the request is for; here those of every prompt token are.
        usable = [] if seq.owes_prompt_logprobs else seq.page_keys[: (len(seq.token_ids) - 1) // size]
        granted = self.pages.admit(usable, self.pages.pages_for(len(seq.token_ids)), spare=len(self.running))
        if granted is None:
            return None
        seq.pages, shared = granted
        seq.num_computed = seq.num_sound = shared * size
        if seq.started is None:  # else it comes back, and finds what it had computed itself
            seq.started = time.monotonic()
            seq.cached_tokens = seq.num_computed
            if self.pages.prefix_cache and not seq.owes_prompt_logprobs:
                self.prefix_queries += seq.num_prompt
                self.prefix_hits += seq.cached_tokens
        insort(self.running, self.waiting.pop(0), key=_rank)
        return seq

    def _grow(self, seq: Sequence) -> bool:
        """Sees to it that the newest token has a slot. False if `seq` itself, being the last, had to give up its pages."""
        while self.pages.pages_for(len(seq.token_ids)) > len(seq.pages):
            if self.pages.num_free:
                seq.pages += self.pages.allocate(1)
            elif self._preempt() is seq:
                return False
        return True

    def _preempt(self) -> Sequence:
        """Sends the last running sequence in rank back to wait, with its tokens but without their latents."""
        seq = self.running.pop()
        self._release(seq)
        insort(self.waiting, seq, key=_rank)
        self.preemptions += 1
        return seq

    def _release(self, seq: Sequence) -> None:
        sound = seq.num_sound // self.pages.page_size
        # The doubtful tail first: a prefix is to be evicted from its end.
        self._zero += self.pages.free(seq.pages[sound:], suspect=seq.num_sound < seq.num_computed or not seq.num_sound)
        self._zero += self.pages.free(seq.pages[:sound])
        seq.pages = []
        seq.num_computed = seq.num_sound = 0

    def _accept(self, seq: Sequence, pick: Sampled) -> Step:
        """Appends a token. Finite logits vouch for every latent they attended to, so full pages may be shared from now on."""
        if seq.matcher is not None and not seq.matcher.accept(pick.token):
            return self.fail(seq, OFF_GRAMMAR)
        size = self.pages.page_size
        if self.pages.prefix_cache:
            extend_page_keys(seq.page_keys, seq.token_ids, size)
            for i in range(seq.num_sound // size, seq.num_computed // size):
                self.pages.publish(seq.pages[i], seq.page_keys[i])
        seq.num_sound = seq.num_computed
        if seq.num_generated == 0:
            self.prompt_tokens += seq.num_prompt
            seq.answered = time.monotonic()
        self.generated_tokens += 1
        seq.token_ids.append(pick.token)
        return self._end(seq, reason, pick) if (reason := self._finished(seq)) else _step(seq, pick)

    def _finished(self, seq: Sequence) -> FinishReason | None:
        sampling, token = seq.request.sampling, seq.token_ids[-1]
        if token in sampling.stop_token_ids or (token in self._eos and not sampling.ignore_eos):
            return "stop"
        if seq.matcher is not None and seq.matcher.terminated:
            return "stop"
        return "length" if seq.num_generated >= sampling.max_tokens else None

    def _end(self, seq: Sequence, reason: FinishReason, pick: Sampled | None = None, error: str | None = None) -> Step:
        if seq.pages:
            self.running.remove(seq)
            self._release(seq)
        else:
            self.waiting.remove(seq)
        return _step(seq, pick, reason, error)


def _rank(seq: Sequence) -> tuple[int, int]:
    return seq.rank


def _step(seq: Sequence, pick: Sampled | None, reason: FinishReason | None = None, error: str | None = None) -> Step:
    waited = computed = prompt_logprobs = None
    if pick is not None and seq.num_generated == 1 and seq.started is not None and seq.answered is not None:
        waited, computed = seq.started - seq.arrived, seq.answered - seq.started
        prompt_logprobs = None if seq.request.sampling.prompt_logprobs is None else seq.prompt_logprobs
    return Step(
        id=seq.id,
        token_ids=[pick.token] if pick else [],
        prompt_tokens=seq.num_prompt,
        completion_tokens=seq.num_generated,
        logprobs=[pick.logprobs] if pick and pick.logprobs else None,
        finish_reason=reason,
        error=error,
        cached_tokens=seq.cached_tokens,
        prompt_logprobs=prompt_logprobs,
        queue_seconds=waited,
        prefill_seconds=computed,
    )
