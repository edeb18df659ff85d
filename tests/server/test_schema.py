"""schemathesis over the server's own OpenAPI document, against a real server: no 5xx, nothing that the document does not say.

Two documents are put to it. The server's own, as it is: most of what is drawn from it is refused, since a request that has
every field asks for things that exclude each other. And one that is narrowed to requests which can be answered, so that
hundreds reach the engine.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mla_serve.server.protocol import ChatBody, CompletionBody
from tests.conftest import SEED
from tests.server.conftest import MODEL, Server, start_server

Json = dict[str, Any]
Record = Callable[[str, object], None]

CHECKS = [
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_headers_conformance",
    "response_schema_conformance", "negative_data_rejection", "unsupported_method", "allow_header_conformance",
]  # fmt: skip
TOKENS = 8
VOCABULARY = 256
LEFT_OUT = {*ChatBody.REFUSED, *CompletionBody.REFUSED, "best_of", "previous_response_id", "conversation", "background",
            "truncation", "include", "min_tokens", "logit_bias", "continue_final_message", "chat_template_kwargs",
            "stream_options", "top_logprobs", "tools", "tool_choice"}  # fmt: skip
STRUCTURES = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice")
# Fields that hold a JSON schema, a tool's arguments or what is refused by name: all else in a body is typed.
FREE = {"parameters", "schema", "json", "guided_json", "functions", "function_call", "audio", "documents", "conversation"}


@pytest.fixture(scope="module")
def short(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose answers are short, so that many of them fit into a minute."""
    running = start_server(tmp_path_factory.mktemp("schema") / "server.log", checkpoint, max_output_tokens=TOKENS)
    try:
        yield running.wait()
    finally:
        assert running.stop() == 0, running.output


def narrowed(document: Json) -> Json:
    """The document's generating routes, without what is refused by rules that a schema cannot say; one structure at a time."""
    document = copy.deepcopy(document)
    routes = {"/v1/completions": "CompletionBody", "/v1/chat/completions": "ChatBody", "/v1/responses": "ResponsesBody"}
    document["paths"] = {route: document["paths"][route] for route in routes}
    schemas = document["components"]["schemas"]
    name = {"type": "string", "minLength": 1, "maxLength": 8}
    schemas["Message"]["properties"]["content"] = name
    schemas["Message"]["required"] = ["role", "content"]
    schemas["Message"]["properties"]["role"] = {"enum": ["system", "user"]}
    bounds: Json = {
        "model": {"const": MODEL}, "prompt": {"anyOf": [name, _some(_id())]}, "n": {"enum": [1, 2]},
        "max_tokens": {"enum": [1, TOKENS]}, "max_completion_tokens": {"enum": [1, TOKENS]},
        "max_output_tokens": {"enum": [1, TOKENS]}, "stop": _some(name), "stop_token_ids": _some(_id()), "input": name,
        "guided_choice": _some(name), "reasoning": {"type": "null"}, "text": {"type": "null"},
    }  # fmt: skip
    for route, body in routes.items():
        whole = schemas[body]
        whole["additionalProperties"] = False
        whole["properties"] = {key: bounds.get(key, value) for key, value in whole["properties"].items() if key not in LEFT_OUT}
        variants = []
        for kept in (None, *(key for key in STRUCTURES if key in whole["properties"])):
            variant = copy.deepcopy(whole)
            variant["properties"] = {k: v for k, v in whole["properties"].items() if k not in STRUCTURES or k == kept}
            if kept is not None:
                variant["required"] = [*whole["required"], kept]
            variants.append(variant)
        content = document["paths"][route]["post"]["requestBody"]["content"]["application/json"]
        content["schema"] = {"anyOf": variants}
    return document


def _id() -> Json:
    return {"type": "integer", "minimum": 0, "maximum": VOCABULARY - 1}


def _some(items: Json) -> Json:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": 3}


