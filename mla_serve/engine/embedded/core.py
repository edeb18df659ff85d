"""The engine without its process: a scheduler, a runner and a sampler, and the step that joins them."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from mla_serve.engine.base import EngineInfo, Request, Sampling, Stats, Step
from mla_serve.engine.embedded.config import ModelConfig
from mla_serve.engine.embedded.kv_cache import PageAllocator
from mla_serve.engine.embedded.limits import check_request
from mla_serve.engine.embedded.messages import EngineConfig
from mla_serve.engine.embedded.probing import PROBES, idle_probe
from mla_serve.engine.embedded.runner import Runner
from mla_serve.engine.embedded.sampler import describe, sample
from mla_serve.engine.embedded.scheduler import Scheduler
from mla_serve.engine.embedded.sequence import Sampled, Sequence, Work
from mla_serve.engine.embedded.side_thread import Job
from mla_serve.engine.embedded.structured import Grammars, NewMatcher
from mla_serve.errors import UserError
from mla_serve.selection.idle import IdleProbe
from mla_serve.selection.invariant import CHUNK
from mla_serve.selection.isolated import Isolated
from mla_serve.selection.selector import Selector
from mla_serve.selection.table import DecisionTable, default_table_path
from mla_serve.shapes import DType

__all__ = ["EngineConfig", "EngineCore"]

logger = logging.getLogger(__name__)

USUAL_PAGE_SIZE = {False: 16, True: 64}  # on a CPU, on a GPU
DTYPES: tuple[DType, ...] = ("float32", "bfloat16", "float16")


class _Compiling(NamedTuple):
    """A request whose grammar is being compiled; `arrived` by the monotonic clock."""

    request: Request
    job: Job[NewMatcher]
    arrived: float


class EngineCore:
    """Runs requests step by step, in this thread. Raises UserError if the model cannot be loaded as `config` asks."""

    def __init__(self, config: EngineConfig) -> None:
        _check(config)
        device = _device(config.device)
        model = ModelConfig.from_dir(config.model)
        max_model_len = config.max_model_len or model.max_position
        self._alone = config.policy == "batch-invariant"
        max_requests = min(config.max_requests, config.max_tokens - (CHUNK if self._alone else 0))
        if max_requests < 1:
            raise UserError(
                f"the batch-invariant policy computes prompts in chunks of {CHUNK} tokens beside what decodes, so a step must "
                f"take more than that; max_tokens is {config.max_tokens}"
            )
        # Pages that may hold NaN are zeroed before anyone else gets them: a clean pool.
        self.measurer = Isolated(device, clean_pool=True, seconds=config.kernel_timeout)
        self.selector = Selector(
            device,
            policy=cast(Literal["measured", "availability", "batch-invariant"], config.policy),
            pins=config.pins,
            table=DecisionTable.load(Path(config.decisions) if config.decisions else default_table_path()),
            on_demand=config.probe == "on-demand",
            layers=model.num_layers,
            clean_pool=True,
            measurer=self.measurer,
        )
        dtype = None if config.dtype == "auto" else cast(DType, config.dtype)
        page_size = config.page_size or self._page_size(config, model, dtype)
        self.runner = Runner(
            Path(config.model),
            dtype=dtype,
            device=device,
            page_size=page_size,
            num_pages=config.num_pages,
            max_requests=max_requests,
            max_tokens=config.max_tokens,
            max_model_len=max_model_len,
            selector=self.selector,
            context_chunk=config.context_chunk,
        )
        _bind_pins(self.runner, config.pins)
        # Latents of another request's generated tokens have the bits of a decode: not what this one's prompt would get.
        pages = PageAllocator(self.runner.num_pages, page_size, prefix_cache=config.prefix_cache and not self._alone)
        self.scheduler = Scheduler(
            pages, max_requests=max_requests, max_tokens=config.max_tokens, eos_token_ids=model.eos_token_ids,
            chunk=CHUNK if self._alone else None,
        )  # fmt: skip
        self.info = EngineInfo(
            vocab_size=model.vocab_size,
            max_model_len=min(max_model_len, pages.num_pages * page_size),
            eos_token_ids=list(model.eos_token_ids),
            dtype=self.runner.dtype,
            device=str(device),
        )
        self.grammars = Grammars(config.model, vocab_size=model.vocab_size, end_token_ids=model.eos_token_ids)
        self._compiling: dict[str, _Compiling] = {}
        self.prober: IdleProbe | None = None
        if config.probe == "idle" and config.policy == "measured":
            self.prober = idle_probe(
                self.runner, self.selector, self.measurer,
                pins=config.pins, max_model_len=max_model_len, max_requests=max_requests, max_tokens=config.max_tokens,
            )  # fmt: skip

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to compute."""
        return self.scheduler.has_work

    @property
    def compiling(self) -> bool:
        """Whether requests wait for their grammars: call `take_compiled` soon."""
        return bool(self._compiling)

    def add(self, request: Request) -> None:
        """Queues a request, or has its grammar compiled first. Raises ValueError if it can never run or its id is in use."""
        if self.prober is not None:
            self.prober.pause()  # before anything else: it has the cores that this request needs
        check_request(request, self.info)
        if request.id in self._compiling or self.scheduler.find(request.id) is not None:
            raise ValueError(f"a request with the id {request.id!r} is running; give each its own")
        structured = request.sampling.structured
        if structured is None:
            self.scheduler.add(request)
        else:
            self._compiling[request.id] = _Compiling(request, self.grammars.compile(structured), time.monotonic())

    def take_compiled(self) -> dict[str, str]:
        """Queues the requests whose grammars are compiled by now; request id and sentence of those that cannot be followed."""
        refused: dict[str, str] = {}
        for name, (request, job, arrived) in list(self._compiling.items()):
            try:
                matcher = self.grammars.finished(job)
            except ValueError as error:
                refused[name] = str(error)
            else:
                if matcher is None:
                    continue
                self.scheduler.add(request, matcher=matcher, arrived=arrived)
            del self._compiling[name]
        return refused

    def abort(self, request_id: str) -> Step | None:
        """Ends a request and frees its pages; its last Step, or None if there is no such request."""
        if (held := self._compiling.pop(request_id, None)) is not None:
            held.job.cancelled = True
            return Step(request_id, [], len(held.request.prompt_token_ids), 0, finish_reason="abort")
        seq = self.scheduler.find(request_id)
        return None if seq is None else self.scheduler.abort(seq)

    def rest(self) -> None:
        """To be called now and then while there is no work: probing goes on, and what it has found takes effect.

        Kernels change here and nowhere else, so that no request's do.
        """
        assert not self.has_work, "kernels change between requests only"
        if self.prober is None:
            return
        if self.selector.adopt(self.prober.rest()):
            self.runner.bound.refresh()
        if self.prober.done:
            self.prober = None

    def close(self) -> None:
        """Ends the process that measures, where there is one."""
        if self.prober is not None:
            self.prober.stop()
        self.measurer.close()

    def step(self) -> list[Step]:
        """Computes one batch and returns what is new: at most one Step per request."""
        works = self.scheduler.schedule()
        fill = self.grammars.fill(work.seq for work in works if work.samples)
        works, logits, failed = self._run(works)
        logits = self._tell_prompts(works, logits)
        masks, faults = fill.take()
        sampling = [work.seq for work in works if work.samples]
        sampled: list[Sampled | str | None] = [*sample(logits, sampling, masks)]
        if faults:
            sampled = [faults.get(seq, pick) for seq, pick in zip(sampling, sampled, strict=True)]
        return failed + self.scheduler.advance(works, sampled)

    def stats(self) -> Stats:
        scheduler, pages = self.scheduler, self.scheduler.pages
        return Stats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + len(self._compiling),
            kv_cache_usage=1 - pages.num_free / pages.num_pages,
            kv_pages_total=pages.num_pages,
            kv_pages_free=pages.num_free,
            prompt_tokens=scheduler.prompt_tokens,
            generation_tokens=scheduler.generated_tokens,
            preemptions=scheduler.preemptions,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
        )

    def _page_size(self, config: EngineConfig, model: ModelConfig, dtype: DType | None) -> int:
        """Tokens per page where nobody says: what the fastest decode takes, as far as that is known without measuring."""
        if config.policy == "batch-invariant" or config.probe == "on-demand":
            return USUAL_PAGE_SIZE[self.selector.device.type == "cuda"]
        return self.selector.page_size(model.dims, dtype=dtype or model.dtype or "float32", batch=config.max_requests)

    def decisions(self) -> list[dict[str, Any]]:
        """The kernel decisions in force, as `Decision.to_json` gives them."""
        return [decision.to_json() for decision in self.runner.bound.decisions()]

    def _tell_prompts(self, works: list[Work], logits: Tensor) -> Tensor:
        """Keeps the log-probabilities of the prompts that ask for theirs; of `logits`, the rows to sample from."""
        told = [(work, work.told) for work in works]
        if not any(positions for _, positions in told):
            return logits
        at, keep = 0, []
        for work, positions in told:
            seq, end = work.seq, at + len(positions)
            if positions:
                follow = torch.tensor(seq.token_ids[positions.start + 1 : positions.stop + 1], device=logits.device)
                counts = [seq.request.sampling.prompt_logprobs or 0] * len(positions)
                seq.prompt_logprobs += describe(logits[at:end], follow, counts)
            keep += [end] * work.samples
            at = end + work.samples
        return logits[keep]

    def _run(self, works: list[Work]) -> tuple[list[Work], Tensor, list[Step]]:
        """The works that were computed, their logits, and the last Steps of requests whose work cannot be computed.

        Under the batch-invariant policy each work is computed alone: equal bits in any company by construction, at the price
        of batching.
        If the batch as a whole raises, each work is tried alone: computing twice writes the same latents. A fault of the
        accelerator, or a step in which not even a single token of ours can be computed, is the engine's own end and is raised.
        """
        if pages := self.scheduler.take_suspect_pages():
            self.runner.zero_pages(pages)
        if self._alone:  # projections and experts, too, sum in an order that depends on the rows of a step
            return self._run_each(works)
        try:
            return works, self.runner.run(works), []
        except torch.AcceleratorError:
            raise
        except Exception:
            logger.exception("a step of %d requests failed; each is tried alone", len(works))
        return self._run_each(works)

    def _run_each(self, works: list[Work]) -> tuple[list[Work], Tensor, list[Step]]:
        done: list[Work] = []
        rows: list[Tensor] = []
        errors: list[tuple[Work, Exception]] = []
        for work in works:
            try:
                rows.append(self.runner.run([work]))
                done.append(work)
            except torch.AcceleratorError:
                raise
            except Exception as error:
                logger.exception("request %s failed", work.seq.id)
                errors.append((work, error))
        failed = [self.scheduler.fail(work.seq, f"this request could not be computed: {error}") for work, error in errors]
        if errors and not done:
            self._try_one_token()
        return done, torch.cat(rows) if rows else torch.empty(0, self.info.vocab_size), failed

    def _try_one_token(self) -> None:
        """Computes one token for nobody; raises what it raises. Where every request fails, this tells theirs from our fault."""
        pages = self.scheduler.pages.allocate(1)
        canary = Sequence.of(Request("canary", [0], Sampling(max_tokens=1)))
        canary.pages = pages
        try:
            self.runner.run([Work(canary, 0, 1)])
        finally:
            self.scheduler.pages.free(pages)


