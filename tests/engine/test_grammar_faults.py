"""Grammars that cannot be followed, take too long or break: their request ends, the others go on."""

import re
import threading
import time

import pytest

from mla_serve.engine.embedded import structured as module

REFUSED = [
    ("choice", "[]", "JSON list of strings"),
    ("choice", '["a", 1]', "JSON list of strings"),
    ("choice", "a, b", "JSON list of strings"),
    ("choice", '["x<｜end▁of▁sentence｜>"]', "holds the model's end token"),
    ("choice", '["\\ud83d"]', "cannot"),
    ("regex", "(", "regular expression cannot be followed: .*parenthesis is not closed"),
    ("regex", "(?=a)b", "regular expression cannot be followed: .*Lookahead"),
    ("regex", "(" * 30000 + "a" + ")" * 30000, "cannot be followed"),
    ("regex", "a" * (module.MAX_TEXT + 1), "has 131073 bytes, and the limit is 131072"),
    ("json_schema", "{", "schema is not JSON"),
    ("json_schema", "[1]", "cannot be followed"),
    ("json_schema", '{"type": "nope"}', 'schema cannot be followed: Unsupported type "nope"'),
    ("json_schema", '{"a":' * 3000 + "1" + "}" * 3000, "deeper than 64 levels"),
]


@pytest.mark.parametrize(("kind", "value", "message"), REFUSED)
def test_a_grammar_that_cannot_be_followed_refuses_that_request_alone(driver, tokenizer, asks, kind, value, message):
    good = asks("good", "choice", ["Paris"])
    driver.add(good, asks("plain"))
    try:
        driver.run(asks("bad", kind, value))
    except ValueError as error:
        driver.refused["bad"] = str(error)
        driver.run()
    assert re.search(message, driver.refused.pop("bad"))
    assert driver.refused == {}
    assert tokenizer.decode(driver.tokens("good")[:-1]) == "Paris"
    assert "tiny demo model" in tokenizer.decode(driver.tokens("plain"))


class Gate:
    """Holds up one kind of call until it is opened."""

    def __init__(self, function, when):
        self.function, self.when = function, when
        self.open, self.calls = threading.Event(), []

    def __call__(self, *args):
        self.calls.append(args)
        if self.when(*args):
            assert self.open.wait(60)
        return self.function(*args)


def test_others_go_on_while_a_grammar_is_compiled(demo, tokenizer, asks, monkeypatch):
    driver = demo()
    gate = Gate(driver.core.grammars._compile, lambda structured: True)
    monkeypatch.setattr(driver.core.grammars, "_compile", gate)
    driver.add(asks("slow", "choice", ["Paris"]), asks("gone", "choice", ["Rome"]), asks("plain"))
    with pytest.raises(ValueError, match="'slow' is running"):
        driver.add(asks("slow"))
    driver.steps["slow"] = []
    while driver.core.has_work:
        driver.turn()
    assert driver.last("plain").finish_reason == "stop"
    assert driver.core.compiling
    assert driver.core.stats().waiting == 2
    driver.abort("gone")
    assert (driver.last("gone").finish_reason, driver.last("gone").token_ids) == ("abort", [])
    assert driver.core.stats().waiting == 1
    gate.open.set()
    driver.run(asks("after", "choice", ["Rom"]))
    assert [structured.value for (structured,) in gate.calls] == ['["Paris"]', '["Rom"]'], "nobody waits for Rome"
    assert tokenizer.decode(driver.tokens("slow")[:-1]) == "Paris"
    assert driver.steps["slow"][0].queue_seconds > 0