def fuzz(server: Server, directory: Path, document: Json, phases: str, seconds: int, mode: str = "all") -> Json:
    """Runs schemathesis for so long: cases, failures (none), and answers by status, as the server's log has them."""
    before = len(server.output)
    (directory / "document.json").write_text(json.dumps(document))
    report = directory / "report.json"
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", str(directory / "document.json"), "--url", server.url,
        "--checks", ",".join(CHECKS), "--phases", phases, "--max-time", str(seconds), "--mode", mode, "--seed", str(SEED),
        "--continue-on-failure", "--suppress-health-check", "all", "--generation-database", "none", "--request-timeout", "60",
        "--warnings", "off", "--no-color", "--output-sanitize", "false", "--report", "json", "--report-json-path", str(report),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=seconds + 240, check=False)
    assert done.returncode == 0, done.stdout[-12000:] + done.stderr[-3000:]
    found = json.loads(report.read_text())
    lines = [json.loads(line) for line in server.output[before:].splitlines() if line.startswith('{"time"')]
    statuses = Counter(line["status"] for line in lines)
    generated = sum(line["status"] == 200 and line.get("completion_tokens", 0) > 0 for line in lines)
    return {
        "cases": found["test_cases"]["generated"], "failures": len(found["failures"]), "phases": phases, "mode": mode,
        "operations": found["operations"]["tested"], "statuses": dict(sorted(statuses.items())),
        "answered_by_the_engine": generated, "seconds": round(found["running_time"], 1),
    }  # fmt: skip


def check(server: Server, directory: Path, seconds: int, record: Record | None = None) -> list[Json]:
    """Both documents, and that the server and its engine came through."""
    engine, document = server.engine_pid(), server.get("/openapi.json").json()
    parts: list[tuple[Json, str, str]] = [
        # What covers each keyword runs in soak alone: on some Pythons it can trip over a fault of their own parser.
        (document, "fuzzing" if record is None else "coverage,fuzzing", "all"),
        (narrowed(document), "fuzzing", "positive"),
    ]
    rows = []
    for asked, phases, mode in parts:
        rows.append(fuzz(server, directory, asked, phases, seconds // len(parts), mode))
        if record is not None:
            record("row", rows[-1])
    load = server.until_idle(5)
    assert (load["running"], load["waiting"], load["server_load"]) == (0, 0, 0)
    assert load["kv_pages_free"] == load["kv_pages_total"]
    assert server.engine_pid() == engine
    assert "Traceback" not in server.output
    assert not any(status >= 500 for row in rows for status in row["statuses"])
    assert rows[0]["operations"] == sum(map(len, document["paths"].values()))
    assert rows[1]["answered_by_the_engine"] >= 0.5 * rows[1]["cases"]
    return rows


def test_bodies_are_typed(short: Server) -> None:
    """No field of a body takes any object at all, but for those that hold somebody's JSON schema or are refused by name."""
    document = short.get("/openapi.json").json()
    free = set()

    def walk(schema: Any, name: str) -> None:
        if isinstance(schema, list):
            for each in schema:
                walk(each, name)
        elif isinstance(schema, dict):
            if schema.get("type") == "object" and schema.get("additionalProperties") is True and "properties" not in schema:
                free.add(name)
            if not {"type", "$ref", "anyOf", "const", "enum", "oneOf", "allOf"} & schema.keys():
                free.add(name)
            for key in ("anyOf", "oneOf", "allOf", "items"):
                walk(schema.get(key), name)
            for key, value in schema.get("properties", {}).items():
                walk(value, key)

    for name, schema in document["components"]["schemas"].items():
        if name.startswith(("Chat", "Completion", "Responses", "Tokenize", "Detokenize", "Input", "Message", "Tool")):
            walk(schema, name)
    assert free <= FREE


def test_a_part(short: Server, tmp_path: Path) -> None:
    rows = check(short, tmp_path, 40)
    assert sum(row["cases"] for row in rows) > 200


@pytest.mark.slow("schema")
@pytest.mark.timeout(1200)
def test_five_minutes(short: Server, tmp_path: Path, record_property: Record) -> None:
    rows = check(short, tmp_path, 300, record_property)
    cases = sum(row["cases"] for row in rows)
    record_property("figures", {"cases": cases, "asked": 2000, "seed": SEED, "checks": CHECKS})
    assert cases >= 2000
