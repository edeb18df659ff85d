"""What never becomes a request: heads without end, before any key has been asked for."""

from __future__ import annotations

import socket

import httpx
import pytest

from mla_serve.server.http import HEAD_LIMIT
from tests.server.conftest import Server

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    "begin",
    [b"GET /", HEAD + b"X-Endless: ", HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nX-Trailer: "],
    ids=["path", "header", "trailer"],
)
def test_a_head_without_end_is_cut(server: Server, begin: bytes) -> None:
    url = httpx.URL(server.url)
    with socket.create_connection((url.host, url.port or 80), timeout=30) as connection:
        connection.sendall(begin)
        with pytest.raises(OSError, match=r"reset|Broken pipe"):
            connection.sendall(b"a" * (100 * HEAD_LIMIT))  # what the sockets' own buffers take is far less
    assert server.get("/health").status_code == 200


def test_heads_and_bodies_below_the_bound_pass(server: Server) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as client:  # one connection for all
        for _ in range(5):
            assert client.get("/health", headers={"X-Long": "a" * 50_000}).status_code == 200
            body = {"prompt": "a", "max_tokens": 1, "user": "x" * (8 * HEAD_LIMIT)}
            assert client.post("/v1/completions", json=body).status_code == 200
