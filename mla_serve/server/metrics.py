"""What Prometheus reads: the engine's load under vLLM's names after `mla_serve:`, and which kernel serves which bucket.

A registry of its own per application. Figures are the engine's own, asked for at each scrape, so they never disagree with
`/load` and `/attention/decisions`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mla_serve.engine.base import Stats
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
)


class EngineMetrics(Collector):
    """Collects from the last snapshot that `render` was given; families are `mla_serve:` and the names above."""

    def __init__(self, model_name: str) -> None:
        self._model = model_name
        self._stats: Stats | None = None
        self._decisions: Sequence[dict[str, Any]] = ()
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def render(self, stats: Stats, decisions: Sequence[dict[str, Any]]) -> bytes:
        """The exposition, of `CONTENT_TYPE`."""
        self._stats, self._decisions = stats, decisions
        return generate_latest(self.registry)

    def collect(self) -> Iterable[Metric]:
        if self._stats is None:  # when the registry asks for the names
            return
        for name, field, text in _GAUGES:
            gauge = GaugeMetricFamily(f"mla_serve:{name}", text, labels=["model_name"])
            gauge.add_metric([self._model], getattr(self._stats, field))
            yield gauge
        for name, field, text in _COUNTERS:
            counter = CounterMetricFamily(f"mla_serve:{name}", text, labels=["model_name"])
            counter.add_metric([self._model], getattr(self._stats, field))
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
        for decision in self._decisions:
            bucket = Bucket.from_json(decision["bucket"])
            phase, name = bucket.shape.phase.value, str(bucket)
            selected.add_metric([phase, name, decision["winner"], "true" if decision["padding"] else "false"], 1)
            if decision.get("probe_seconds") is not None:
                seconds.add_metric([phase, name], decision["probe_seconds"])
        yield selected
        yield seconds
