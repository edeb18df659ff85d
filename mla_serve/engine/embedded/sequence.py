"""A running request as the scheduler and the runner see it, the piece of it that one step computes, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from mla_serve.engine.base import Request, TokenLogprobs

if TYPE_CHECKING:
    from torch import Tensor

    from mla_serve.engine.embedded.penalties import Tally


class Matcher(Protocol):
    """Where one sequence stands in the grammar that it must follow. It outlives a preemption, as its tokens do."""

    @property
    def terminated(self) -> bool:
        """Whether the output is complete, its end token included where the model has one."""
        ...

    def fill(self, words: Tensor) -> None:
        """Writes which tokens fit next into `words`, int32 [vocab / 32, rounded up]: bit i of word j for token 32 j + i."""
        ...

    def accept(self, token: int) -> bool:
        """Moves on by a token; False, and nothing moves, if it does not fit."""
        ...


@dataclass(eq=False, slots=True)
class Sequence:
    """One request's tokens and the pages that hold their latents.

    `token_ids` is the prompt followed by what was generated; `num_computed` counts the leading tokens whose latents are in the
    cache; `pages` are page ids in token order, so token i lies in slot i % page_size of `pages[i // page_size]`. `num_sound`
    counts the leading tokens whose latents are known to be numbers, since finite logits came from attending to them;
    `page_keys` names the full pages for the prefix cache; `seed` is the request's, or one drawn at arrival. `number` counts
    arrivals. `end_token_ids` are the model's own. `cached_tokens` of the prompt were found in the prefix cache. `arrived`,
    `started` and `answered` are moments of the monotonic clock, in seconds, the last two None until then: pages at hand, first
    token picked. `prompt_logprobs` grows while a prompt is computed whose log-probabilities are asked for. Sequences compare
    by identity.
    """

    request: Request
    token_ids: list[int]
    num_prompt: int
    num_computed: int = 0
    pages: list[int] = field(default_factory=list)
    num_sound: int = 0
    page_keys: list[bytes] = field(default_factory=list)
    seed: int = 0
    number: int = 0
    end_token_ids: frozenset[int] = frozenset()
    matcher: Matcher | None = None
    tally: Tally | None = None
    cached_tokens: int = 0
    arrived: float = 0.0
    started: float | None = None
    answered: float | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @classmethod
    def of(cls, request: Request, *, seed: int = 0) -> Sequence:
        """A sequence that has yet to start. The request's own list of prompt tokens is copied."""
        return cls(request, list(request.prompt_token_ids), len(request.prompt_token_ids), seed=seed)

    @property
    def rank(self) -> tuple[int, int]:
        """Smaller goes first: by priority, then by arrival."""
        return self.request.priority, self.number

    @property
    def owes_prompt_logprobs(self) -> bool:
        """Whether prompt positions are yet to be computed for their log-probabilities."""
        return self.request.sampling.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt - 1

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_pending(self) -> int:
        """Tokens whose latents are not in the cache yet: 1 while decoding, more while (re)computing."""
        return len(self.token_ids) - self.num_computed


@dataclass(frozen=True, slots=True)
class Work:
    """Compute `seq.token_ids[start : start + count]` in this step; `seq.pages` already cover start + count tokens."""

    seq: Sequence
    start: int
    count: int

    @property
    def samples(self) -> bool:
        """Whether the last computed token is the sequence's last, so that its logits give the next token."""
        return self.start + self.count == len(self.seq.token_ids)

    @property
    def told(self) -> range:
        """Positions whose logits are wanted for `prompt_logprobs`: those that predict a prompt token, once each."""
        if not self.seq.owes_prompt_logprobs:
            return range(0)
        return range(max(self.start, len(self.seq.prompt_logprobs)), min(self.start + self.count, self.seq.num_prompt - 1))

    @property
    def wanted(self) -> list[int]:
        """All positions whose logits are wanted, rising: those told of the prompt, then the one to sample from."""
        return [*self.told, *([self.start + self.count - 1] if self.samples else [])]


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token picked for one sequence, with log-probabilities where its request asks for them."""

    token: int
    logprobs: TokenLogprobs | None = None
