"""The engine core on a real model: the same tokens whatever the pool, the chunks, the cache and the company."""

import math

import msgspec
import pytest
import torch

from mla_serve.engine.base import Request, Sampling
from mla_serve.engine.embedded.core import EngineCore
from mla_serve.errors import UserError
from tests.engine.conftest import EOS, MAX_LEN, VOCAB


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def prompt(length, salt=0):
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(1000 * salt + length)).tolist()


def request(name, length, max_tokens=12, salt=0, **sampling):
    sampling = {"temperature": 0.0, "ignore_eos": True} | sampling
    return Request(name, prompt(length, salt), Sampling(max_tokens=max_tokens, **sampling))


class Client:
    """Collects what the requests of one core are told."""

    def __init__(self, core):
        self.core = core
        self.tokens, self.logprobs, self.last = {}, {}, {}

    def add(self, *requests):
        for each in requests:
            self.tokens[each.id], self.logprobs[each.id] = [], []
            self.core.add(each)

    def see(self, step):
        self.tokens[step.id] += step.token_ids
        self.logprobs[step.id] += step.logprobs or []
        if step.finish_reason:
            self.last[step.id] = step

    def step(self):
        for step in self.core.step():
            self.see(step)

    def run(self, *requests):
        """Adds and runs to the end; the tokens of these requests, in order."""
        self.add(*requests)
        while self.core.has_work:
            self.step()
        self.core.scheduler.pages.check()
        assert self.core.stats().kv_pages_free == self.core.stats().kv_pages_total
        return [self.tokens[each.id] for each in requests]


@pytest.fixture(scope="module")
def roomy(settings):
    """A client of a core with room for everything and no prefix cache."""
    return Client(EngineCore(settings(prefix_cache=False)))


def mixed(name):
    """Greedy and seeded requests of several lengths."""
    return [
        request(f"{name}-greedy", 33, 40),
        request(f"{name}-seeded", 17, 40, temperature=1.0, seed=2**64 - 1),
        request(f"{name}-nucleus", 50, 40, temperature=0.8, top_p=0.9, top_k=40, seed=-5),
        request(f"{name}-one", 1, 40, temperature=2.0, seed=7),
    ]


def test_tokens_vary(roomy):
    """Else the comparisons below would prove nothing."""
    for tokens in roomy.run(*mixed("vary")):
        assert len(set(tokens)) > 8


def test_preemption_continues_as_if_nothing_happened(settings, roomy):
    for prefix_cache in (True, False):
        tight = Client(EngineCore(settings(num_pages=12, page_size=16, prefix_cache=prefix_cache)))
        assert tight.run(*mixed("p")) == roomy.run(*mixed("p"))
        assert tight.core.stats().preemptions > 0
        assert tight.core.stats().generation_tokens == 160


@pytest.mark.parametrize(("max_tokens", "page_size", "context_chunk"), [(16, 16, 4096), (7, 4, 32), (300, 64, 100)])
def test_e01_chunks_and_pages_change_nothing(settings, roomy, max_tokens, page_size, context_chunk):
    """E01, in small: one prompt of many chunks, tokens and logprobs."""
    chunked = Client(EngineCore(settings(max_tokens=max_tokens, page_size=page_size, context_chunk=context_chunk)))
    long = request("long", 333, logprobs=3)
    for _ in range(2):  # the second time with the prefix cached
        assert chunked.run(long) == roomy.run(long)
        for mine, other in zip(chunked.logprobs["long"], roomy.logprobs["long"], strict=True):
            assert mine.logprob == pytest.approx(other.logprob, abs=1e-3)
            assert [token for token, _ in mine.top] == [token for token, _ in other.top]
    assert chunked.core.scheduler.prefix_hits > 0


def test_e02_a_shared_prefix_and_a_wholly_cached_request(settings, roomy):
    """E02: prefix caching on, prompts whole; two with the same prefix, then one that is all cached, page-aligned and not."""
    core = Client(EngineCore(settings(page_size=16)))
    prefix = prompt(256, salt=4)
    greedy = Sampling(max_tokens=10, temperature=0.0, ignore_eos=True)
    asked = [
        Request("first", [*prefix, *prompt(9)], greedy),
        Request("second", [*prefix, *prompt(20)], greedy),
        Request("aligned", prefix, greedy),
        Request("again", [*prefix, *prompt(9)], greedy),
    ]
    cached = [core.run(each)[0] for each in asked]
    assert cached == roomy.run(*asked)
    assert core.core.scheduler.prefix_hits == 256 + 240 + 256


