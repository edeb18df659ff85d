"""The body of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from mla_serve.server.errors import bad_request
from mla_serve.server.protocol.base import FAST, Strings, TokenIds
from mla_serve.server.protocol.common import MAX_LOGPROBS, GenerationBody


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: str | TokenIds | Strings | Annotated[list[TokenIds], FAST]
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    best_of: int | None = Field(None, ge=1)
    suffix: str | None = None

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {**GenerationBody.REFUSED, "suffix": ("",)}

    def check(self) -> None:
        super().check()
        if self.best_of not in (None, self.n or 1):
            raise bad_request("best_of is not supported by this server unless it equals n.", "best_of")

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Always a list of prompts, each a text or a list of token ids. Raises ApiError for an empty one."""
        prompt = self.prompt
        many: Any = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
        if not many or any(isinstance(one, list) and not one for one in many):
            raise bad_request("prompt is empty; give at least one token.", "prompt")
        return list(many)

    @property
    def requested_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def requested_prompt_logprobs(self) -> int | None:
        """What is echoed has logprobs too."""
        return max((n for n in (self.prompt_logprobs, self.logprobs if self.echo else None) if n is not None), default=None)
