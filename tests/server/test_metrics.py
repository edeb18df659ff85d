from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families as parse

from mla_serve.engine.base import Stats
from mla_serve.selection.decision import Decision
from mla_serve.selection.fingerprint import Fingerprint
from mla_serve.server.metrics import Metrics
from tests.selection.fakes import a_decision, decode, prefill
from tests.server.conftest import MODEL, Server

HERE = Fingerprint("a CPU", "2.13.0", threads=2)
STATS = Stats(
    running=3, waiting=2, kv_cache_usage=0.25, kv_pages_total=8, kv_pages_free=6, prompt_tokens=700, generation_tokens=40,
    preemptions=1, prefix_queries=900, prefix_hits=300,
)  # fmt: skip
ODD = 'a"b\\c\n{x="1"} 7'


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Name and values of the labels, in the labels' alphabetical order, to value."""
    return {
        (s.name, *(value for _, value in sorted(s.labels.items()))): s.value for family in parse(text) for s in family.samples
    }


def rendered(*decisions: Decision) -> str:
    return Metrics(MODEL).render(STATS, [decision.to_json() for decision in decisions]).decode()


def test_names_are_those_of_vllm() -> None:
    """Those of the engine; the times are the server's, and none has been taken."""
    found = {key: value for key, value in samples(rendered()).items() if value and not key[0].endswith("_created")}
    assert found == {
        ("mla_serve:num_requests_running", MODEL): 3,
        ("mla_serve:num_requests_waiting", MODEL): 2,
        ("mla_serve:kv_cache_usage_perc", MODEL): 0.25,
        ("mla_serve:prompt_tokens_total", MODEL): 700,
        ("mla_serve:generation_tokens_total", MODEL): 40,
        ("mla_serve:num_preemptions_total", MODEL): 1,
        ("mla_serve:prefix_cache_queries_total", MODEL): 900,
        ("mla_serve:prefix_cache_hits_total", MODEL): 300,
    }


def test_kernels_are_told_by_bucket() -> None:
    first = a_decision(prefill(), HERE, winner=ODD, probe_seconds=1.5)
    second = a_decision(decode(), HERE)
    found = samples(rendered(first, second))
    assert found["mla_serve:kernel_selected_info", str(first.bucket), ODD, "false", "prefill"] == 1
    assert found["mla_serve:kernel_selected_info", str(second.bucket), "fake", "false", "decode"] == 1
    seconds = {key: value for key, value in found.items() if key[0] == "mla_serve:kernel_probe_seconds"}
    assert seconds == {("mla_serve:kernel_probe_seconds", str(first.bucket), "prefill"): 1.5}


def test_each_scrape_shows_what_is_in_force_now() -> None:
    metrics = Metrics(MODEL)
    for winner in ("old", "new"):
        body = metrics.render(STATS, [a_decision(prefill(), HERE, winner=winner).to_json()])
        kernels = [key[2] for key in samples(body.decode()) if key[0].endswith("selected_info")]
        assert kernels == [winner]


def test_a_server_counts_its_tokens(server: Server) -> None:
    before = samples(server.get("/metrics").text)
    server.complete(prompt="abc", max_tokens=4, ignore_eos=True)
    openmetrics = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"}
    response = server.get("/metrics", headers=openmetrics)
    assert response.headers["content-type"].startswith("text/plain")
    after = samples(response.text)
    for name, more in (("prompt_tokens_total", 3), ("generation_tokens_total", 4)):
        assert after[f"mla_serve:{name}", MODEL] - before[f"mla_serve:{name}", MODEL] == more
    phases = {key[4] for key in after if key[0] == "mla_serve:kernel_selected_info"}
    assert {"prefill", "decode"} <= phases


def test_a_request_is_timed_under_the_names_of_vllm(server: Server) -> None:
    before = samples(server.get("/metrics").text)
    server.complete(prompt="abc", max_tokens=4, ignore_eos=True)
    after = samples(server.get("/metrics").text)

    def more(name: str) -> float:
        key = (f"mla_serve:{name}", MODEL)
        return after[key] - before[key]

    for name in (
        "time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
        "request_prefill_time_seconds", "request_decode_time_seconds", "request_inference_time_seconds",
        "request_time_per_output_token_seconds", "request_prompt_tokens", "request_generation_tokens",
    ):  # fmt: skip
        assert more(f"{name}_count") == 1, name
    assert (more("request_prompt_tokens_sum"), more("request_generation_tokens_sum")) == (3, 4)
    assert more("inter_token_latency_seconds_count") == 3
    assert 0 < more("time_to_first_token_seconds_sum") <= more("e2e_request_latency_seconds_sum")
    ended = ("mla_serve:request_success_total", "length", MODEL)
    assert after[ended] - before[ended] == 1
