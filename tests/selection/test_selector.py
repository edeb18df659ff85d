from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mla_serve.backends.base import AttentionError, Backend, Kind
from mla_serve.backends.padded import Padding
from mla_serve.backends.registry import load_backends
from mla_serve.errors import UserError
from mla_serve.selection.decision import CandidateResult, Decision
from mla_serve.selection.report import decision_sentence
from mla_serve.selection.selector import Selector
from mla_serve.selection.table import DecisionTable
from mla_serve.selection.timing import Effort, Measure
from mla_serve.shapes import AttentionShape, Bucket
from tests.backends.mutants import Log2Lse
from tests.selection.fakes import (
    DEEPSEEK,
    EQUAL,
    SMALL,
    Fake,
    FakeTransformerEngine,
    a_decision,
    context,
    decode,
    prefill,
    times,
)

PAD = Padding(192, 192, 4)


def rows(decision: Decision) -> dict[tuple[str, bool], CandidateResult]:
    return {(row.backend, row.padding is not None): row for row in decision.candidates}


def only_192(shape: AttentionShape) -> str | None:
    return None if shape.qk <= 192 else "up to 192"


def selector(device: torch.device, *backends: Backend, clock: Measure | None = None, **other: object) -> Selector:
    return Selector(device, backends=backends, measure=clock, **other)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gpu", "native_ms", "native", "padded_ms", "padded", "winner"),
    [
        ("sm80", 113.68, Kind.UNFUSED, 0.96, Kind.FLASH, "te+pad"),
        ("sm90", 0.34, Kind.FUSED, 0.44, Kind.FUSED, "te"),
        ("sm103", 0.35, Kind.FUSED, 93.74, Kind.FUSED, "te"),
    ],
)
def test_k01_chosen_by_time_and_both_numbers_reported(
    cpu: torch.device, gpu: str, native_ms: float, native: Kind, padded_ms: float, padded: Kind, winner: str
) -> None:
    class Narrow(FakeTransformerEngine):
        def supports(self, shape: AttentionShape) -> str | None:
            return only_192(shape) or super().supports(shape)

    chooser = selector(cpu, Narrow(native, padded, "te"), clock=times({"te": native_ms, "te+pad": padded_ms}))
    decision = chooser.measure(prefill())
    assert decision.label == winner
    assert decision.policy == "measured"
    found = rows(decision)
    assert (found["te", False].ms, found["te", True].ms) == (native_ms, padded_ms)
    assert sorted(row.verdict for row in found.values()) == ["chosen", "slower"]
    sentence = decision_sentence(decision)
    for figure in (native_ms, padded_ms):
        assert f"{figure:#.4g} ms" in sentence
    assert decision.floor_ms is not None
    assert decision.measured_at is not None
    assert chooser.decide(prefill()) == decision


def test_a_probe_asks_each_form_once_and_a_hit_asks_nothing(cpu: torch.device) -> None:
    engine = FakeTransformerEngine(Kind.UNFUSED, Kind.FLASH)
    chooser = selector(cpu, engine, clock=times({"fake-te": 2.0, "fake-te+pad": 1.0}))
    chooser.measure(prefill())
    before = engine.probes
    assert chooser.decide(prefill()).label == "fake-te+pad"
    assert engine.probes == before


def test_k03_a_wrong_base_is_disqualified_by_name_and_the_next_best_serves(cpu: torch.device) -> None:
    clock = times({"log2-lse": 0.1, "log2-lse+pad": 0.1, "honest": 5.0, "honest+pad": 9.0})
    decision = selector(cpu, Log2Lse(cpu), Fake("honest"), clock=clock).measure(context())
    assert decision.label == "honest"
    wrong = rows(decision)["log2-lse", False]
    assert wrong.verdict == "disqualified"
    assert "LSE off by 44% (base 2: times ln 2 it is right)" in (wrong.reason or "")
    assert wrong.ms is None, "what is wrong is not timed"
    assert wrong.lse_error is not None


def test_k05_padded_heads_are_used_only_where_they_are_faster(cpu: torch.device) -> None:
    shape = decode(replace(SMALL, heads=16))
    picky, plain = Fake("picky", head_counts=(64, 128)), Fake("plain")
    won = selector(cpu, picky, plain, clock=times({"picky+pad": 1.0, "plain": 2.0})).measure(shape)
    lost = selector(cpu, picky, plain, clock=times({"picky+pad": 2.0, "plain": 1.0})).measure(shape)
    assert (won.label, won.padding and won.padding.heads) == ("picky+pad", 64)
    assert (lost.label, lost.padding) == ("plain", None)
    assert "takes 64 or 128 query heads, not 16" in (rows(won)["picky", False].reason or "")


