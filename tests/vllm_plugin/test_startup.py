"""What is checked and told while vLLM starts."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from mla_serve.errors import UserError
from mla_serve.selection import Fingerprint
from mla_serve.vllm_plugin.deployment import Deployment, Size
from mla_serve.vllm_plugin.probing import probe_at_start
from mla_serve.vllm_plugin.startup import check, expected_page_size, log_choices, reserve
from mla_serve.vllm_plugin.table import own_decisions
from tests.backends.fakes import PlanBound
from tests.selection.fakes import SMALL, Fake, a_decision, prefill, times
from tests.vllm_plugin.deploy import CPU, SIZE, config, deploy


def on_gpu(deployment: Deployment) -> Deployment:
    """As far as the page size is concerned."""
    deployment.device = type("Device", (), {"type": "cuda"})()  # type: ignore[assignment]
    return deployment


def test_a_page_that_the_pinned_kernel_does_not_take_is_one_sentence() -> None:
    """A page size that a person asked for, and a pin that has another."""
    deployment = deploy([Fake("of-64", page_sizes=(64,)), PlanBound(CPU)], pins=(("decode", "of-64"),))
    with pytest.raises(UserError) as error:
        check(deployment, config(16, asked=True), SMALL, None)
    assert "of-64 takes pages of 64 tokens, not 16" in str(error.value)
    assert str(error.value).endswith("remove the pin or choose another kernel, or leave out --block-size")


def test_the_page_is_the_one_that_the_winner_takes() -> None:
    deployment = on_gpu(deploy([Fake("of-32", page_sizes=(32,))]))
    assert expected_page_size(deployment, config(16), SMALL) == 32
    assert expected_page_size(deployment, config(16, asked=True), SMALL) == 16
    assert expected_page_size(deploy([Fake("of-32", page_sizes=(32,))]), config(16), SMALL) == 16  # a CPU's platform decides


def test_a_float8_cache_is_refused_where_no_kernel_takes_its_scale() -> None:
    deployment = on_gpu(deploy([Fake("plain")]))
    with pytest.raises(UserError, match=r"no kernel here but torch-mla, the last resort, reads a float8_e4m3fn cache"):
        check(deployment, config(64, asked=True), SMALL, "float8_e4m3fn")
    pinned = on_gpu(deploy([Fake("plain")], pins=(("decode", "plain"),)))
    with pytest.raises(UserError, match=r"plain takes no scale for a float8 cache; .* or leave out --kv-cache-dtype"):
        check(pinned, config(64, asked=True), SMALL, "float8_e4m3fn")
    scaled = on_gpu(deploy([Fake("scaled", takes_cache_scale=True)]))
    assert check(scaled, config(64, asked=True), SMALL, "float8_e4m3fn") == 64


def test_a_float8_cache_is_refused_on_a_cpu() -> None:
    with pytest.raises(UserError, match="on a CPU; leave out --kv-cache-dtype"):
        check(deploy([Fake("scaled", takes_cache_scale=True)]), config(), SMALL, "float8_e4m3fn")


def test_a_decision_file_of_another_host_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "decisions.json"
    mine = Fingerprint.here(CPU)
    other = replace(mine, device="NVIDIA H100", threads=None, sm_count=132, capability="9.0")
    theirs = a_decision(prefill(), other)
    path.write_text(json.dumps({"schema": 1, "decisions": [theirs.to_json()]}))
    with pytest.raises(UserError) as error:
        own_decisions(path, mine)
    assert "holds decisions for NVIDIA H100, and this is " in str(error.value)
    assert "mla-serve probe" in str(error.value)
    ours = a_decision(prefill(), mine)
    path.write_text(json.dumps({"schema": 1, "decisions": [theirs.to_json(), ours.to_json()]}))
    own_decisions(path, mine)
    with pytest.raises(UserError, match="cannot be read"):
        own_decisions(tmp_path / "none.json", mine)


def test_probing_measures_the_grid_once_and_the_table_tells_it(caplog: pytest.LogCaptureFixture) -> None:
    """Every layer asks; the first one's call measures, and pinned phases are left out."""
    size = Size(dtype="float32", layers=3, max_model_len=64, max_requests=2, max_tokens=64, host_lens=True)
    deployment = deploy([Fake("first"), Fake("second")], size, probe="missing", pins=(("prefill", "first"),))
    with caplog.at_level(logging.INFO, "vllm.mla_serve"):
        for _ in range(3):
            probe_at_start(deployment, SMALL, 16, context_rows=64, graphs=False)
        for _ in range(3):
            log_choices(deployment, SMALL, 16, context_rows=64, graphs=False)
    shapes = deployment.grid(SMALL, 16, 64, graphs=False)
    measured = [shape for shape in shapes if deployment.selector.measured(shape)]
    assert {shape.phase.value for shape in measured} == {"decode"}
    assert len(measured) == sum(shape.absorbed for shape in shapes)
    told = [record.message for record in caplog.records if record.name == "vllm.mla_serve"]
    assert [line.split(" in ")[0] for line in told[:1]] == [f"measured attention kernels for {len(measured)} shapes"]
    (table,) = told[1:]
    assert "runner-up" in table
    assert len([line for line in table.splitlines() if line.startswith("decode ")]) == len(measured)
    assert "pinned by prefill=first" in table


