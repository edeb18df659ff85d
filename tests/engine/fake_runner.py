"""A runner without a model: its cache remembers which tokens each slot stands for, and checks what it is asked to read."""

from hashlib import blake2b

from mla_serve.engine.base import Request, Sampling
from mla_serve.engine.embedded.kv_cache import PageAllocator
from mla_serve.engine.embedded.scheduler import Scheduler
from mla_serve.engine.embedded.sequence import Sampled

VOCAB = 50


def next_token(tokens):
    """The fake model: a token from everything before it."""
    return blake2b(bytes(tokens), digest_size=1).digest()[0] % VOCAB


def answer(request, eos=()):
    """What the fake model says to a request, alone and without a cache."""
    tokens = list(request.prompt_token_ids)
    ends = set(request.sampling.stop_token_ids) | (set() if request.sampling.ignore_eos else set(eos))
    for _ in range(request.sampling.max_tokens):
        tokens.append(next_token(tokens))
        if tokens[-1] in ends:
            break
    return tokens[len(request.prompt_token_ids) :]


def request(name, prompt, max_tokens=8, **sampling):
    return Request(str(name), list(prompt), Sampling(max_tokens=max_tokens, temperature=0.0, **sampling))


class FakeRunner:
    """`broken`: ids of requests whose output is no number. A slot of theirs is poison until `zero_pages` gets its page."""

    def __init__(self, page_size, broken=()):
        self.page_size = page_size
        self.broken = set(broken)
        self.cache = {}  # (page, offset) -> the tokens up to and including that slot's
        self.batches = []

    def slot(self, seq, i):
        return seq.pages[i // self.page_size], i % self.page_size

    def zero_pages(self, pages):
        assert len(set(pages)) == len(pages)
        for page in pages:
            for offset in range(self.page_size):
                self.cache.pop((page, offset), None)

    def run(self, works):
        assert works
        assert len({w.seq for w in works}) == len(works)
        self.batches.append([(w.seq.id, w.start, w.count) for w in works])
        absorbed = [w.count == 1 and w.start > 0 for w in works]
        assert absorbed == sorted(absorbed, reverse=True)
        out = []
        for w in works:
            assert w.count >= 1
            assert w.start + w.count <= len(w.seq.token_ids)
            broken = w.seq.id in self.broken
            for i in range(w.start):
                held = self.cache.get(self.slot(w.seq, i))
                assert held == w.seq.token_ids[: i + 1] or (broken and held == "poison")
            fresh = [(page, o) for page in w.seq.pages[w.start // self.page_size :] for o in range(self.page_size)]
            assert broken or not any(self.cache.get(slot) == "poison" for slot in fresh), "poison in a page handed out again"
            for i in range(w.start, w.start + w.count):
                self.cache[self.slot(w.seq, i)] = "poison" if broken else w.seq.token_ids[: i + 1]
            if w.samples:
                out.append(None if broken else Sampled(next_token(w.seq.token_ids)))
        return out


class Engine:
    """Scheduler and FakeRunner joined as the core joins the real ones; collects what each client would see."""

    def __init__(self, num_pages=16, page_size=4, max_requests=4, max_tokens=8, eos=(), prefix_cache=True, broken=()):
        self.pages = PageAllocator(num_pages, page_size, prefix_cache=prefix_cache)
        self.scheduler = Scheduler(self.pages, max_requests=max_requests, max_tokens=max_tokens, eos_token_ids=eos)
        self.runner = FakeRunner(page_size, broken)
        self.tokens = {}
        self.ends = {}

    def add(self, *requests):
        for r in requests:
            self.tokens[r.id] = []
            self.scheduler.add(r)

    def abort(self, name):
        self.see(self.scheduler.abort(self.scheduler.find(name)))

    def see(self, step):
        assert step.id not in self.ends, "a step after the last one"
        self.tokens[step.id] += step.token_ids
        assert step.completion_tokens == len(self.tokens[step.id])
        if step.finish_reason:
            self.ends[step.id] = step.finish_reason

    def step(self):
        works = self.scheduler.schedule()
        assert sum(w.count for w in works) <= self.scheduler.max_tokens
        assert len(self.scheduler.running) <= self.scheduler.max_requests
        self.runner.zero_pages(self.scheduler.take_suspect_pages())
        for step in self.scheduler.advance(works, self.runner.run(works)):
            self.see(step)
        self.pages.check()

    def run(self, limit=2000):
        for _ in range(limit):
            if not self.scheduler.has_work:
                return self
            self.step()
        raise AssertionError("no end in sight")