def test_s08_a_seeded_request_does_not_depend_on_its_mates(roomy):
    """S08: alone, then beside unseeded and greedy requests that come and go."""
    mine = request("mine", 29, 30, temperature=1.0, seed=42)
    (alone,) = roomy.run(mine)
    mates = [request("m1", 60, 5, temperature=1.0), request("m2", 3, 9), request("m3", 100, 30, temperature=1.5, top_p=0.8)]
    assert roomy.run(*mates, mine)[-1] == alone
    assert roomy.run(msgspec.structs.replace(mine, sampling=msgspec.structs.replace(mine.sampling, seed=43))) != [alone]


def test_requests_without_a_seed_differ(roomy):
    asked = [request(name, 20, 12, temperature=1.5) for name in "abc"]
    assert len({tuple(tokens) for tokens in roomy.run(*asked)}) == 3


def test_stop_ids_end_tokens_and_max_tokens(roomy):
    (whole,) = roomy.run(request("whole", 40, 20))
    stop = whole[6]
    end = whole.index(stop) + 1
    assert roomy.run(request("stop", 40, 20, stop_token_ids=(stop,))) == [whole[:end]]
    assert roomy.last["stop"].finish_reason == "stop"
    assert roomy.last["stop"].completion_tokens == end
    assert roomy.run(request("short", 40, 3)) == [whole[:3]]
    assert roomy.last["short"].finish_reason == "length"
    assert roomy.last["short"].prompt_tokens == 40


def test_the_models_own_end_token(roomy):
    """Made likely by drawing until it comes: the request ends there, and with ignore_eos it does not."""
    for seed in range(400):
        sampling = {"temperature": 3.0, "seed": seed}
        (tokens,) = roomy.run(request("r", 5, 30, ignore_eos=False, **sampling))
        if EOS in tokens:
            break
    assert tokens.index(EOS) == len(tokens) - 1
    assert roomy.last["r"].finish_reason == "stop"
    (longer,) = roomy.run(request("r", 5, 30, **sampling))
    assert longer[: len(tokens)] == tokens
    assert len(longer) == 30


def test_abort_frees_pages_at_any_time(settings):
    client = Client(EngineCore(settings(max_tokens=16)))
    client.add(request("prefilling", 100, 50), request("waiting", 30, 50))
    client.step()
    assert client.core.stats().kv_pages_free < 256
    for name in ("prefilling", "waiting"):
        client.see(client.core.abort(name))
        assert client.last[name].finish_reason == "abort"
    assert client.core.abort("prefilling") is None
    assert client.core.stats().kv_pages_free == 256
    client.add(request("decoding", 5, 50))
    for _ in range(9):
        client.step()
    step = client.core.abort("decoding")
    assert step.completion_tokens == 9
    assert not client.core.has_work
    assert client.core.stats().kv_pages_free == 256


def breaking(core, monkeypatch, spoil):
    """Replaces the runner's `run`: `spoil(works, logits)` may change the logits or raise."""
    run = core.runner.run
    monkeypatch.setattr(core.runner, "run", lambda works: spoil(works, run(works)))


def test_nan_ends_one_request_and_its_pages_are_zeroed(settings, roomy, monkeypatch):
    core = EngineCore(settings(num_pages=12, page_size=16))
    client = Client(core)
    zeroed = []
    zero = core.runner.zero_pages
    monkeypatch.setattr(core.runner, "zero_pages", lambda pages: (zeroed.extend(pages), zero(pages)))

    def spoil(works, logits):
        logits = logits.clone()
        for row, work in enumerate(work for work in works if work.samples):
            if work.seq.id == "bad" and work.seq.num_generated == 2:
                logits[row, 5] = math.nan
        return logits

    breaking(core, monkeypatch, spoil)
    good = [request("good", 20), request("later", 120, salt=1)]
    client.run(good[0], request("bad", 40))
    assert client.run(good[1]) == roomy.run(good[1])
    assert client.tokens["good"] == roomy.run(good[0])[0]
    assert client.last["bad"].finish_reason == "error"
    assert "not a number" in client.last["bad"].error
    assert len(client.tokens["bad"]) == 2
    assert len(zeroed) == 3


