"""`bench attention` on a CPU: rows, fields, verdicts; what a wrong, a crashing and a refused contender come to."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla_serve.bench.attention import RUN_ALONE, Bench, bench
from mla_serve.bench.attention_contenders import OWN, kernels
from mla_serve.bench.attention_peers import PeerCall, load_peers
from mla_serve.bench.attention_rows import FIELDS, Row
from mla_serve.bench.grids import Case
from mla_serve.errors import UserError
from mla_serve.selection import Selector
from mla_serve.selection.inputs import Call
from mla_serve.selection.timing import Effort, Part, Trial
from mla_serve.shapes import AttentionShape, MLADims

CPU = torch.device("cpu")
DIMS = MLADims(heads=2, nope=16, rope=8, v=16, latent=32)
PREFILL = Case.uniform(AttentionShape.prefill(DIMS, batch=2, q_len=9, dtype="float32", lse=False))
CONTEXT = Case.uniform(AttentionShape.context(DIMS, batch=2, q_len=3, kv_len=9, dtype="float32"))
DECODE = Case.uniform(AttentionShape.decode(DIMS, batch=3, kv_len=20, dtype="float32", page_size=8))
RAGGED = Case(
    AttentionShape.decode(DIMS, batch=3, kv_len=14, dtype="float32", page_size=8, q_len=2, ragged=True), (2, 2, 2), (36, 3, 3)
)
PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"


def clock(trial: Trial, part: Part) -> float:
    """Times of ours, in ms; the kernel has run all the same."""
    assert isinstance(trial, PeerCall)
    trial.run() if part == "run" else trial.plan()
    return {"chosen": 1.0, "torch-mla": 1.01, "near": 1.015, "far": 2.0}.get(trial.name, 3.0)


def a_bench(*peers: Any, **more: Any) -> Bench:
    selector = Selector(CPU, layers=RUN_ALONE, clean_pool=True)
    return Bench(selector, peers, measure=clock, effort=Effort(2, 2, plans=1), **more)


def peer(*calls: PeerCall) -> Any:
    return SimpleNamespace(__name__="peers.a_peer", calls=lambda shape, call: iter(calls))


def by_name(rows: list[Row], name: str) -> Row:
    return next(row for row in rows if row.name == name)


@pytest.mark.parametrize("case", [PREFILL, CONTEXT, DECODE, RAGGED], ids=["prefill", "context", "decode", "ragged"])
def test_a_row_each_with_all_its_fields(case: Case) -> None:
    rows = a_bench().rows(case)
    assert rows[0].name == "chosen"
    assert str(rows[0].kernel).partition("+")[0] in {row.name for row in rows[1:]}
    assert rows[0].policy == "availability"
    timed = [row for row in rows if row.us is not None]
    assert len(timed) > 1
    for row in rows:
        data = row.to_json()
        assert set(FIELDS) <= data.keys()
        assert json.loads(json.dumps(data)) == json.loads(json.dumps(data, allow_nan=False))
        assert data["ragged"] is case.ragged
        assert data["page"] == case.shape.page_size
        assert data["floor_us"] > 0
        if row.us is None:
            assert row.verdict == "unsupported"
            assert row.reason
        else:
            assert row.error is not None
            assert row.error < 1e-5
            assert (row.lse_error is not None) or not case.shape.lse


def test_verdicts_are_by_time_and_two_percent_are_a_tie() -> None:
    def calls(shape: AttentionShape, call: Call) -> Iterator[PeerCall]:
        out, lse = call.expected()
        for name in ("near", "far"):
            yield PeerCall(name, run=lambda: (out, lse), read=lambda raw: raw, padding=None)

    rows = a_bench(SimpleNamespace(__name__="peers.fake", calls=calls), own=OWN).rows(DECODE)
    assert {row.name: row.verdict for row in rows if row.us is not None} == {
        "chosen": "best", "torch-mla": "tie", "near": "tie", "far": "slower",
    }  # fmt: skip
    assert by_name(rows, "far").us == 2000.0


def test_what_a_contender_does_wrong_stands_in_its_row_and_costs_nobody_else() -> None:
    def calls(shape: AttentionShape, call: Call) -> Iterator[PeerCall]:
        out, lse = call.expected()

        def fail() -> Any:
            raise RuntimeError("no kernel image\nand more")

        yield PeerCall("wrong", run=lambda: (out * 1.1, lse), read=lambda raw: raw)
        yield PeerCall("wrong-lse", run=lambda: (out, lse / 0.6931), read=lambda raw: raw)
        yield PeerCall("no-lse", run=lambda: (out, None), read=lambda raw: raw)
        yield PeerCall("nan", run=lambda: (out * torch.nan, lse), read=lambda raw: raw)
        yield PeerCall("flat", run=lambda: (out.flatten(1), lse), read=lambda raw: raw)
        yield PeerCall("crash", run=fail, read=lambda raw: raw)
        yield PeerCall("refused", why_not="takes 64 heads")
        raise ImportError("half a library")

    rows = a_bench(SimpleNamespace(__name__="peers.fake", calls=calls)).rows(CONTEXT)
    said = {row.name: (row.verdict, row.reason) for row in rows}
    assert said["wrong"][0] == said["wrong-lse"][0] == said["no-lse"][0] == said["nan"][0] == said["flat"][0] == "disqualified"
    assert said["wrong"][1] == "output off by 10.00%, relative L2"
    assert "LSE off by" in str(said["wrong-lse"][1])
    assert said["no-lse"][1] == "gave no LSE"
    assert said["crash"] == ("crashed", "raised RuntimeError: no kernel image")
    assert said["refused"] == ("unsupported", "takes 64 heads")
    assert said["fake"] == ("unsupported", "raised ImportError: half a library")
    assert by_name(rows, "chosen").verdict == "best"
    assert all(by_name(rows, name).us is None for name in ("wrong", "crash", "refused"))


def test_names_that_are_not_allowed_take_no_part() -> None:
    def run() -> Any:
        raise AssertionError("must not run")

    rows = a_bench(peer(PeerCall("a-peer", run=run)), allowed=lambda name: "needs Hopper" if name == "a-peer" else None).rows(
        DECODE
    )
    assert by_name(rows, "a-peer").reason == "needs Hopper"


def test_no_case_begins_once_the_time_is_up() -> None:
    heard: list[str] = []
    assert list(bench(a_bench(), [PREFILL, DECODE], heard.append, until=0.0)) == []
    assert heard == ["2 of 2 shapes are left out: the time is up"]


def test_a_case_that_fails_altogether_costs_no_other() -> None:
    heard: list[str] = []
    broken = Case(DECODE.shape, DECODE.q_lens, (-1, -1, -1))
    found = list(bench(a_bench(), [PREFILL, broken, DECODE], heard.append))
    assert [rows[0].phase for rows in found] == ["prefill", "decode"]
    assert "is left out: ValueError" in heard[2]


def test_the_floor_of_a_ragged_batch_is_the_sum_of_its_requests() -> None:
    lens = (30, 3, 3)
    shape = AttentionShape.prefill(DIMS, batch=3, q_len=12, dtype="float32", lse=False)
    one = a_bench()
    uniform, ragged = one.floor_us(Case.uniform(shape)), one.floor_us(Case(shape, lens, lens))
    one.rates.memory = float("inf")  # by arithmetic alone: causal pairs grow with the square
    assert one.floor_us(Case(shape, lens, lens)) > one.floor_us(Case.uniform(shape))
    assert ragged >= uniform > 0


def test_every_peer_says_why_it_cannot_run_on_a_cpu() -> None:
    modules = load_peers(PEERS)
    assert len(modules) >= 5
    rows = a_bench(*modules, own=OWN).rows(replace_dtype(DECODE)) + a_bench(*modules, own=OWN).rows(replace_dtype(PREFILL))
    peers = {row.name for row in rows} - {"chosen", *OWN}
    assert peers >= {
        "flashinfer-fa2", "flashinfer-fa3", "fa2", "fa3", "flashmla", "torch-flash", "torch-efficient", "torch-cudnn",
        "torch-math", "vllm-triton-mla",
    }  # fmt: skip
    assert all(row.reason for row in rows if row.us is None)
    assert not [row for row in rows if row.verdict in ("crashed", "disqualified")]


def replace_dtype(case: Case) -> Case:
    return Case.uniform(replace(case.shape, dtype="bfloat16"))


def test_a_directory_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no __init__\.py"):
        load_peers(tmp_path)
    (tmp_path / "__init__.py").touch()
    (tmp_path / "empty.py").touch()
    with pytest.raises(UserError, match=r"empty\.py has no function `calls`"):
        load_peers(tmp_path)


def test_kernels_by_pattern() -> None:
    assert [kernel.name for kernel in kernels(CPU, ["torch-m*"])] == ["torch-math", "torch-mla"]
    assert len(kernels(CPU, [])) > 3
    with pytest.raises(UserError, match="no kernel is called flash9"):
        kernels(CPU, ["flash9"])


def test_the_command_measures_first_and_reads_the_table_in_a_second_process(tmp_path: Path) -> None:
    table, out, picture = tmp_path / "decisions.json", tmp_path / "out.json", tmp_path / "plot.png"
    script = (
        "import sys; from mla_serve.bench import attention, grids; from mla_serve.selection.timing import Effort;"
        "grids.CPU_LENGTHS = (16,); attention._CPU_EFFORT = Effort(2, 2, 10.0, plans=1);"
        "from mla_serve.cli import main; sys.argv[0] = 'mla-serve'; main()"
    )

    def run(*options: str) -> str:
        command = [sys.executable, "-c", script, "bench", "attention", "--grid", "cpu", "--threads", "1", *options]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert not run("--only", "torch-*", "--write-decisions", str(table))
    assert json.loads(table.read_text())["decisions"]
    said = run("--only", "torch-*", "--decisions", str(table), "--out", str(out), "--plot", str(picture))
    assert "chosen kernel" in said
    result = json.loads(out.read_text())
    assert result["shapes"] == 2
    assert result["command"].startswith("mla-serve bench attention --grid cpu")
    assert {row["policy"] for row in result["rows"] if row["name"] == "chosen"} == {"measured"}
    assert picture.read_bytes().startswith(b"\x89PNG")