def _bind_pins(runner: Runner, pins: Mapping[str, str]) -> None:
    """Binds a small shape of every pinned phase: a kernel that cannot run this model is told now, not to whom needs it first.

    A pin of prefill is also context's where that has none. Raises PinError, a UserError.
    """
    if "prefill" in pins:
        runner.bound.prefill(1, 1, lse=False)
    if {"prefill", "context"} & pins.keys():
        runner.bound.context(1, 1, 1)
    if "decode" in pins:
        runner.bound.decode(1, 1, ragged=False)


def _check(config: EngineConfig) -> None:
    """Raises UserError for settings that no model could be served with."""
    if config.dtype != "auto" and config.dtype not in DTYPES:
        raise UserError(f"there is no dtype {config.dtype!r} to serve in; use auto, {', '.join(DTYPES)}")
    if config.probe not in PROBES:
        raise UserError(f"there is no way to probe {config.probe!r}; use {', '.join(PROBES)}")
    for name in ("max_model_len", "max_requests", "max_tokens", "page_size", "num_pages", "context_chunk", "threads"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise UserError(f"{name} must be at least 1, got {value}")


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"there is no device {name!r}; use auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        raise UserError(f"this torch cannot compute on {name!r}; use auto or cpu, or install torch for that device")
    return device
