"""Drives one core in this thread as its process does, and keeps what each request is told."""

import time


class Driver:
    def __init__(self, core):
        self.core = core
        self.steps, self.refused = {}, {}

    def add(self, *requests):
        for each in requests:
            self.steps[each.id] = []
            self.refused.pop(each.id, None)
            self.core.add(each)

    def see(self, *steps):
        for step in steps:
            seen = self.steps[step.id]
            assert not seen or seen[-1].finish_reason is None, "a step after the last one"
            seen.append(step)

    def abort(self, name):
        step = self.core.abort(name)
        if step is not None:
            self.see(step)

    def turn(self):
        """One turn of the process's loop."""
        self.refused |= self.core.take_compiled()
        if self.core.has_work:
            self.see(*self.core.step())
        elif self.core.compiling:
            time.sleep(0.001)

    def run(self, *requests):
        """Adds and runs until nothing is left; the tokens of these requests, in order."""
        self.add(*requests)
        while self.core.has_work or self.core.compiling:
            self.turn()
        self.core.scheduler.pages.check()
        stats = self.core.stats()
        assert (stats.running, stats.waiting, stats.kv_pages_free) == (0, 0, stats.kv_pages_total)
        return [self.tokens(each.id) for each in requests]

    def tokens(self, name):
        return [token for step in self.steps[name] for token in step.token_ids]

    def last(self, name):
        return self.steps[name][-1]