def test_nothing_is_measured_unless_asked_for() -> None:
    deployment = deploy([Fake("first")])
    probe_at_start(deployment, SMALL, 16, context_rows=64, graphs=False)
    assert not len(deployment.selector.table)


def test_graphs_double_the_decodes_of_the_grid() -> None:
    deployment = deploy([Fake("first")], SIZE)
    plain = deployment.grid(SMALL, 16, 64, graphs=False)
    both = deployment.grid(SMALL, 16, 64, graphs=True)
    assert set(plain) < set(both)
    assert {shape.graph for shape in both if shape.absorbed} == {False, True}


def test_what_kernels_need_is_allocated_while_the_model_is_loaded() -> None:
    """Once for all layers; what a step looks up later is there already."""
    one = Fake("one", capturable=True)
    deployment = deploy([one])
    for _ in range(3):
        reserve(deployment, SMALL, 16, None, context_rows=1024, graphs=True)
    made = one.calls["prepare"]
    assert made > 0
    assert one.calls["plan"] == made - 1, "each State planned once but the captured one"
    assert deployment.decisions() == []
    bound = deployment.bind(SMALL, 16, deployment.limits(1024))
    bound.prefill(1, 40, lse=False)
    bound.prefill(2, 40, lse=True)
    bound.context(1, 20, 60)
    bound.decode(3, 200, ragged=False)
    bound.decode(4, 400, ragged=False, graph=True)
    assert one.calls["prepare"] == made


def test_extensions_are_measured_with_kernels_that_take_mixtures() -> None:
    """Where short extensions are served absorbed: and what was measured is what they get."""
    even, mixed = Fake("even", even_queries=True), Fake("mixed")
    size = replace(SIZE, max_requests=2)
    deployment = deploy([even, mixed], size, probe="all", absorb_up_to=20, measure=times({"even": 1.0, "mixed": 2.0}))
    probe_at_start(deployment, SMALL, 16, context_rows=64, graphs=False)
    (shape,) = deployment.extensions(SMALL, 16)
    assert (shape.q_len, shape.kv_len) == (32, 256)
    decision = deployment.flexible.measured(shape)
    assert decision is not None
    assert decision.winner == "mixed"
    assert deploy([mixed], size, absorb_up_to=1).extensions(SMALL, 16) == []


def test_what_verifies_drafts_is_part_of_the_grid() -> None:
    shapes = deploy([Fake("one")], replace(SIZE, verified=3)).grid(SMALL, 16, 64, graphs=True)
    assert {shape.q_len for shape in shapes if shape.absorbed} == {1, 3}
