"""The server that `bench serve` starts ends with the benchmark, however that ends."""

from __future__ import annotations

import httpx
import pytest

from mla_serve.bench.serve import server
from mla_serve.demo import MODEL_DIR


@pytest.mark.timeout(120)
def test_an_error_under_load_ends_the_server_and_is_passed_on(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    urls = []

    def use() -> None:
        with server(MODEL_DIR, 1, lambda _: None, ("--num-pages", "2048")) as url:
            urls.append(url)
            assert httpx.get(f"{url}/health").status_code == 200
            raise RuntimeError("a client fails")

    with pytest.raises(RuntimeError, match="a client fails"):
        use()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{urls[0]}/health")
