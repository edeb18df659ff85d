"""What server and engine process say to each other: msgspec structs, MessagePack on the wire. No torch here."""

from __future__ import annotations

from typing import Any

import msgspec

from mla_serve.engine.base import EngineInfo, Request, Stats, Step


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one embedded engine.

    `model` is a Hugging Face directory. `dtype` and `device` "auto" mean the checkpoint's and the first GPU, or the CPU
    without one. `policy`, `pins` and `decisions` (a table file; None: the user's) go to the selector. `probe` says when shapes
    that the table lacks are measured: "off", "idle" (while there is no request) or "on-demand" (when first met);
    `kernel_timeout` are the seconds that one kernel gets at one shape (None: by device). Under the policy "batch-invariant" a
    request's logits are the same bits whatever else is served, at the price of batching and of the prefix cache: each request
    is computed alone, its prompt in chunks of its own positions. At most `max_requests` run at once, one step computes at most
    `max_tokens` tokens, prompt and answer have at most `max_model_len` (None: what the model was made for). `page_size` tokens
    a page (None: 64 on a GPU, 16 elsewhere), `num_pages` of them (None: as memory allows). `context_chunk` cached tokens are
    expanded at a time. `threads` on the CPU (None: the physical cores that this process may use).
    """

    model: str
    dtype: str = "auto"
    device: str = "auto"
    policy: str = "measured"
    pins: dict[str, str] = {}
    decisions: str | None = None
    probe: str = "off"
    kernel_timeout: float | None = None
    max_model_len: int | None = None
    max_requests: int = 64
    max_tokens: int = 2048
    page_size: int | None = None
    num_pages: int | None = None
    context_chunk: int = 4096
    prefix_cache: bool = True
    threads: int | None = None


class Launch(msgspec.Struct, frozen=True):
    """The one line that the child reads from its standard input. `parent` is the process id it must not outlive."""

    address: str
    parent: int
    config: EngineConfig


class Add(msgspec.Struct, frozen=True, tag=True):
    """Queue a request. Exactly one message follows that ends it: a Step with a finish reason, or Refused."""

    request: Request


class Abort(msgspec.Struct, frozen=True, tag=True):
    id: str


class AskDecisions(msgspec.Struct, frozen=True, tag=True):
    number: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End the process, with status 0 and without finishing anything."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    info: EngineInfo
    stats: Stats


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine could not be loaded, and the user can mend that."""

    reason: str


class Turn(msgspec.Struct, frozen=True, tag=True):
    """One turn of the engine's loop: also its heartbeat, so `steps` may be empty."""

    steps: list[Step]
    stats: Stats


class Refused(msgspec.Struct, frozen=True, tag=True):
    """An added request can never run."""

    id: str
    reason: str


class Decisions(msgspec.Struct, frozen=True, tag=True):
    number: int
    decisions: list[dict[str, Any]]


class Dying(msgspec.Struct, frozen=True, tag=True):
    """The last message of an engine that ends by a fault of its own."""

    reason: str


ToEngine = Add | Abort | AskDecisions | Stop
ToServer = Ready | Failed | Turn | Refused | Decisions | Dying

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_to_server = msgspec.msgpack.Decoder(ToServer).decode


def merge(earlier: Step, later: Step) -> Step:
    """One Step that says what two said, for a reader who fell behind. Takes over the lists of `earlier`."""
    earlier.token_ids.extend(later.token_ids)
    logprobs = earlier.logprobs
    if logprobs is None:
        logprobs = later.logprobs
    elif later.logprobs is not None:
        logprobs.extend(later.logprobs)
    return msgspec.structs.replace(
        later,
        token_ids=earlier.token_ids,
        logprobs=logprobs,
        # Only the first Step has these, so never both.
        prompt_logprobs=later.prompt_logprobs if earlier.prompt_logprobs is None else earlier.prompt_logprobs,
        queue_seconds=later.queue_seconds if earlier.queue_seconds is None else earlier.queue_seconds,
        prefill_seconds=later.prefill_seconds if earlier.prefill_seconds is None else earlier.prefill_seconds,
    )
