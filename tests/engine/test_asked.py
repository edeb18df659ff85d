"""What else a request may ask and is told: its prompt's log-probabilities, its priority, what was cached, how long it took."""

import math
from types import SimpleNamespace

import pytest
import torch

from mla_serve.engine.base import Request, Sampling, Step, TokenLogprobs
from mla_serve.engine.embedded import messages, scheduler
from mla_serve.engine.embedded.core import EngineCore
from mla_serve.engine.embedded.kv_cache import PageAllocator
from mla_serve.engine.embedded.scheduler import Scheduler
from mla_serve.engine.embedded.sequence import Sequence, Work
from tests.engine import fake_runner
from tests.engine.conftest import VOCAB
from tests.engine.driver import Driver
from tests.engine.fake_runner import Engine, answer


@pytest.fixture(autouse=True)
def _threads(one_thread):
    pass


def prompt(length, salt=0):
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(1000 * salt + length)).tolist()


def request(name, length, max_tokens=6, salt=0, priority=0, **sampling):
    asked = Sampling(**{"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True} | sampling)
    return Request(name, prompt(length, salt), asked, priority)


@pytest.fixture(scope="module")
def core(settings):
    return lambda **changes: Driver(EngineCore(settings(**changes)))


def expected_logprobs(driver, request):
    """From one run over the whole prompt, all positions, without a scheduler."""
    runner, seq = driver.core.runner, Sequence.of(request)
    seq.pages = driver.core.scheduler.pages.allocate(driver.core.scheduler.pages.pages_for(seq.num_prompt))
    logits = runner.run([Work(seq, 0, seq.num_prompt)], all_positions=True)
    driver.core.scheduler.pages.free(seq.pages)
    return torch.log_softmax(logits, dim=-1)


def check_prompt_logprobs(driver, request):
    steps, n = driver.steps[request.id], request.sampling.prompt_logprobs
    assert all(step.prompt_logprobs is None for step in steps[1:])
    told, scores = steps[0].prompt_logprobs, expected_logprobs(driver, request)
    assert len(told) == len(request.prompt_token_ids) - 1
    for entry, row, token in zip(told, scores, request.prompt_token_ids[1:], strict=False):
        assert entry.logprob == pytest.approx(row[token].item(), abs=2e-3)
        assert [value for _, value in entry.top] == pytest.approx(row.topk(n).values.tolist(), abs=2e-3)
        assert [row[token].item() for token, _ in entry.top] == pytest.approx(row.topk(n).values.tolist(), abs=2e-3)


@pytest.mark.parametrize("changes", [{}, {"max_tokens": 7, "page_size": 4}, {"policy": "batch-invariant"}])
def test_prompt_logprobs_whole_in_chunks_and_in_company(core, changes):
    driver = core(**changes)
    asked = [
        request("a", 61, prompt_logprobs=2), request("plain", 30), request("b", 1, prompt_logprobs=0),
        request("c", 300, 1, prompt_logprobs=5), request("d", 2, prompt_logprobs=1, logprobs=1),
    ]  # fmt: skip
    alone = core(prefix_cache=False).run(*asked)
    for _ in range(2):  # the second time with everything in the prefix cache
        assert driver.run(*asked) == alone
        for each in asked:
            if each.sampling.prompt_logprobs is None:
                assert driver.steps[each.id][0].prompt_logprobs is None
            else:
                check_prompt_logprobs(driver, each)
                assert driver.steps[each.id][0].cached_tokens == 0


def test_prompt_logprobs_after_a_preemption_in_the_middle_of_the_prompt(core, monkeypatch):
    """The older one grows into the last page while the younger computes its prompt: what was told stays told, once."""
    monkeypatch.setattr(scheduler, "PROMPT_ROWS", 2)
    driver = core(num_pages=12, page_size=16)
    older, younger = request("older", 15, 100), request("younger", 100, 3, prompt_logprobs=1)
    preempted_at = []
    preempt = driver.core.scheduler._preempt

    def spy():
        seq = preempt()
        preempted_at.append((len(seq.prompt_logprobs), seq.num_generated))
        return seq

    monkeypatch.setattr(driver.core.scheduler, "_preempt", spy)
    driver.add(older)
    for _ in range(34):
        driver.turn()
    driver.run(younger)
    assert any(0 < told < 99 and not generated for told, generated in preempted_at), preempted_at
    check_prompt_logprobs(driver, younger)


def test_a_prompt_is_cut_where_all_its_logits_are_wanted(core, monkeypatch):
    monkeypatch.setattr(scheduler, "PROMPT_ROWS", 16)
    driver, counts = core(), []
    run = driver.core.runner.run
    monkeypatch.setattr(driver.core.runner, "run", lambda works: counts.append(works[0].count) or run(works))
    driver.run(request("a", 40, 1, prompt_logprobs=0), request("b", 1, 1))
    assert counts[:3] == [16, 16, 8]


def test_nan_in_a_prompt_that_is_told_ends_it_alone(core, monkeypatch):
    driver = core()
    run = driver.core.runner.run

    def spoil(works):
        logits = run(works).clone()
        at = 0
        for work in works:
            rows = len(work.wanted)
            if work.seq.id == "bad":
                logits[at : at + rows] = math.nan
            at += rows
        return logits

    good = request("good", 25, prompt_logprobs=1)
    monkeypatch.setattr(driver.core.runner, "run", spoil)
    driver.run(request("bad", 20, prompt_logprobs=1), good)
    monkeypatch.undo()
    assert driver.last("bad").finish_reason == "error"
    assert driver.last("good").finish_reason == "length"
    check_prompt_logprobs(driver, good)


def test_what_was_cached_is_told_and_counted(core):
    driver = core(page_size=16)
    driver.run(request("first", 100))
    assert [step.cached_tokens for step in driver.steps["first"]] == [0] * 6
    driver.run(request("again", 100))
    assert [step.cached_tokens for step in driver.steps["again"]] == [96] * 6
    stats = driver.core.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (200, 96)
    driver.run(request("told", 100, prompt_logprobs=0))
    assert (driver.core.stats().prefix_queries, driver.last("told").cached_tokens) == (200, 0)
    without = core(prefix_cache=False)
    without.run(request("first", 100), request("second", 100))
    assert (without.core.stats().prefix_queries, without.core.stats().prefix_hits) == (0, 0)


def test_n_answers_to_one_prompt_share_its_pages(core):
    """As the server asks for n = 4: four requests at once. The first computes the prompt, the others find it."""
    driver = core(page_size=16, max_tokens=512)
    asked = [request(f"n{i}", 200, 8, temperature=1.0, seed=i) for i in range(4)]
    driver.add(asked[0])
    driver.turn()
    before = driver.core.stats().kv_pages_free
    driver.add(*asked[1:])
    driver.turn()
    assert before - driver.core.stats().kv_pages_free == 3
    driver.run()
    assert [driver.last(each.id).cached_tokens for each in asked] == [0, 192, 192, 192]
    assert len({tuple(driver.tokens(each.id)) for each in asked}) == 4


def test_times_are_told_once(core, monkeypatch):
    clock = iter(range(100, 1000, 10))
    driver = core(max_requests=1)
    monkeypatch.setattr(scheduler, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    driver.run(request("a", 9, 3), request("b", 9, 3, salt=1))
    first = {name: steps[0] for name, steps in driver.steps.items()}
    # Arrivals 100 and 110; a starts 120 and answers 130; b starts 140 and answers 150.
    assert [(step.queue_seconds, step.prefill_seconds) for step in first.values()] == [(20.0, 10.0), (30.0, 10.0)]
    for steps in driver.steps.values():
        assert all(step.queue_seconds is step.prefill_seconds is None for step in steps[1:])


def test_a_preempted_request_keeps_its_times_and_its_cached_tokens(core):
    driver = core(num_pages=12, page_size=16)
    driver.run(*(request(f"r{i}", 30 + i, 50) for i in range(4)))
    assert driver.core.stats().preemptions > 0
    for steps in driver.steps.values():
        assert [step.queue_seconds is not None for step in steps] == [True] + [False] * (len(steps) - 1)
        assert {step.cached_tokens for step in steps} == {0}


def test_a_reader_who_fell_behind_still_gets_what_the_first_step_said():
    told = [TokenLogprobs(-1.0, [])]
    first = Step("r", [1], 3, 1, cached_tokens=2, prompt_logprobs=told, queue_seconds=0.5, prefill_seconds=0.25)
    merged = messages.merge(
        messages.merge(first, Step("r", [2], 3, 2, cached_tokens=2)), Step("r", [3], 3, 3, finish_reason="stop")
    )
    assert merged.token_ids == [1, 2, 3]
    assert (merged.prompt_logprobs, merged.queue_seconds, merged.prefill_seconds) == (told, 0.5, 0.25)


def ranked(name, tokens, priority, max_tokens=8):
    plain = fake_runner.request(name, tokens, max_tokens)
    return Request(plain.id, plain.prompt_token_ids, plain.sampling, priority)


def test_lower_priority_numbers_start_first_and_equals_by_arrival():
    engine = Engine(max_requests=1, num_pages=32)
    engine.add(ranked("running", [1], 9, 4))
    engine.step()
    engine.add(ranked("late", [2], 5), ranked("a", [3], 0), ranked("soon", [4], -1), ranked("b", [5], 0))
    engine.run()
    assert list(engine.ends) == ["running", "soon", "a", "b", "late"]


def test_the_least_urgent_gives_way_first_then_the_newest():
    """Also where the urgent ones came, and started, last."""
    engine = Engine(num_pages=14, max_requests=4, max_tokens=32, prefix_cache=False)
    order = zip("abcd", (1, 1, 0, 0), strict=True)
    requests = [ranked(name, [i + 1] * 7, priority, 16) for i, (name, priority) in enumerate(order)]
    gone, preempt = [], engine.scheduler._preempt
    engine.scheduler._preempt = lambda: gone.append(preempt()) or gone[-1]
    for each in requests:
        engine.add(each)
        engine.step()
    assert len(engine.scheduler.running) == 4
    engine.run()
    assert [seq.id for seq in gone[:2]] == ["b", "a"]
    assert engine.tokens == {each.id: answer(each) for each in requests}


def test_priorities_change_no_answer_and_leave_no_page():
    engine = Engine(num_pages=8, max_requests=4)
    requests = [ranked(i, [i % 3 + 1] * (3 + i % 5), (7 * i) % 4, 3 + i % 9) for i in range(30)]
    for i, each in enumerate(requests):
        engine.add(each)
        if i % 2:
            engine.step()
    engine.run()
    assert engine.scheduler.preemptions > 0
    assert engine.tokens == {each.id: answer(each) for each in requests}
    assert engine.pages.num_free == 8


def test_the_lines_are_in_order_of_rank():
    line = Scheduler(PageAllocator(8, 4), max_requests=2, max_tokens=8)
    for name, priority in (("a", 2), ("b", 0), ("c", 2), ("d", -3), ("e", 0)):
        line.add(ranked(name, [1], priority))
    assert [seq.id for seq in line.waiting] == ["d", "b", "e", "a", "c"]
