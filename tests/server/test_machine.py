"""Random requests, aborts and disconnects against a real server: afterwards nothing runs and every page is free."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests.conftest import SEED
from tests.server.conftest import Server

TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
STRUCTURES = [
    {}, {"structured_outputs": {"choice": ["one", "客单价"]}}, {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"regex": "[ab]{3,9}"}},
]  # fmt: skip
BAD = [
    "", "[]", "{", '{"prompt": 5}', '{"prompt": "a", "n": 0}', '{"messages": []}', '{"prompt": "a", "stop": [""]}',
    '{"prompt": "a", "structured_outputs": {"regex": "("}}', '{"prompt": "a", "max_tokens": 99999999}',
]  # fmt: skip
ROUTES = ["/v1/completions", "/v1/chat/completions", "/v1/responses"]

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
    },
)


def request_for(route: str, fields: dict[str, Any], structure: dict[str, Any], text: str) -> dict[str, Any]:
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


class Machine(RuleBasedStateMachine):
    """Clients of one server; `streams` are open ones."""

    server: Server

    def __init__(self) -> None:
        super().__init__()
        self.http = httpx.Client(base_url=self.server.url, timeout=60)
        self.streams: list[tuple[contextlib.ExitStack, Iterator[str]]] = []

    @initialize()
    def at_rest(self) -> None:
        self.check_rest()

    @rule(
        route=st.sampled_from(ROUTES), fields=bodies, structure=st.sampled_from(STRUCTURES), text=st.text("aX客é ", min_size=1)
    )
    def ask(self, route: str, fields: dict[str, Any], structure: dict[str, Any], text: str) -> None:
        fields["tokens"] = min(fields["tokens"], 30)
        answer = self.http.post(route, json=request_for(route, fields, structure, text))
        assert answer.status_code == 200, answer.text

    @rule(route=st.sampled_from(ROUTES), fields=bodies, structure=st.sampled_from(STRUCTURES), lines=st.integers(0, 6))
    def open_stream(self, route: str, fields: dict[str, Any], structure: dict[str, Any], lines: int) -> None:
        if len(self.streams) > 12:
            return
        stack = contextlib.ExitStack()
        body = {**request_for(route, fields, structure, "XY"), "stream": True}
        response = stack.enter_context(self.http.stream("POST", route, json=body))
        assert response.status_code == 200
        iterator = response.iter_lines()
        self.streams.append((stack, iterator))
        for _ in range(lines):
            next(iterator, None)

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        stack, _ = self.streams.pop(data.draw(st.integers(0, len(self.streams) - 1)))
        stack.close()

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def read_to_the_end(self, data: st.DataObject) -> None:
        stack, lines = self.streams.pop(data.draw(st.integers(0, len(self.streams) - 1)))
        with stack:
            events = [line for line in lines if line.startswith("data: ")]
        assert not any("error" in json.loads(line[6:]) for line in events if line.startswith("data: {") and '"error":{' in line)

    @rule(fields=bodies)
    def call_a_tool(self, fields: dict[str, Any]) -> None:
        chat = {"messages": [{"role": "user", "content": "X"}], "tools": [TOOL], "tool_choice": "required", "max_tokens": 40}
        answer = self.http.post("/v1/chat/completions", json={**chat, "seed": fields.get("seed", 0)})
        assert answer.status_code == 200, answer.text

    @rule(route=st.sampled_from(ROUTES), body=st.sampled_from(BAD))
    def ask_wrongly(self, route: str, body: str) -> None:
        answer = self.http.post(route, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400, answer.text

    def check_rest(self) -> None:
        load = self.server.until_idle(5)
        assert (load["running"], load["waiting"], load["server_load"]) == (0, 0, 0)
        assert load["kv_pages_free"] == load["kv_pages_total"]

    def teardown(self) -> None:
        for stack, _ in self.streams:
            stack.close()
        self.check_rest()
        self.http.close()


def run(server: Server, examples: int) -> None:
    machine = type("AServer", (Machine,), {"server": server})
    quiet = settings(
        max_examples=examples, stateful_step_count=25, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(seed(SEED)(machine), settings=quiet)


def test_nothing_is_left_behind(server: Server) -> None:
    run(server, 15)


@pytest.mark.slow("machine")
def test_nothing_is_left_behind_for_long(server: Server) -> None:
    run(server, 150)
