"""The batch-invariant policy through the engine's core: the same bits alone, in a batch, in another, and in any budget."""

import pytest
import torch

from mla_serve.engine.base import Request, Sampling
from mla_serve.engine.embedded.core import EngineCore
from mla_serve.engine.embedded.kv_cache import PageAllocator
from mla_serve.engine.embedded.scheduler import Scheduler
from mla_serve.errors import UserError
from mla_serve.selection.invariant import CHUNK
from tests.engine.conftest import VOCAB


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def request(name, length, max_tokens=4, **sampling):
    tokens = torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    return Request(name, tokens, Sampling(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens} | sampling))


ASKED = [  # two chunks and a bit, one token, exactly a chunk, a chunk and one token (which decodes), and some short ones
    request("long", 2 * CHUNK + 77),
    request("one", 1),
    request("chunk", CHUNK, temperature=1.0, seed=7),
    request("chunk and one", CHUNK + 1),
    request("short", 33, 12, temperature=1.0, seed=3, top_p=0.9),
    request("other", 33, 9),
]


def logits_of(core, *requests):
    """Every row of logits that each request was sampled from, in order."""
    rows = {each.id: [] for each in requests}
    run = core.runner.run

    def keep(works):
        logits = run(works)
        for row, work in zip(logits, [work for work in works if work.samples], strict=True):
            rows[work.seq.id].append(row.clone())
        return logits

    core.runner.run = keep
    for each in requests:
        core.add(each)
    while core.has_work:
        core.step()
    core.runner.run = run
    return {name: torch.stack(each) for name, each in rows.items()}


@pytest.fixture(scope="module")
def make(settings):
    return lambda **changes: EngineCore(settings(policy="batch-invariant", **changes))


@pytest.fixture(scope="module")
def alone(make):
    core = make()
    return {each.id: logits_of(core, each)[each.id] for each in ASKED}


def same(alone, found):
    assert found
    return all(torch.equal(rows, alone[name]) for name, rows in found.items())


def test_equal_bits_alone_in_a_batch_permuted_and_in_other_company(make, alone):
    core = make()
    assert same(alone, logits_of(core, *ASKED))
    assert same(alone, logits_of(core, *reversed(ASKED)))
    assert same(alone, logits_of(core, ASKED[4], ASKED[0]))
    strangers = [request(f"stranger {n}", n, 6, temperature=1.5) for n in (5, 90, 300)]
    found = logits_of(core, *strangers, *ASKED[2:5])
    assert same(alone, {name: rows for name, rows in found.items() if name in alone})


@pytest.mark.parametrize("changes", [{"max_tokens": CHUNK + 6}, {"max_tokens": 700}, {"max_tokens": 4096}, {"max_requests": 2}])
def test_equal_bits_whatever_the_budget_of_a_step(make, alone, changes):
    assert same(alone, logits_of(make(**changes), *ASKED))


def test_equal_bits_after_a_preemption(make):
    """The pool is too small for what is generated: the youngest lose their pages and repeat their steps, token by token."""
    asked = [request(f"r{n}", 30 + n, 60, temperature=1.0, seed=n) for n in range(4)]
    roomy, tight = make(), make(num_pages=14)
    found = logits_of(tight, *asked)
    assert tight.stats().preemptions > 0
    assert all(torch.equal(found[each.id], logits_of(roomy, each)[each.id]) for each in asked)


def test_the_ordinary_policy_does_change_bits(settings):
    """Else the tests above would prove nothing."""
    core = EngineCore(settings())
    alone = {each.id: logits_of(core, each)[each.id] for each in ASKED}
    assert not same(alone, logits_of(core, *ASKED))


def test_one_kernel_per_phase_and_no_prefix_cache(make):
    core = make(prefix_cache=True)
    for _ in range(2):
        logits_of(core, *ASKED)
    assert core.scheduler.prefix_hits == 0
    chosen = {}
    for decision in core.decisions():
        assert decision["policy"] == "batch-invariant"
        chosen.setdefault(decision["bucket"]["phase"], set()).add(str((decision["winner"], decision["padding"])))
    assert {phase: len(kernels) for phase, kernels in chosen.items()} == {"prefill": 1, "context": 1, "decode": 1}


def test_a_budget_without_room_for_a_chunk_is_refused(make):
    with pytest.raises(UserError, match=f"chunks of {CHUNK} tokens beside what decodes"):
        make(max_tokens=CHUNK)
    core = make(max_tokens=CHUNK + 2)
    assert core.scheduler.max_requests == 2


def test_cuts_depend_on_own_positions_alone():
    scheduler = Scheduler(PageAllocator(64, 4), max_requests=3, max_tokens=16, chunk=8)
    for name, length in (("a", 21), ("b", 5), ("c", 30)):
        scheduler.add(request(name, length))
    cuts = {"a": [], "b": [], "c": []}
    for _ in range(4):
        works = scheduler.schedule()
        for work in works:
            cuts[work.seq.id].append((work.start, work.count))
            work.seq.num_computed = work.start + work.count
            if work.samples:
                work.seq.token_ids.append(9)
    assert cuts["a"][:4] == [(0, 8), (8, 8), (16, 5), (21, 1)]
    assert cuts["b"][:2] == [(0, 5), (5, 1)]
    assert cuts["c"][0] == (0, 8)