def test_k11_what_a_kernel_raises_is_its_reason_and_math_answers(cpu: torch.device) -> None:
    class Throws(Fake):
        def run_prefill(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            raise RuntimeError("No available kernel. Aborting execution.\ntrace")

    class Refuses(Fake):
        def plan(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            raise AttentionError("refuses cannot run 16 queries")

    class Hoards(Fake):
        def prepare(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            raise torch.OutOfMemoryError("tried to allocate 80 GiB")

    backends = [Throws("throws"), Refuses("refuses"), Hoards("hoards"), *load_backends(cpu, only={"torch-math", "torch-flash"})]
    for qk, v in ((128, 64), (128, 144), (192, 128)):
        decision = Selector(cpu, backends=backends, effort=Effort(1, 1)).measure(replace(prefill(), qk=qk, v=v))
        found = rows(decision)
        assert found["throws", False].verdict == "unsupported"
        assert found["throws", False].reason == "raised RuntimeError: No available kernel. Aborting execution."
        assert found["refuses", False].reason == "refuses cannot run 16 queries"
        assert (found["hoards", False].verdict, found["hoards", False].ms) == ("crashed", None)
        assert found["torch-flash", False].verdict == "unsupported"
        assert found["torch-math", False].ms is not None
        assert decision.winner in ("torch-math", "torch-flash")


def test_a_kernel_that_fails_under_the_clock_costs_only_itself(cpu: torch.device) -> None:
    def clock(trial: object, part: str) -> float:
        if trial.label == "bad" and part == "run":  # type: ignore[attr-defined]
            raise RuntimeError("device-side assert")
        return 1.0

    decision = selector(cpu, Fake("bad"), Fake("good"), clock=clock).measure(decode())  # type: ignore[arg-type]
    assert decision.label == "good"
    assert rows(decision)["bad", False].reason == "raised RuntimeError: device-side assert while it was timed"
    assert rows(decision)["bad", False].verdict == "crashed"


def test_measured_falls_back_to_the_kernel_class_and_says_so(cpu: torch.device) -> None:
    chooser = selector(cpu, Fake("slow", kinds=lambda _: Kind.UNFUSED), Fake("quick"))
    decision = chooser.decide(prefill())
    assert (decision.label, decision.policy) == ("quick", "availability")
    assert "not measured" in (decision.note or "")
    assert len(chooser.table) == 0, "a makeshift is no entry of the table"


def test_off_the_table_the_nearest_bucket_serves_and_is_named(cpu: torch.device) -> None:
    chooser = selector(cpu, Fake("a"), Fake("b", refuse=lambda s: "short only" if s.kv_len > 1000 else None), Fake("c"))
    for q_len, winner in ((16, "a"), (512, "b"), (8192, "c")):
        chooser.table.put(a_decision(prefill(q_len=q_len), chooser.fingerprint, winner=winner))
    near = chooser.decide(prefill(q_len=700))
    assert near.winner == "c", "b is nearer, but does not take 1,024 tokens"
    assert near.bucket == Bucket.of(prefill(q_len=700))
    assert near.note == f"not measured; as in the nearest measured bucket, {Bucket.of(prefill(q_len=8192))}"
    assert near.note in decision_sentence(near)
    assert chooser.decide(prefill(q_len=200)).winner == "b"
    assert chooser.decide(prefill(q_len=16)).note is None
    assert chooser.decide(prefill(q_len=16, lse=True)).policy == "availability", "LSE is no size"


def test_between_two_measured_buckets_the_kernel_that_is_best_over_both_serves(cpu: torch.device) -> None:
    chooser = selector(cpu, Fake("a"), Fake("b"), Fake("c"))
    for q_len, costs in ((32, {"a": 2.0, "b": 1.0, "c": 1.1}), (128, {"a": 1.0, "b": 1.05, "c": 9.0})):
        found = tuple(CandidateResult(name, None, "slower", None, ms, 0.0, 0.01) for name, ms in costs.items())
        winner = min(costs, key=costs.__getitem__)
        chooser.table.put(a_decision(prefill(q_len=q_len), chooser.fingerprint, winner=winner, rows=found))
    near = chooser.decide(prefill(q_len=50))
    assert near.winner == "b", "twice as fast at 32 and 5 % slower at 128"
    assert "the best over the nearest measured buckets" in (near.note or "")
    assert near.bucket == Bucket.of(prefill(q_len=64))
    assert chooser.decide(prefill(q_len=256)).winner == "a", "nearer to 128"
    assert chooser.decide(prefill(batch=2, q_len=32)).winner == "b", "nearer to 32"


def test_a_tie_goes_to_what_the_neighbouring_bucket_chose(cpu: torch.device) -> None:
    """Two kernels within 1 % of each other: without the neighbour, which one is cheapest in a run would decide."""

    def clock(trial: object, part: str) -> float:
        flicker = {"a": (1.0, 1.03), "b": (1.01, 1.04)}[trial.label]  # type: ignore[attr-defined]
        calls[trial.label] = calls.get(trial.label, -1) + 1  # type: ignore[attr-defined]
        return flicker[calls[trial.label] % 2] if part == "run" else 0.0  # type: ignore[attr-defined]

    calls: dict[str, int] = {}
    chooser = selector(cpu, Fake("a"), Fake("b"), clock=clock)  # type: ignore[arg-type]
    assert chooser.measure(decode(kv_len=64)).label == "a"
    chooser.table.put(a_decision(decode(kv_len=64), chooser.fingerprint, winner="b", measured_at="2100-01-01T00:00:00Z"))
    again = chooser.measure(decode(kv_len=32))
    assert again.label == "b"
    assert rows(again)["a", False].verdict == "tie"


def test_on_demand_measures_once(cpu: torch.device) -> None:
    calls = []

    def clock(trial: object, part: str) -> float:
        calls.append(part)
        return 1.0

    chooser = selector(cpu, Fake(), clock=clock, on_demand=True)  # type: ignore[arg-type]
    first = chooser.decide(decode(batch=3))
    measured = len(calls)
    assert first.policy == "measured"
    assert measured > 0
    assert chooser.decide(decode(batch=4)) == first, "3 and 4 share a bucket"
    assert len(calls) == measured


def test_what_does_not_fit_into_memory_is_not_measured(cpu: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    huge = decode(DEEPSEEK, batch=1 << 14, kv_len=1 << 20)
    with pytest.raises(UserError, match=r"needs about \d+\.\d GiB to measure"):
        selector(cpu, Fake()).measure(huge)
    assert selector(cpu, Fake(), on_demand=True).decide(huge).policy == "availability"
    assert "are free; ask for a smaller batch" in caplog.text


def test_decisions_survive_in_the_file(cpu: torch.device, tmp_path: Path) -> None:
    path, clock = tmp_path / "decisions.json", times({"fake": 1.0})
    first = selector(cpu, Fake(), clock=clock, table=DecisionTable.load(path)).measure(decode())
    fresh = Fake()
    assert selector(cpu, fresh, table=DecisionTable.load(path)).decide(decode()) == first
    assert not fresh.calls, "a hit asks no backend anything"
    assert selector(cpu, Fake("another"), table=DecisionTable.load(path)).decide(decode()).winner == "another"


def test_a_table_of_a_kinder_deployment_gives_no_kernel_that_would_be_wrong_here(cpu: torch.device) -> None:
    planner, leaky, plain = Fake("planner", needs_host_lens=True), Fake("leaky"), Fake("plain", kinds=lambda _: Kind.UNFUSED)
    kind = selector(cpu, planner, leaky, plain, clean_pool=True)
    leaking = CandidateResult("leaky", None, "chosen", ms=1.0, plan_ms=0.0, spread=0.0, leaks_nan=True)
    kind.table.put(a_decision(decode(batch=1), kind.fingerprint, winner="planner"))
    kind.table.put(a_decision(decode(batch=8), kind.fingerprint, winner="leaky", rows=(leaking,)))
    assert kind.decide(decode(batch=1)).winner == "planner"
    assert kind.decide(decode(batch=8)).winner == "leaky"
    strict = selector(cpu, planner, plain, leaky, table=kind.table, host_lens=False)
    assert strict.decide(decode(batch=1)).policy == "availability"
    assert strict.decide(decode(batch=8)).policy == "availability"


def test_a_hit_is_ranked_for_this_models_layers(cpu: torch.device) -> None:
    clock = times({"planner": 1.0, "plain": 1.1}, {"planner": 0.2})
    one = selector(cpu, Fake("planner"), Fake("plain"), clock=clock)
    assert one.measure(decode()).label == "plain"
    many = selector(cpu, Fake("planner"), Fake("plain"), table=one.table, layers=27)
    decision = many.decide(decode())
    assert (decision.label, decision.layers) == ("planner", 27)
    assert decision.chosen is not None
    assert decision.chosen.verdict == "chosen"


def test_ties_go_to_native(cpu: torch.device) -> None:
    def clock(trial: object, part: str) -> float:
        noise = next(readings) if part == "run" else 0.0
        return noise * (0.99 if trial.label.endswith("+pad") else 1.0)  # type: ignore[attr-defined]

    readings = iter([1.0, 1.0, 1.1, 1.1, 0.9, 0.9] * 20)
    decision = selector(cpu, Fake(refuse=only_192), clock=clock).measure(prefill())  # type: ignore[arg-type]
    assert decision.label == "fake"
    assert rows(decision)["fake", True].verdict == "tie"


def test_the_last_resort_that_is_wrong_serves_nobody(cpu: torch.device) -> None:
    class Wrong(Fake):
        def run_prefill(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            out, lse = super().run_prefill(*args, **kwargs)
            return out.add_(1.0), lse

    with pytest.raises(UserError, match=r"even torch-math.*is wrong here \(output off by"):
        selector(cpu, Wrong("torch-math"), clock=times({})).measure(prefill())


def test_the_last_resort_stands_in_where_all_are_out(cpu: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    decision = selector(cpu, Log2Lse(cpu), clock=times({})).measure(context())
    assert decision.label == "torch-math"
    assert rows(decision)["log2-lse", False].verdict == "disqualified"
    assert "last resort" in caplog.text


def test_real_kernels_on_a_cpu(cpu: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    chooser = Selector(cpu, effort=Effort(1, 2, 50.0, 1))
    with caplog.at_level(logging.DEBUG):
        for shape in (prefill(q_len=64), prefill(EQUAL, q_len=64, lse=True), context(q_len=32, kv_len=64), decode(DEEPSEEK)):
            decision = chooser.measure(shape)
            chosen = decision.chosen
            assert chosen is not None
            assert chosen.ms is not None
            assert (chosen.error or 0.0) < 1e-5
            assert str(decision.bucket) in caplog.text
    assert {row.verdict for row in decision.candidates} == {"chosen", "unsupported", "unavailable"}


def test_k14_an_unset_page_size_is_one_the_winner_takes(cpu: torch.device) -> None:
    quick = Fake("quick", page_sizes=(32, 64), kinds=lambda _: Kind.FLASH)
    slow = Fake("slow", kinds=lambda _: Kind.UNFUSED)
    chooser = selector(cpu, slow, quick)
    page = chooser.page_size(SMALL, dtype="float32")
    assert page in (32, 64)
    assert chooser.decide(decode(page_size=page)).label == "quick"
    assert selector(cpu, slow).page_size(SMALL, dtype="float32") == 16, "the usual size among equals"
    assert selector(cpu, quick, pins={"decode": "quick"}).page_size(SMALL, dtype="float32") == 32


def test_an_unset_page_size_follows_the_measured_times(cpu: torch.device) -> None:
    chooser = selector(cpu, Fake())
    for page, ms in ((16, 2.0), (64, 1.0), (128, 3.0)):
        row = CandidateResult("fake", None, "chosen", ms=ms, plan_ms=0.0, spread=0.0)
        shape = decode(batch=8, kv_len=2048, page_size=page)
        chooser.table.put(a_decision(shape, chooser.fingerprint, rows=(row,)))
    assert chooser.page_size(SMALL, dtype="float32") == 64


def test_unknown_policies_are_refused(cpu: torch.device) -> None:
    with pytest.raises(UserError, match="no policy 'fastest'"):
        Selector(cpu, policy="fastest")  # type: ignore[arg-type]


def test_the_thread_count_is_part_of_where_we_are(cpu: torch.device) -> None:
    chooser = selector(cpu, Fake(), clock=times({"fake": 1.0}))
    chooser.measure(decode())
    torch.set_num_threads(2)
    assert chooser.fingerprint.threads == 2
    assert chooser.decide(decode()).policy == "availability"


def test_decisions_for_a_kernel_that_is_not_here_are_named_once(cpu: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    chooser = selector(cpu, Fake())
    for q_len in (32, 64):
        row = CandidateResult("warp-drive", None, "chosen", ms=1.0, plan_ms=0.0, spread=0.0)
        chooser.table.put(a_decision(prefill(q_len=q_len), chooser.fingerprint, rows=(row,), winner="warp-drive"))
    with caplog.at_level(logging.WARNING):
        assert [chooser.decide(prefill(q_len=q_len)).winner for q_len in (32, 64)] == ["fake", "fake"]
    told = [record.getMessage() for record in caplog.records if "warp-drive" in record.getMessage()]
    assert len(told) == 1
    assert "no kernel has that name here" in told[0]
    assert "mla-serve probe" in told[0]


def test_a_kernel_that_needs_more_memory_than_is_free_is_not_measured_alone(
    cpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    greedy, modest = Fake("greedy"), Fake("modest")
    monkeypatch.setattr(greedy, "workspace_bytes", lambda shape: 1 << 60, raising=False)
    rows = {row.label: row for row in selector(cpu, greedy, modest).measure(prefill(EQUAL)).candidates}
    assert rows["greedy"].verdict == "not-measured"
    assert "needs about 1073741824.0 GiB beside its inputs" in (rows["greedy"].reason or "")
    assert rows["modest"].verdict == "chosen"
    assert greedy.calls["prepare"] == 0
