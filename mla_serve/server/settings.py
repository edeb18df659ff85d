"""What an operator can set about the server; the engine has settings of its own inside."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mla_serve.errors import UserError

if TYPE_CHECKING:
    from mla_serve.engine.embedded.messages import EngineConfig
    from mla_serve.engine.vllm import VllmConfig

KEY_VARIABLE = "MLA_SERVE_API_KEY"


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of one server process; sizes in bytes, times in seconds.

    `served_model_name` None means the name of the model's directory. `max_queue` bounds the choices (prompts times n) that
    are open at once. `max_output_tokens` bounds every answer: a request that names more is refused.
    `chat_template` is a Jinja file that replaces the model's own. `body_timeout` is the time that a request's body may take.
    `heartbeat_limit` is the age from which an engine counts as hung, `death_linger` how long the server stays to say so once
    its engine has died. `request_timeout` bounds a request from its body to its last token.
    `tool_format` is a name of `parsers.TOOL_FORMATS`, "none", or "auto": what the chat template writes. `reasoning` "on" or
    "off" says whether `<think>` is told apart from the answer, "auto" does where the chat template knows it.
    `otlp_endpoint` is the address of an OpenTelemetry collector that takes OTLP over HTTP.
    `allow_origins` are the web pages' origins that a browser may call from (CORS); none by default.
    `json_start` prints the start as one JSON line in place of the lines for people.
    """

    engine: EngineConfig | VllmConfig
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    max_queue: int = 512
    max_output_tokens: int | None = None
    body_limit: int = 8 * 1024 * 1024
    body_timeout: float = 60.0
    chat_template: Path | None = None
    drain_timeout: float = 30.0
    heartbeat_limit: float = 30.0
    death_linger: float = 2.0
    request_timeout: float | None = None
    tool_format: str = "auto"
    reasoning: str = "auto"
    allow_origins: tuple[str, ...] = ()
    otlp_endpoint: str | None = None
    json_start: bool = False

    @property
    def model_dir(self) -> Path:
        return Path(self.engine.model)

    @property
    def model_name(self) -> str:
        """The name that clients use."""
        return self.served_model_name or self.model_dir.resolve().name


def read_api_keys(path: Path | None) -> tuple[str, ...]:
    """The keys in a file, one a line; empty lines and lines that start with # are skipped.

    None means those of the environment variable MLA_SERVE_API_KEY, divided by white space, of which there may be none.

    Raises UserError if the file cannot be read or holds no key: an empty list would leave the server open.
    """
    if path is None:
        text = os.environ.get(KEY_VARIABLE)
        if text is not None and not text.split():
            raise UserError(f"{KEY_VARIABLE} is set and holds no key, which would leave the server open; set a key or unset it")
        return tuple((text or "").split())
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"the API key file {path} cannot be read ({reason}); give a text file with one key a line") from error
    for number, line in enumerate(lines, 1):
        if not line.lstrip().startswith("#") and len(line.split()) > 1:
            raise UserError(f"line {number} of the API key file {path} has white space inside a key; write one key a line")
    keys = tuple(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
    if not keys:
        raise UserError(f"the API key file {path} holds no key; write one key a line")
    return keys