def test_a_request_that_cannot_be_computed_ends_alone(settings, roomy, monkeypatch):
    client = Client(EngineCore(settings()))

    def spoil(works, logits):
        if any(work.seq.id == "bad" for work in works):
            raise RuntimeError("a kernel chokes on this")
        return logits

    breaking(client.core, monkeypatch, spoil)
    good = [request("g1", 20), request("g2", 44, temperature=1.0, seed=3)]
    client.run(good[0], request("bad", 30), good[1])
    assert client.last["bad"].finish_reason == "error"
    assert "a kernel chokes on this" in client.last["bad"].error
    assert [client.tokens["g1"], client.tokens["g2"]] == roomy.run(*good)


@pytest.mark.parametrize("error", [RuntimeError("broken"), torch.AcceleratorError("lost")])
def test_an_engine_that_cannot_compute_anything_gives_up(settings, monkeypatch, error):
    client = Client(EngineCore(settings()))

    def spoil(works, logits):
        raise error

    breaking(client.core, monkeypatch, spoil)
    client.add(request("r", 5))
    with pytest.raises(type(error), match=str(error)):
        client.step()


def test_requests_that_fail_one_after_the_other_do_not_end_an_engine_that_works(settings, roomy, monkeypatch):
    client = Client(EngineCore(settings()))

    def spoil(works, logits):
        if any(work.seq.id.startswith("bad") for work in works):
            raise torch.OutOfMemoryError("a chunk of this size does not fit")
        return logits

    breaking(client.core, monkeypatch, spoil)
    for i in range(6):
        client.run(request(f"bad{i}", 30))
        assert client.last[f"bad{i}"].finish_reason == "error"
    good = request("good", 20)
    assert client.run(good) == roomy.run(good)
    assert client.core.stats().kv_pages_free == client.core.stats().kv_pages_total


def test_info_and_decisions(roomy):
    info = roomy.core.info
    assert (info.vocab_size, info.max_model_len, info.eos_token_ids) == (VOCAB, MAX_LEN, [EOS])
    assert (info.dtype, info.device) == ("float32", "cpu")
    roomy.run(request("d", 20))
    decisions = roomy.core.decisions()
    assert {decision["bucket"]["phase"] for decision in decisions} >= {"prefill", "decode"}
    assert all(decision["winner"] for decision in decisions)


def test_a_small_pool_lowers_the_limit_and_says_so(settings):
    core = EngineCore(settings(num_pages=8, page_size=16))
    assert core.info.max_model_len == 128
    with pytest.raises(ValueError, match=r"limit is 128 tokens .* prompt has 100 and max_tokens is 29"):
        core.add(request("r", 100, 29))
    core.add(request("r", 100, 28))
    with pytest.raises(ValueError, match="'r' is running"):
        core.add(request("r", 1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "int8"}, "no dtype 'int8'"),
        ({"policy": "luck"}, "no policy 'luck'"),
        ({"device": "abacus"}, "no device 'abacus'"),
        ({"device": "meta"}, "cannot compute on 'meta'"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"max_model_len": 10**6}, str(MAX_LEN)),
        ({"model": "/nowhere"}, "/nowhere"),
        ({"pins": {"decode": "warp-drive"}}, "warp-drive"),
        ({"pins": {"prefill": "torch-flash+native"}}, r"cannot run prefill .*needs equal QK and V widths \(48, 32\)"),
        ({"pins": {"context": "torch-flash+native"}}, r"cannot run context .*needs equal QK and V widths \(48, 32\)"),
        ({"pins": {"decode": "torch-flash"}}, "cannot run decode .*not the paged latent cache"),
    ],
)
def test_settings_that_cannot_be_served(settings, changes, message):
    with pytest.raises(UserError, match=message):
        EngineCore(settings(**changes))


def test_k14_an_unset_page_size_is_what_the_fastest_decode_takes(settings, monkeypatch, tmp_path):
    from mla_serve.selection.selector import Selector

    asked = []

    def page_size(self, dims, *, dtype, batch=8, kv_len=2048):
        asked.append((dims.latent, dtype, batch))
        return 32

    monkeypatch.setattr(Selector, "page_size", page_size)
    core = EngineCore(settings(page_size=None, max_requests=3))
    assert core.runner.page_size == 32
    assert asked == [(core.runner.config.dims.latent, "float32", 3)]
    assert EngineCore(settings(page_size=None, policy="batch-invariant", max_tokens=512)).runner.page_size == 16
    assert EngineCore(settings(page_size=64)).runner.page_size == 64
