"""Writes deploy/grafana/mla_serve.json: the panels of vLLM's dashboards over our metric names, and the kernels in force."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

OUT = Path(__file__).resolve().parents[1] / "deploy/grafana/mla_serve.json"
MODEL = 'model_name="$model_name"'


def quantiles(name: str) -> list[tuple[str, str]]:
    """P50 to P99 of a histogram, and its mean."""
    rate = f"mla_serve:{name}"
    buckets = f"sum by (le) (rate({rate}_bucket{{{MODEL}}}[$__rate_interval]))"
    found = [(f"P{q}", f"histogram_quantile(0.{q}, {buckets})") for q in (50, 95, 99)]
    mean = f"rate({rate}_sum{{{MODEL}}}[$__rate_interval]) / rate({rate}_count{{{MODEL}}}[$__rate_interval])"
    return [*found, ("mean", mean)]


def rate(name: str) -> str:
    return f"rate(mla_serve:{name}{{{MODEL}}}[$__rate_interval])"


ENDED = f"sum by (finished_reason) (increase(mla_serve:request_success_total{{{MODEL}}}[$__rate_interval]))"
TOKENS = [("prompt tokens/s", rate("prompt_tokens_total")), ("generated/s", rate("generation_tokens_total"))]
HITS = f"{rate('prefix_cache_hits_total')} / {rate('prefix_cache_queries_total')}"
PANELS: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("End-to-end request latency", "s", quantiles("e2e_request_latency_seconds")),
    ("Token throughput", "short", TOKENS),
    ("Time to first token", "s", quantiles("time_to_first_token_seconds")),
    ("Inter-token latency", "s", quantiles("inter_token_latency_seconds")),
    ("Time per output token", "s", quantiles("request_time_per_output_token_seconds")),
    (
        "Scheduler",
        "short",
        [("running", f"mla_serve:num_requests_running{{{MODEL}}}"), ("waiting", f"mla_serve:num_requests_waiting{{{MODEL}}}")],
    ),
    ("Latent cache in use", "percentunit", [("pages", f"mla_serve:kv_cache_usage_perc{{{MODEL}}}")]),
    ("Prefix cache hits", "percentunit", [("hits", HITS)]),
    ("Queue time", "s", quantiles("request_queue_time_seconds")),
    ("Prefill and decode time", "s", [
        ("prefill", f"rate(mla_serve:request_prefill_time_seconds_sum{{{MODEL}}}[$__rate_interval])"),
        ("decode", f"rate(mla_serve:request_decode_time_seconds_sum{{{MODEL}}}[$__rate_interval])"),
    ]),
    ("Finished requests", "short", [("{{finished_reason}}", ENDED)]),
    ("Preemptions", "short", [("preemptions/s", rate("num_preemptions_total"))]),
]  # fmt: skip


def panel(index: int, title: str, unit: str, targets: list[tuple[str, str]]) -> dict[str, Any]:
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": title,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": {"h": 8, "w": 12, "x": 12 * (index % 2), "y": 8 * (index // 2)},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [{"refId": chr(65 + n), "expr": expr, "legendFormat": legend} for n, (legend, expr) in enumerate(targets)],
    }


def kernels(index: int) -> dict[str, Any]:
    """A table: which kernel serves which bucket."""
    return {
        "id": index + 1,
        "type": "table",
        "title": "Attention kernels in force",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": {"h": 12, "w": 24, "x": 0, "y": 8 * ((index + 1) // 2)},
        "targets": [{"refId": "A", "expr": "mla_serve:kernel_selected_info", "format": "table", "instant": True}],
        "transformations": [
            {"id": "organize", "options": {"excludeByName": {"Time": True, "Value": True, "__name__": True, "job": True}}}
        ],
    }


def dashboard() -> dict[str, Any]:
    variables = [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
        {
            "name": "model_name", "type": "query", "label": "Model", "refresh": 2,
            "datasource": {"type": "prometheus", "uid": "${datasource}"},
            "query": "label_values(mla_serve:num_requests_running, model_name)",
        },
    ]  # fmt: skip
    return {
        "title": "mla_serve",
        "uid": "mla-serve",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": variables},
        "panels": [*(panel(index, *one) for index, one in enumerate(PANELS)), kernels(len(PANELS))],
    }


if __name__ == "__main__":
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(dashboard(), indent=1) + "\n")
