"""What Prometheus reads: load, tokens and times under vLLM's names after `mla_serve:`, and which kernel serves which bucket.

A registry of its own per application. Gauges and counters are the engine's own, asked for at each scrape, so they never
disagree with `/load` and `/attention/decisions`; times are the server's, taken as each request's Steps arrive.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mla_serve.engine.base import Stats, Step
from mla_serve.shapes import Bucket

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""The plain form, whatever a scraper likes best: OpenMetrics would turn the colon of our names into an underscore."""

_GAUGES = (
    ("num_requests_running", "running", "Requests in the batch."),
    ("num_requests_waiting", "waiting", "Requests that wait for room in the batch."),
    ("kv_cache_usage_perc", "kv_cache_usage", "Pages of the latent cache in use, as a fraction: 1 is all of them."),
)
_COUNTERS = (
    ("prompt_tokens", "prompt_tokens", "Prompt tokens processed."),
    ("generation_tokens", "generation_tokens", "Tokens generated."),
    ("num_preemptions", "preemptions", "Requests put back to wait, their pages taken by others."),
    ("prefix_cache_queries", "prefix_queries", "Prompt tokens looked up in the prefix cache."),
    ("prefix_cache_hits", "prefix_hits", "Prompt tokens found in the prefix cache."),
)
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
_PER_TOKEN = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
_LONG = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = tuple(1 << n for n in range(18))
_TIMES = (
    ("time_to_first_token_seconds", _TTFT, "From a request's arrival to its first token."),
    ("inter_token_latency_seconds", _PER_TOKEN, "From one token to the next."),
    ("request_time_per_output_token_seconds", _PER_TOKEN, "A request's mean time per token after the first."),
    ("e2e_request_latency_seconds", _LONG, "From a request's arrival to its last token."),
    ("request_queue_time_seconds", _LONG, "From a request's arrival in the engine to its first step."),
    ("request_prefill_time_seconds", _LONG, "From a request's first step to its first token."),
    ("request_decode_time_seconds", _LONG, "From a request's first token to its last."),
    ("request_inference_time_seconds", _LONG, "From a request's first step to its last token."),
    ("request_prompt_tokens", _TOKENS, "Prompt tokens of a request."),
    ("request_generation_tokens", _TOKENS, "Tokens that a request generated."),
)


class Metrics:
    """Everything under `/metrics` of one application."""

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._engine = _EngineCollector(model_name)
        self._registry.register(self._engine)
        self._times = {
            name: Histogram(f"mla_serve:{name}", text, ["model_name"], buckets=buckets, registry=self._registry).labels(
                model_name
            )
            for name, buckets, text in _TIMES
        }
        success = Counter(
            "mla_serve:request_success", "Requests that ended by themselves.", ["model_name", "finished_reason"],
            registry=self._registry,
        )  # fmt: skip
        self._success = {reason: success.labels(model_name, reason) for reason in ("stop", "length")}

    def watch(self) -> RequestWatch:
        """A clock for one engine request, which begins now."""
        return RequestWatch(self._times, self._success)

    def render(self, stats: Stats, decisions: Sequence[dict[str, Any]]) -> bytes:
        """The exposition, of `CONTENT_TYPE`."""
        self._engine.stats, self._engine.decisions = stats, decisions
        return generate_latest(self._registry)


class RequestWatch:
    """Turns the arrival of one request's Steps into observations."""

    def __init__(self, times: dict[str, Histogram], success: dict[str, Counter]) -> None:
        self._times, self._success = times, success
        self._begin = time.perf_counter()
        self._first = self._last = 0.0
        self._prefill = 0.0

    def step(self, step: Step) -> None:
        now = time.perf_counter()
        fresh = len(step.token_ids)
        if not self._first and fresh:
            self._first = self._last = now
            self._times["time_to_first_token_seconds"].observe(now - self._begin)
            if step.queue_seconds is not None and step.prefill_seconds is not None:
                self._prefill = step.prefill_seconds
                self._times["request_queue_time_seconds"].observe(step.queue_seconds)
                self._times["request_prefill_time_seconds"].observe(step.prefill_seconds)
        elif fresh:
            each = (now - self._last) / fresh  # tokens that came together have no times of their own
            for _ in range(fresh):
                self._times["inter_token_latency_seconds"].observe(each)
            self._last = now

    def finish(self, reason: str, prompt_tokens: int, tokens: int) -> None:
        """The request ended by itself, for `reason`, after so many tokens."""
        decode = self._last - self._first
        if tokens > 1:
            self._times["request_time_per_output_token_seconds"].observe(decode / (tokens - 1))
        self._times["e2e_request_latency_seconds"].observe(time.perf_counter() - self._begin)
        self._times["request_decode_time_seconds"].observe(decode)
        self._times["request_inference_time_seconds"].observe(self._prefill + decode)
        self._times["request_prompt_tokens"].observe(prompt_tokens)
        self._times["request_generation_tokens"].observe(tokens)
        self._success[reason].inc()


class _EngineCollector(Collector):
    """Collects from the last snapshot that it was given; nothing before the first, when the registry asks for the names."""

    def __init__(self, model_name: str) -> None:
        self._model = model_name
        self.stats: Stats | None = None
        self.decisions: Sequence[dict[str, Any]] = ()

    def collect(self) -> Iterable[Metric]:
        if self.stats is None:
            return
        for name, field, text in _GAUGES:
            gauge = GaugeMetricFamily(f"mla_serve:{name}", text, labels=["model_name"])
            gauge.add_metric([self._model], getattr(self.stats, field))
            yield gauge
        for name, field, text in _COUNTERS:
            counter = CounterMetricFamily(f"mla_serve:{name}", text, labels=["model_name"])
            counter.add_metric([self._model], getattr(self.stats, field))
            yield counter
        yield from self._kernels()

    def _kernels(self) -> Iterable[Metric]:
        selected = GaugeMetricFamily(
            "mla_serve:kernel_selected_info", "1 for the kernel in force for a bucket.",
            labels=["phase", "bucket", "kernel", "padded"],
        )  # fmt: skip
        seconds = GaugeMetricFamily(
            "mla_serve:kernel_probe_seconds",
            "Seconds that measuring a bucket took.",
            labels=["phase", "bucket"],
        )
        for decision in self.decisions:
            bucket = Bucket.from_json(decision["bucket"])
            phase, name = bucket.shape.phase.value, str(bucket)
            selected.add_metric([phase, name, decision["winner"], "true" if decision["padding"] else "false"], 1)
            if decision.get("probe_seconds") is not None:
                seconds.add_metric([phase, name], decision["probe_seconds"])
        yield selected
        yield seconds
