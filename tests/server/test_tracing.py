"""Spans arrive at a real OTLP receiver on loopback, joined to the client's trace, without a word of text."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.server.conftest import MODEL, start_server

TRACE = "0af7651916cd43dd8448eb211c80319c"


class Collector(ThreadingHTTPServer):
    """Keeps every span that it is sent, as (path of the request, resource, span)."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.paths: set[str] = set()
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        message = ExportTraceServiceRequest.FromString(body)
        self.server.paths.add(self.path)
        self.server.spans += [s for r in message.resource_spans for scope in r.scope_spans for s in scope.spans]
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_span_per_request(checkpoint: Path, tmp_path: Path, collector: Collector) -> None:
    endpoint = f"http://127.0.0.1:{collector.server_address[1]}"
    server = start_server(tmp_path / "server.log", checkpoint, otlp_endpoint=endpoint)
    try:
        server.wait()
        headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
        body = {"prompt": "a secret", "max_tokens": 3, "ignore_eos": True}
        assert server.post("/v1/completions", body, headers=headers).status_code == 200
        assert server.post("/v1/completions", {"prompt": 5}).status_code == 400
        assert server.get("/health").status_code == 200
    finally:
        assert server.stop() == 0, server.output
    assert collector.paths == {"/v1/traces"}
    assert [span.name for span in collector.spans] == ["POST /v1/completions"] * 2
    good, bad = collector.spans
    assert good.trace_id.hex() == TRACE
    assert bad.trace_id.hex() != TRACE
    told = [{a.key: a.value.string_value or a.value.int_value for a in span.attributes} for span in (good, bad)]
    assert told[0] == {
        "http.request.method": "POST", "http.route": "/v1/completions", "http.response.status_code": 200,
        "gen_ai.request.model": MODEL, "gen_ai.usage.input_tokens": 8, "gen_ai.usage.output_tokens": 3,
    }  # fmt: skip
    assert told[1]["http.response.status_code"] == 400
    assert all("secret" not in str(span) for span in collector.spans)
