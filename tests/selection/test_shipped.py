"""Decision files that come with the package."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mla_serve.selection import DecisionTable, Selector
from mla_serve.selection.fingerprint import Fingerprint
from mla_serve.selection.shipped import shipped_decisions
from mla_serve.shapes import Bucket
from tests.selection.fakes import a_decision, decode, prefill

CPU = torch.device("cpu")
HERE = Fingerprint("a GPU", "2.11.0", sm_count=132, capability="9.0", source="abc")


def written(path: Path, *fingerprints: Fingerprint) -> Path:
    table = DecisionTable()
    for fingerprint in fingerprints:
        table.put(a_decision(prefill(), fingerprint), save=False)
    table.save(path, strict=True)
    return path


def test_only_this_host_s_decisions_are_taken_and_others_cost_no_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = replace(HERE, device="another GPU")
    sources = [written(tmp_path / "a.json", HERE, other), written(tmp_path / "b.json", replace(HERE, sm_count=78))]
    held = shipped_decisions(HERE, sources)
    assert [decision.fingerprint for decision in held] == [HERE]
    assert held.path is None
    assert held.get(Bucket.of(prefill()), "measured", HERE) is not None
    assert not caplog.text
    assert not list(shipped_decisions(replace(HERE, device="a third"), sources))


def test_decisions_of_other_kernels_of_ours_do_not_hold(tmp_path: Path) -> None:
    now = replace(HERE, source="changed")
    held = shipped_decisions(now, [written(tmp_path / "a.json", HERE)])
    assert held.get(Bucket.of(prefill()), "measured", now) is None


def test_a_broken_file_is_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    broken = tmp_path / "a.json"
    broken.write_text('{"schema": 1, "decisions": [')
    assert len(shipped_decisions(HERE, [broken, written(tmp_path / "b.json", HERE)])) == 1
    assert "a.json" in caplog.text


def test_the_package_s_own_files_are_readable(caplog: pytest.LogCaptureFixture) -> None:
    shipped_decisions(Fingerprint.here(CPU))
    assert not caplog.text


def test_a_selector_asks_its_own_table_first_and_then_the_shipped_one() -> None:
    shipped, own = DecisionTable(), DecisionTable()
    plain = Selector(CPU, table=own)
    theirs = replace(a_decision(prefill(), plain.fingerprint), winner="torch-math", library="torch", padding=None)
    shipped.put(theirs, save=False)
    selector = Selector(CPU, table=own, shipped=shipped)
    assert selector.decide(prefill()) == theirs
    assert selector.decide(prefill(q_len=2 * prefill().q_len)).policy == "measured", "the nearest one is borrowed"
    assert selector.measured(prefill()) is None, "a probe measures it all the same"
    assert not list(own), "what is shipped is not written into the own table"
    ours = replace(theirs, winner="torch-flash")
    own.put(ours, save=False)
    assert selector.decide(prefill()) == ours
    assert selector.decide(decode()).policy == "availability"


def test_given_backends_stand_alone() -> None:
    assert not list(Selector(CPU, backends=[]).shipped)
