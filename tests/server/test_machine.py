"""Random requests, aborts and disconnects against a real server: afterwards nothing runs and every page is free."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests.conftest import SEED
from tests.server.conftest import Server

Json = dict[str, Any]

PARAMETERS: Json = {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["客", "x"]}}, "required": ["b"],
    "additionalProperties": False,
}  # fmt: skip
FUNCTION: Json = {"name": "f", "parameters": PARAMETERS}
STRUCTURES: list[Json] = [
    {}, {"structured_outputs": {"choice": ["one", "客单价"]}}, {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"regex": "[ab]{3,9}"}}, {"guided_json": PARAMETERS}, {"guided_choice": ["👩‍👩‍👧", "👩"]},
]  # fmt: skip
BAD = [
    b"", b"[]", b"{", b"\xff", b'{"prompt": 5}', b'{"prompt": "a", "n": 0}', b'{"messages": []}', b'{"prompt": NaN}',
    b'{"prompt": "a", "stop": [""]}', b'{"prompt": "a", "structured_outputs": {"regex": "("}}', b"[" * 9999,
    b'{"prompt": "a", "max_tokens": 99999999}', b'{"messages": [{"role": "user", "content": "a"}], "guided_regex": "[b-a]"}',
    b'{"messages": [{"role": "user", "content": "a"}], "tool_choice": "required"}', b'{"input": "a", "text": 1}',
    b'{"prompt": "a", "guided_json": {"type": "nothing"}}', b'{"input": "\\ud800"}', b'{"input": [], "stream": true}',
]  # fmt: skip
ROUTES = ["/v1/completions", "/v1/chat/completions", "/v1/responses"]
MOST_STREAMS = 12

bodies = st.fixed_dictionaries(
    {"tokens": st.integers(1, 400)},
    optional={
        "n": st.integers(1, 4),
        "seed": st.integers(0, 2**31),
        "temperature": st.sampled_from([0, 1.0]),
        "stop": st.lists(st.sampled_from(["a", "zz", "客"]), max_size=2),
        "ignore_eos": st.booleans(),
        "priority": st.integers(-3, 3),
        "logprobs": st.booleans(),
        "presence_penalty": st.sampled_from([-2, 0, 1.5]),
    },
)
texts = st.one_of(st.text("aX客é ", min_size=1, max_size=30), st.sampled_from(["a" * 600, "<|stop|>", "<|unicode|>"]))
structures = st.sampled_from(STRUCTURES)
routes = st.sampled_from(ROUTES)


def request_for(route: str, fields: Json, structure: Json, text: str) -> Json:
    """A body that the route takes."""
    fields = dict(fields)
    tokens = fields.pop("tokens")
    if route == "/v1/responses":
        kept = {name: value for name, value in fields.items() if name in ("seed", "temperature", "priority")}
        return {"input": text, "max_output_tokens": tokens, **kept}
    logprobs = fields.pop("logprobs", None)
    if route == "/v1/completions":
        return {"prompt": text, "max_tokens": tokens, **fields, **structure, **({"logprobs": 1} if logprobs else {})}
    chat = {"messages": [{"role": "user", "content": text}], "max_tokens": tokens, **fields, **structure}
    return {**chat, **({"logprobs": True} if logprobs else {})}


def call_for(route: str, choice: Any, tokens: int) -> Json:
    """A body that must call the tool; `choice` is "required", or a name."""
    named = choice != "required"
    if route == "/v1/responses":
        forced: Any = {"type": "function", "name": choice} if named else choice
        return {"input": "X", "tools": [{"type": "function", **FUNCTION}], "tool_choice": forced, "max_output_tokens": tokens}
    forced = {"type": "function", "function": {"name": choice}} if named else choice
    tool = {"type": "function", "function": FUNCTION}
    return {"messages": [{"role": "user", "content": "X"}], "tools": [tool], "tool_choice": forced, "max_tokens": tokens}


class Machine(RuleBasedStateMachine):
    """Clients of one server; `streams` are open ones."""

    server: Server
    done: Counter[str]

    def __init__(self) -> None:
        super().__init__()
        self.http = httpx.Client(base_url=self.server.url, timeout=60)
        self.streams: list[tuple[contextlib.ExitStack, Iterator[str]]] = []

    @initialize()
    def at_rest(self) -> None:
        self.check_rest()

    @rule(route=routes, fields=bodies, structure=structures, text=texts)
    def ask(self, route: str, fields: Json, structure: Json, text: str) -> None:
        fields["tokens"] = min(fields["tokens"], 30)
        answer = self.http.post(route, json=request_for(route, fields, structure, text))
        assert answer.status_code == 200, answer.text
        self.done["answers"] += 1

    @rule(route=routes, fields=bodies, structure=structures, text=texts, lines=st.integers(0, 6))
    def open_stream(self, route: str, fields: Json, structure: Json, text: str, lines: int) -> None:
        self.stream(route, request_for(route, fields, structure, text), lines)

    @rule(route=st.sampled_from(ROUTES[1:]), choice=st.sampled_from(["required", "f"]), tokens=st.integers(1, 60))
    def call_a_tool(self, route: str, choice: str, tokens: int) -> None:
        answer = self.http.post(route, json=call_for(route, choice, tokens))
        assert answer.status_code == 200, answer.text
        self.done["calls"] += 1

    @rule(route=st.sampled_from(ROUTES[1:]), choice=st.sampled_from(["required", "f"]), lines=st.integers(0, 4))
    def open_a_call(self, route: str, choice: str, lines: int) -> None:
        self.stream(route, call_for(route, choice, 60), lines)

    def stream(self, route: str, body: Json, lines: int) -> None:
        if len(self.streams) >= MOST_STREAMS:
            return
        stack = contextlib.ExitStack()
        response = stack.enter_context(self.http.stream("POST", route, json={**body, "stream": True}))
        assert response.status_code == 200, response.read()
        iterator = response.iter_lines()
        self.streams.append((stack, iterator))
        for _ in range(lines):
            next(iterator, None)
        self.done["streams"] += 1

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        stack, _ = self.streams.pop(data.draw(st.integers(0, len(self.streams) - 1)))
        stack.close()
        self.done["left"] += 1

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def read_to_the_end(self, data: st.DataObject) -> None:
        stack, lines = self.streams.pop(data.draw(st.integers(0, len(self.streams) - 1)))
        with stack:
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert not any(event.get("error") for event in events), events
        self.done["read"] += 1

    @rule(route=routes, fields=bodies, structure=structures, seconds=st.floats(0.001, 0.3))
    def leave_before_the_answer(self, route: str, fields: Json, structure: Json, seconds: float) -> None:
        """Gives up an answer that is not streamed, while it waits, is prefilled, or is half made."""
        body = request_for(route, {**fields, "tokens": 400}, structure, "XY")
        with contextlib.suppress(httpx.ReadTimeout):
            self.http.post(route, json=body, timeout=httpx.Timeout(60, read=seconds))
        self.done["given up"] += 1

    @rule(route=routes, body=st.sampled_from(BAD))
    def ask_wrongly(self, route: str, body: bytes) -> None:
        answer = self.http.post(route, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400, answer.text
        self.done["refused"] += 1

    def check_rest(self) -> None:
        load = self.server.until_idle(5)
        assert (load["running"], load["waiting"], load["server_load"]) == (0, 0, 0)
        assert load["kv_pages_free"] == load["kv_pages_total"]

    def teardown(self) -> None:
        for stack, _ in self.streams:
            stack.close()
        self.http.close()
        self.check_rest()


def run(server: Server, examples: int) -> Json:
    """Counts of what was done."""
    done: Counter[str] = Counter()
    engine = server.engine_pid()
    machine = type("AServer", (Machine,), {"server": server, "done": done})
    quiet = settings(
        max_examples=examples, stateful_step_count=25, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(seed(SEED)(machine), settings=quiet)
    assert server.engine_pid() == engine
    assert "Traceback" not in server.output
    return dict(done)


def test_nothing_is_left_behind(server: Server) -> None:
    assert min(run(server, 80).values()) > 0


@pytest.mark.slow("machine")
@pytest.mark.timeout(1800)
def test_nothing_is_left_behind_for_long(server: Server, record_property: Callable[[str, object], None]) -> None:
    record_property("figures", {"seed": SEED, "done": run(server, 600)})
