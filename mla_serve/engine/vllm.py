"""vLLM as the engine: its scheduler, memory and parallelism, our attention through the plugin, our server on top.

vLLM is imported when an engine is started and not before. It runs its engine core in processes of its own; text is the server's
business, so vLLM does not detokenize.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import msgspec

from mla_serve.engine.base import (
    EngineDeadError,
    EngineInfo,
    Health,
    Request,
    Sampling,
    Stats,
    Step,
    Structured,
    TokenLogprobs,
)
from mla_serve.errors import UserError

__all__ = ["VllmConfig", "VllmEngine", "vllm_arguments"]

GRACE = 5.0  # seconds that vLLM's processes get to end


class VllmConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a vLLM engine: `model` is a Hugging Face directory, `arguments` are vLLM's own flags, last word included.

    `policy`, `pins`, `decisions`, `probe` and `kernel_timeout` reach the plugin as its MLA_SERVE_* variables.
    """

    model: str
    arguments: tuple[str, ...] = ()
    policy: str = "measured"
    pins: str = ""
    decisions: str | None = None
    probe: str = "off"
    kernel_timeout: float | None = None

    @property
    def variables(self) -> dict[str, str]:
        """What the plugin reads in each of vLLM's processes."""
        asked = {
            "MLA_SERVE_DEFAULT": "1",
            "MLA_SERVE_POLICY": self.policy,
            "MLA_SERVE_PINS": self.pins,
            "MLA_SERVE_DECISIONS": self.decisions,
            "MLA_SERVE_PROBE": self.probe,
            "MLA_SERVE_KERNEL_TIMEOUT": None if self.kernel_timeout is None else f"{self.kernel_timeout:g}",
        }
        return {name: value for name, value in asked.items() if value}


def vllm_arguments(config: VllmConfig, *, cpu: bool) -> list[str]:
    """vLLM's command line: ours first, so that the operator's own flags win.

    On a CPU vLLM's RoPE operator is wrong for MLA (its kernel takes [tokens, heads * rope] only), so it is switched off there.
    """
    ours = ["--model", config.model, "--seed", "0"]
    if not cpu:
        ours += ["--attention-backend", "CUSTOM", "--attention-config.mla_prefill_backend", "CUSTOM"]
    elif not any(flag.startswith(("--compilation-config", "-O", "-cc")) for flag in config.arguments):
        ours += ["--compilation-config", json.dumps({"custom_ops": ["-rotary_embedding"]})]
    return [*ours, *config.arguments]


