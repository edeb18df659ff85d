"""What vLLM says about its load, kept for whoever asks."""

from __future__ import annotations

import time
from typing import Any

from mla_serve.engine.base import Stats

__all__ = ["Loads"]


class Loads:
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
