"""vLLM as the engine: its scheduler, memory and parallelism, our attention through the plugin, our server on top.

vLLM is imported when an engine is started and not before. It runs its engine core in processes of its own; text is the server's
business, so vLLM does not detokenize.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from mla_serve.engine.base import EngineDeadError, EngineInfo, Health, Request, Stats, Step
from mla_serve.engine.vllm.config import VllmConfig, vllm_arguments
from mla_serve.engine.vllm.loads import Loads
from mla_serve.engine.vllm.translate import Reader, end_tokens, sampling_params
from mla_serve.errors import UserError

__all__ = ["VllmEngine"]

GRACE = 5.0  # seconds that vLLM's processes get to end


class VllmEngine:
    """An `AsyncLLM`, as the Engine protocol has it. Build one with `start`; every call belongs on that event loop."""

    def __init__(self, llm: Any, loads: Loads) -> None:
        self._llm, self._loads = llm, loads
        self._death: str | None = None
        self._stopping = False
        model, config = llm.model_config, llm.vllm_config
        self.info = EngineInfo(
            vocab_size=model.get_vocab_size(),
            max_model_len=model.max_model_len,
            eos_token_ids=end_tokens(model),
            dtype=str(model.dtype).removeprefix("torch."),
            device=str(config.device_config.device_type),
        )
        loads.pages = int(config.cache_config.num_gpu_blocks or 0)

    @classmethod
    async def start(cls, config: VllmConfig) -> VllmEngine:
        """Starts vLLM and waits until the model is loaded. Raises UserError where vLLM refuses its arguments or the model."""
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # our standard output may carry JSON
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.update(config.variables)
        loads = Loads()
        try:
            llm = await asyncio.to_thread(_args, config)
            llm = _build(llm, loads)
        except ImportError as error:
            raise UserError(
                f"vLLM is not usable here ({error}); install mla-serve[vllm], or serve with --engine embedded"
            ) from error
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            raise UserError(f"vLLM did not start: {reason}") from error
        return cls(llm, loads)

    def generate(self, request: Request) -> AsyncGenerator[Step, None]:
        """See Engine.generate."""
        return self._stream(request)

    async def abort(self, request_id: str) -> None:
        await self._llm.abort(request_id)

    async def stats(self) -> Stats:
        return self._loads.stats(self._llm.get_num_unfinished_requests())

    async def decisions(self) -> list[dict[str, Any]]:
        """What the first worker uses; none for a model without MLA. Raises EngineDeadError."""
        self._require_life()
        from mla_serve.vllm_plugin.rpc import ask_workers

        ranks = await ask_workers(self._llm)
        decisions: list[dict[str, Any]] = ranks[0]["decisions"] if ranks else []
        return decisions

    async def health(self) -> Health:
        """vLLM has no heartbeat: its loop counts as turning while nothing is asked of it."""
        if self._llm.errored and self._death is None:
            self._death = "the engine was shut down" if self._stopping else "vLLM's engine core has ended; its log says why"
        busy = self._llm.get_num_unfinished_requests() > 0
        age = time.monotonic() - self._loads.heard if busy else 0.0
        return Health(alive=self._death is None, heartbeat_age=age, reason=self._death)

    async def shutdown(self) -> None:
        self._stopping = True
        await asyncio.to_thread(self._llm.shutdown, GRACE)

    async def _stream(self, request: Request) -> AsyncGenerator[Step, None]:
        from vllm.v1.engine.exceptions import EngineDeadError as VllmDeadError
        from vllm.v1.engine.exceptions import EngineGenerateError

        self._require_life()
        self._loads.begin()
        reader = Reader(request)
        try:
            outputs = self._llm.generate(
                {"prompt_token_ids": request.prompt_token_ids},
                sampling_params(request.sampling),
                request.id,
                priority=request.priority,
            )
            async with aclosing(outputs):
                async for output in outputs:
                    step = reader.step(output)
                    if step is not None:
                        yield step
        except VllmDeadError as error:
            raise EngineDeadError(f"vLLM's engine core has ended: {error}") from error
        except EngineGenerateError as error:
            yield reader.failed(str(error.__cause__ or error))
        except _refusals() as error:
            raise ValueError((str(error).splitlines() or [type(error).__name__])[0].rstrip(": ")) from error

    def _require_life(self) -> None:
        if self._llm.errored:
            raise EngineDeadError("vLLM's engine core has ended; its log says why")


def _args(config: VllmConfig) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm", exit_on_error=False))
    parser.error = _refuse
    return AsyncEngineArgs.from_cli_args(parser.parse_args(vllm_arguments(config, cpu=current_platform.is_cpu())))


def _refuse(message: str) -> None:
    raise ValueError(message)


def _build(arguments: Any, loads: Loads) -> Any:
    """The engine, on this event loop, with its load told to `loads`."""
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Logger(StatLoggerBase):
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            self._index = engine_index

        def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
            loads.record(self._index, scheduler_stats, iteration_stats)

        def log_engine_initialized(self) -> None:
            """Nothing to say."""

    return AsyncLLM.from_engine_args(arguments, stat_loggers=[Logger])


def _refusals() -> tuple[type[Exception], ...]:
    """What vLLM raises for a request that is the client's fault; ValueError until it had a class of its own."""
    import vllm.exceptions

    return (ValueError, *filter(None, [getattr(vllm.exceptions, "VLLMClientError", None)]))
