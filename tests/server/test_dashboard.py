"""The dashboard asks for metrics that the server has: every name in its queries is in a real scrape."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.server.conftest import Server

DASHBOARD = Path(__file__).resolve().parents[2] / "deploy/grafana/mla_serve.json"


def test_every_metric_of_the_dashboard_is_scraped(server: Server) -> None:
    server.complete(prompt="abc", max_tokens=3, ignore_eos=True)
    scraped = set(re.findall(r"^(mla_serve:[a-z0-9_]+)\{", server.get("/metrics").text, flags=re.M))
    queries = [target["expr"] for panel in json.loads(DASHBOARD.read_text())["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"mla_serve:[a-z0-9_]+", query)}
    assert len(asked) >= 20
    assert asked <= scraped
