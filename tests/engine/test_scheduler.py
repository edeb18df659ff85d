"""Continuous batching, chunks, preemption, prefix sharing and endings, on a runner that checks every slot it reads."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_serve.engine.base import Request
from tests.engine.fake_runner import Engine, answer, request


def test_one_request():
    engine = Engine()
    r = request("a", [1, 2, 3], max_tokens=5)
    engine.add(r)
    engine.run()
    assert engine.tokens["a"] == answer(r)
    assert engine.ends == {"a": "length"}
    assert engine.pages.num_free == engine.pages.num_pages


def test_decodes_come_first_and_prompts_are_cut_to_the_budget():
    engine = Engine(num_pages=32)
    engine.add(request("a", [1, 2, 3]))
    engine.step()
    engine.add(request("b", range(20)), request("c", [5] * 3))
    for _ in range(4):
        engine.step()
    assert engine.runner.batches == [
        [("a", 0, 3)],
        [("a", 3, 1), ("b", 0, 7)],
        [("a", 4, 1), ("b", 7, 7)],
        [("a", 5, 1), ("b", 14, 6), ("c", 0, 1)],  # the last token of the budget starts the next prompt
        [("a", 6, 1), ("b", 20, 1), ("c", 1, 2)],
    ]


def test_first_come_first_served():
    """A prompt that does not fit holds up the ones behind it, small as they are."""
    engine = Engine(num_pages=8, max_tokens=32, prefix_cache=False)
    engine.add(request("a", range(20)), request("b", range(16)), request("c", [1]))
    engine.step()
    assert [seq.id for seq in engine.scheduler.running] == ["a"]
    assert [seq.id for seq in engine.scheduler.waiting] == ["b", "c"]
    engine.run()
    assert list(engine.ends) == ["a", "b", "c"]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preemption_changes_nothing_that_a_client_sees(prefix_cache):
    requests = [request(i, [i + 1] * (5 + i), max_tokens=30) for i in range(4)]
    engine = Engine(num_pages=11, prefix_cache=prefix_cache)
    engine.add(*requests)
    engine.run()
    assert engine.scheduler.preemptions > 0
    assert engine.tokens == {r.id: answer(r) for r in requests}
    assert engine.pages.num_free == 11


def test_the_youngest_gives_way_and_returns_to_the_head_of_the_line():
    engine = Engine(num_pages=9, max_requests=3, max_tokens=32, prefix_cache=False)
    engine.add(*(request(name, [1] * 7, max_tokens=12) for name in "abc"))
    while not engine.scheduler.preemptions:
        engine.step()
    assert [seq.id for seq in engine.scheduler.running] == ["a", "b"]
    engine.add(request("d", [1]))
    assert [seq.id for seq in engine.scheduler.waiting] == ["c", "d"]
    assert engine.scheduler.waiting[0].num_generated > 0
    engine.run()


def test_a_request_may_fill_the_whole_pool():
    r = request("a", range(10), max_tokens=6)
    engine = Engine(num_pages=4)
    engine.add(r, request("b", [7], max_tokens=3))
    engine.run()
    assert engine.tokens["a"] == answer(r)


def test_a_shared_prefix_is_computed_once():
    prefix = list(range(16))
    first, second = request("a", [*prefix, 20, 21]), request("b", [*prefix, 30])
    engine = Engine(num_pages=32, max_tokens=64)
    engine.add(first)
    engine.run()
    engine.runner.batches.clear()
    engine.add(second)
    engine.run()
    assert engine.runner.batches[0] == [("b", 16, 1)]
    assert engine.tokens["b"] == answer(second)
    assert engine.scheduler.prefix_hits == 16


def test_a_wholly_cached_request_still_computes_its_last_token():
    prompt = list(range(16))
    engine = Engine(num_pages=32, max_tokens=64)
    for name in "abc":
        engine.add(request(name, prompt))
        engine.run()
    assert engine.tokens["a"] == engine.tokens["b"] == engine.tokens["c"] == answer(request("a", prompt))
    assert ("b", 12, 4) in engine.runner.batches[8]


def test_what_was_generated_is_a_prefix_too():
    first = request("a", [1, 2, 3], max_tokens=10)
    engine = Engine(num_pages=32, max_tokens=64)
    engine.add(first)
    engine.run()
    turn = [1, 2, 3, *answer(first)]
    engine.add(request("b", [*turn, 9]))
    engine.run()
    assert engine.scheduler.prefix_hits == 12
    assert engine.tokens["b"] == answer(request("b", [*turn, 9]))


@pytest.mark.parametrize("own", [True, False])
def test_stop_ids_and_end_tokens(own):
    r = request("a", [1, 2, 3], max_tokens=9)
    stop = answer(r)[4]
    ids = {"stop_token_ids": (stop,), "ignore_eos": True} if own else {}
    eos = () if own else (stop,)
    r = request("a", [1, 2, 3], max_tokens=9, **ids)
    engine = Engine(eos=eos)
    engine.add(r)
    engine.run()
    assert engine.tokens["a"] == answer(r, eos)
    assert engine.tokens["a"][-1] == stop
    assert engine.ends == {"a": "stop"}


def test_ignore_eos_goes_on_to_max_tokens():
    r = request("a", [1, 2, 3], max_tokens=9, ignore_eos=True)
    engine = Engine(eos=set(answer(r)))
    engine.add(r)
    engine.run()
    assert engine.tokens["a"] == answer(r)
    assert engine.ends == {"a": "length"}


def test_a_stop_on_the_last_token_is_a_stop():
    r = request("a", [1, 2, 3], max_tokens=4)
    tokens = answer(r)
    first = tokens.index(tokens[-1]) + 1
    engine = Engine(eos=(tokens[-1],))
    engine.add(request("a", [1, 2, 3], max_tokens=first))
    engine.run()
    assert engine.ends == {"a": "stop"}


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_abort_frees_pages_while_waiting_computing_or_decoding(steps):
    engine = Engine(max_tokens=4)
    engine.add(request("a", range(7), max_tokens=20))
    for _ in range(steps):
        engine.step()
    engine.abort("a")
    assert engine.ends == {"a": "abort"}
    assert engine.pages.num_free == engine.pages.num_pages
    assert not engine.scheduler.has_work


def test_a_row_without_numbers_ends_alone_and_leaves_no_trace():
    """The broken request shares a prefix with the others; whatever it touched is zeroed before anyone else gets it."""
    prefix = [1, 2, 3, 4]
    good = [request(name, [*prefix, i], max_tokens=12) for i, name in enumerate("abc")]
    engine = Engine(num_pages=12, broken=["bad"])
    engine.add(good[0], request("bad", [*prefix, 30, 31]), good[1])
    engine.run()
    engine.add(good[2])
    engine.run()
    assert engine.ends.pop("bad") == "error"
    assert engine.tokens.pop("bad") == []
    assert engine.tokens == {r.id: answer(r) for r in good}


def test_counts():
    engine = Engine()
    engine.add(request("a", [1, 2, 3], max_tokens=5), request("b", [4], max_tokens=2))
    engine.run()
    assert engine.scheduler.prompt_tokens == 4
    assert engine.scheduler.generated_tokens == 7


@st.composite
def scripts(draw):
    """Pool, limits and a list of events: a new request, an abort, or a number of steps."""
    pool = {
        "num_pages": draw(st.integers(4, 14)),
        "page_size": draw(st.sampled_from([1, 2, 4])),
        "max_requests": draw(st.integers(1, 4)),
        "max_tokens": draw(st.integers(4, 12)),
        "prefix_cache": draw(st.booleans()),
    }
    limit = pool["num_pages"] * pool["page_size"]
    events, broken = [], set()
    for i in range(draw(st.integers(1, 14))):
        kind = draw(st.sampled_from(["add", "add", "broken", "abort", "step"]))
        if kind == "abort":
            events.append(("abort", draw(st.integers(0, 20))))
        elif kind == "step":
            events.append(("step", draw(st.integers(1, 6))))
        else:
            length = draw(st.integers(1, min(12, limit - 1)))
            # Few different tokens, so that prefixes meet.
            prompt = draw(st.lists(st.integers(0, 1), min_size=length, max_size=length))
            plain = request(i, prompt, max_tokens=draw(st.integers(1, min(12, limit - length))))
            events.append(("add", Request(plain.id, prompt, plain.sampling, draw(st.sampled_from([0, 0, 1, -1])))))
            if kind == "broken":
                broken.add(str(i))
    return pool, events, broken


@settings(max_examples=200, deadline=None)
@given(scripts())
def test_any_history_ends_with_the_right_tokens_and_all_pages_free(script):
    pool, events, broken = script
    engine = Engine(**pool, broken=broken)
    requests = {}
    for kind, value in events:
        if kind == "add":
            requests[value.id] = value
            engine.add(value)
        elif kind == "abort":
            open_ids = [name for name in requests if name not in engine.ends]
            if open_ids:
                engine.abort(open_ids[value % len(open_ids)])
        else:
            for _ in range(value):
                if engine.scheduler.has_work:
                    engine.step()
        for line in (engine.scheduler.running, engine.scheduler.waiting):
            ranks = [(seq.request.priority, int(seq.id)) for seq in line]
            assert ranks == sorted(ranks), "someone jumped the line"
    engine.run()
    assert engine.pages.num_free == pool["num_pages"]
    assert engine.ends.keys() == requests.keys()
    for name, r in requests.items():
        whole = answer(r)
        if name in broken:
            assert engine.tokens[name] == []
        elif engine.ends[name] == "abort":
            assert engine.tokens[name] == whole[: len(engine.tokens[name])]
        else:
            assert engine.tokens[name] == whole