def test_a_grammar_that_takes_too_long_is_refused_and_the_next_is_compiled(demo, tokenizer, asks, monkeypatch):
    driver = demo()
    driver.run(asks("r", "choice", ["a"]))  # the tokenizer is there
    monkeypatch.setattr(module, "COMPILE_SECONDS", 0.2)
    gate = Gate(driver.core.grammars._compile, lambda structured: structured.kind == "regex")
    monkeypatch.setattr(driver.core.grammars, "_compile", gate)
    for round in range(module.SPARE_THREADS):
        driver.run(asks(f"bad{round}", "regex", "a"), asks(f"good{round}", "choice", ["Paris"]))
        assert "not compiled within 0.2 seconds" in driver.refused.pop(f"bad{round}")
        assert tokenizer.decode(driver.tokens(f"good{round}")[:-1]) == "Paris"
    driver.run(asks("bad", "regex", "a"), asks("behind", "choice", ["Paris"]))
    assert "not compiled within" in driver.refused.pop("bad")
    assert "busy with grammars" in driver.refused.pop("behind")
    driver.run(asks("after", "choice", ["Paris"]), asks("plain"))
    assert "busy with grammars" in driver.refused.pop("after")
    assert "tiny demo model" in tokenizer.decode(driver.tokens("plain"))
    gate.open.set()
    while driver.refused or "again" not in driver.steps:  # the threads come back
        driver.refused.clear()
        driver.run(asks("again", "choice", ["Paris"]))
    assert tokenizer.decode(driver.tokens("again")[:-1]) == "Paris"


@pytest.mark.parametrize("fault", ["hangs", "burns", "raises", "dead end", "takes nothing"])
def test_a_matcher_that_misbehaves_ends_its_request_alone(demo, tokenizer, asks, monkeypatch, fault):
    driver = demo()
    open_again = threading.Event()
    real = module.TrieMatcher

    class Planted(real):
        filled = 0

        def fill(self, words):
            self.filled += 1
            self.since = time.thread_time()
            if self.filled == 3:
                if fault == "hangs":
                    assert open_again.wait(60)
                elif fault == "burns":
                    while time.thread_time() < self.since + 0.3:
                        sum(range(1000))
                elif fault == "raises":
                    raise RuntimeError("a state is lost")
                elif fault == "dead end":
                    return
            super().fill(words)

        def accept(self, token):
            return super().accept(token) and not (fault == "takes nothing" and self.filled == 3)

    planted = []

    def make(trie, ends):
        planted.append((Planted if not planted else real)(trie, ends))
        return planted[-1]

    monkeypatch.setattr(module, "TrieMatcher", make)
    monkeypatch.setattr(module, "FILL_CPU_SECONDS", 0.2)
    monkeypatch.setattr(module, "FILL_SECONDS", 0.3 if fault == "hangs" else 60.0)
    driver.run(asks("bad", "choice", ["客单价"]), asks("good", "choice", ["客单价"]), asks("plain"))
    open_again.set()
    assert driver.last("bad").finish_reason == "error"
    expected = {
        "hangs": "takes too long", "burns": "takes too long", "raises": "a state is lost", "dead end": "no token",
        "takes nothing": "does not allow",
    }  # fmt: skip
    assert expected[fault] in driver.last("bad").error
    assert len(driver.tokens("bad")) == 2
    assert tokenizer.decode(driver.tokens("good")[:-1]) == "客单价"
    assert "tiny demo model" in tokenizer.decode(driver.tokens("plain"))


def test_nan_in_a_structured_row_ends_it_alone(demo, tokenizer, asks, monkeypatch):
    driver = demo()
    run = driver.core.runner.run

    def spoil(works):
        logits = run(works).clone()
        for row, work in enumerate(work for work in works if work.samples):
            if work.seq.id == "bad" and work.seq.num_generated == 2:
                logits[row, 700] = float("nan")  # a token that the grammar rules out
        return logits

    monkeypatch.setattr(driver.core.runner, "run", spoil)
    driver.run(asks("bad", "choice", ["客单价"]), asks("good", "choice", ["客单价"]))
    assert "not a number" in driver.last("bad").error
    assert tokenizer.decode(driver.tokens("good")[:-1]) == "客单价"