class VllmEngine:
    """An `AsyncLLM`, as the Engine protocol has it. Build one with `start`; every call belongs on that event loop."""

    def __init__(self, llm: Any, loads: _Loads) -> None:
        self._llm, self._loads = llm, loads
        self._death: str | None = None
        self._stopping = False
        model, config = llm.model_config, llm.vllm_config
        self.info = EngineInfo(
            vocab_size=model.get_vocab_size(),
            max_model_len=model.max_model_len,
            eos_token_ids=_eos(model),
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
        loads = _Loads()
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
        """What the plugin's workers say that they use. Raises EngineDeadError."""
        self._require_life()
        from mla_serve.vllm_plugin.shared import read_decisions

        return await asyncio.to_thread(read_decisions)

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
        outputs = self._llm.generate(
            {"prompt_token_ids": request.prompt_token_ids}, _sampling(request.sampling), request.id, priority=request.priority
        )
        reader = _Reader(request)
        try:
            async for output in outputs:
                step = reader.step(output)
                if step is not None:
                    yield step
        except VllmDeadError as error:
            raise EngineDeadError(f"vLLM's engine core has ended: {error}") from error
        except EngineGenerateError as error:
            yield reader.failed(str(error.__cause__ or error))
        except ValueError as error:
            raise ValueError(str(error).splitlines()[0]) from error
        finally:
            await outputs.aclose()

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


def _build(arguments: Any, loads: _Loads) -> Any:
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


class _Loads:
    """The last snapshot of each of vLLM's engine cores, and what they have done in all."""

    def __init__(self) -> None:
        self.heard = time.monotonic()
        self.pages = 0
        self._cores: dict[int, Any] = {}
        self._prompt = self._generated = self._preempted = self._queries = self._hits = 0

    def begin(self) -> None:
        """A request is handed to an engine that may have been idle: silence counts from now."""
        self.heard = max(self.heard, time.monotonic())

    def record(self, core: int, scheduler: Any, iteration: Any) -> None:
        self.heard = time.monotonic()
        if scheduler is not None:
            self._cores[core] = scheduler
            self._queries += scheduler.prefix_cache_stats.queries
            self._hits += scheduler.prefix_cache_stats.hits
        if iteration is not None:
            self._prompt += iteration.num_prompt_tokens
            self._generated += iteration.num_generation_tokens
            self._preempted += iteration.num_preempted_reqs

    def stats(self, unfinished: int) -> Stats:
        """vLLM tells its load with each step, so an idle engine is known by having nothing unfinished."""
        cores = list(self._cores.values()) if unfinished else []
        usage = sum(core.kv_cache_usage for core in cores) / len(cores) if cores else 0.0
        return Stats(
            running=sum(core.num_running_reqs for core in cores),
            waiting=sum(core.num_waiting_reqs for core in cores),
            kv_cache_usage=usage,
            kv_pages_total=self.pages,
            kv_pages_free=round(self.pages * (1 - usage)),
            prompt_tokens=self._prompt,
            generation_tokens=self._generated,
            preemptions=self._preempted,
            prefix_queries=self._queries,
            prefix_hits=self._hits,
        )


class _Reader:
    """Turns one request's outputs, new tokens each, into Steps."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._count = 0
        self._timed = False

    def step(self, output: Any) -> Step | None:
        """None for an output without news."""
        completion = output.outputs[0]
        ids = list(completion.token_ids)
        reason = completion.finish_reason
        if not ids and reason is None:
            return None
        self._count += len(ids)
        sampling, request = self._request.sampling, self._request
        first = not self._timed
        self._timed = True
        return Step(
            id=request.id,
            token_ids=ids,
            prompt_tokens=len(request.prompt_token_ids),
            completion_tokens=self._count,
            logprobs=None if sampling.logprobs is None else _logprobs(ids, completion.logprobs or (), sampling.logprobs),
            finish_reason=reason if reason in (None, "stop", "length", "abort") else "error",
            error=None if reason in (None, "stop", "length", "abort") else f"vLLM ended it: {reason}",
            cached_tokens=output.num_cached_tokens or 0,
            prompt_logprobs=_prompt_logprobs(request, output.prompt_logprobs) if first else None,
            **(_times(output.metrics) if first else {}),
        )

    def failed(self, reason: str) -> Step:
        request = self._request
        return Step(request.id, [], len(request.prompt_token_ids), self._count, finish_reason="error", error=reason)


def _sampling(asked: Sampling) -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        max_tokens=asked.max_tokens,
        min_tokens=asked.min_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        min_p=asked.min_p,
        seed=asked.seed,
        stop_token_ids=list(asked.stop_token_ids),
        ignore_eos=asked.ignore_eos,
        logprobs=asked.logprobs,
        prompt_logprobs=asked.prompt_logprobs,
        logit_bias=dict(asked.logit_bias) or None,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        repetition_penalty=asked.repetition_penalty,
        structured_outputs=None if asked.structured is None else _structured(asked.structured),
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _structured(asked: Structured) -> Any:
    from vllm.sampling_params import StructuredOutputsParams

    match asked.kind:
        case "json_object":
            return StructuredOutputsParams(json_object=True)
        case "json_schema":
            return StructuredOutputsParams(json=asked.value)
        case "regex":
            return StructuredOutputsParams(regex=asked.value)
        case "choice":
            return StructuredOutputsParams(choice=json.loads(asked.value))


def _logprobs(ids: Sequence[int], told: Sequence[Mapping[int, Any]], n: int) -> list[TokenLogprobs]:
    """vLLM gives the chosen token beside the N likeliest, each with its rank."""
    return [_position(token_id, entries, n) for token_id, entries in zip(ids, told, strict=True)]


def _prompt_logprobs(request: Request, told: Sequence[Mapping[int, Any] | None] | None) -> list[TokenLogprobs] | None:
    n = request.sampling.prompt_logprobs
    if n is None or told is None:
        return None
    pairs = zip(request.prompt_token_ids[1:], told[1:], strict=True)
    return [_position(token_id, entries or {}, n) for token_id, entries in pairs]


def _position(token_id: int, entries: Mapping[int, Any], n: int) -> TokenLogprobs:
    ranked = sorted((entry.rank or 0, other, entry.logprob) for other, entry in entries.items())
    return TokenLogprobs(entries[token_id].logprob, [(other, logprob) for rank, other, logprob in ranked if rank <= n][:n])


def _times(metrics: Any) -> dict[str, float]:
    if metrics is None or not metrics.scheduled_ts:
        return {}
    return {
        "queue_seconds": metrics.scheduled_ts - metrics.queued_ts,
        "prefill_seconds": max(0.0, metrics.first_token_ts - metrics.scheduled_ts),
    }


def _eos(model: Any) -> list[int]:
    """The model's end tokens, of its generation config or else of its config."""
    found = model.try_get_generation_config().get("eos_token_id", getattr(model.hf_config, "eos_token_id", None))
    return list(found) if isinstance(found, list | tuple) else [] if found is None else [int(found)]
