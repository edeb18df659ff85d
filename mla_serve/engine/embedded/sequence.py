"""A running request as the scheduler and the runner see it, the piece of it that one step computes, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from mla_serve.engine.base import Request, TokenLogprobs


@dataclass(eq=False, slots=True)
class Sequence:
    """One request's tokens and the pages that hold their latents.

    `token_ids` is the prompt followed by what was generated; `num_computed` counts the leading tokens whose latents are in the
    cache; `pages` are page ids in token order, so token i lies in slot i % page_size of `pages[i // page_size]`. `num_sound`
    counts the leading tokens whose latents are known to be numbers, since finite logits came from attending to them;
    `page_keys` names the full pages for the prefix cache; `seed` is the request's, or one drawn at arrival. Sequences
    compare by identity.
    """

    request: Request
    token_ids: list[int]
    num_prompt: int
    num_computed: int = 0
    pages: list[int] = field(default_factory=list)
    num_sound: int = 0
    page_keys: list[bytes] = field(default_factory=list)
    seed: int = 0

    @classmethod
    def of(cls, request: Request, *, seed: int = 0) -> Sequence:
        """A sequence that has yet to start. The request's own list of prompt tokens is copied."""
        return cls(request, list(request.prompt_token_ids), len(request.prompt_token_ids), seed=seed)

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


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token picked for one sequence, with log-probabilities where its request asks for them."""

    token: int
    logprobs: TokenLogprobs | None = None
