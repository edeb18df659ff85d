"""From pydantic's list of errors to one sentence that names the field. Nothing here repeats what the client sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MAX_PATH = 100  # characters; a path may hold a key that the client chose

# What a field with several legal types takes, where a list of pydantic's branches would say less.
UNIONS = {
    "prompt": "a string, a list of strings, a list of token ids or a list of lists of token ids",
    "stop": "a string or a list of strings",
    "messages[].content": "a string or a list of text parts",
    "tool_choice": "none, auto, required or an object that names a function",
    "input": "a string or a list of items",
    "input[]": "a message, a function call, a function call's output or a reasoning item",
    "structured_outputs.json": "a JSON schema or its text",
    "guided_json": "a JSON schema or its text",
}

KINDS = {
    "string_type": "a string", "int_type": "an integer", "int_from_float": "an integer", "int_parsing_size": "an integer",
    "float_type": "a number", "finite_number": "a finite number", "bool_type": "true or false", "list_type": "a list",
    "dict_type": "an object", "model_type": "an object", "model_attributes_type": "an object",
    "string_unicode": "valid Unicode text",
}  # fmt: skip

BOUNDS = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


def _path(loc: Sequence[Any]) -> str:
    """("messages", 0, "content") as messages[0].content."""
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text[:MAX_PATH]


def _expectation(error: Mapping[str, Any]) -> str:
    """The end of "FIELD must ...", for one of pydantic's errors."""
    kind, ctx = str(error["type"]), error.get("ctx", {})
    if kind in KINDS:
        return f"be {KINDS[kind]}"
    if kind in BOUNDS:
        words, key = BOUNDS[kind]
        return f"be {words} {ctx[key]}"
    match kind:
        case "literal_error":
            return f"be {ctx['expected']}"
        case "too_short" | "string_too_short":
            return "not be empty" if ctx["min_length"] == 1 else f"have at least {ctx['min_length']} items"
        case "too_long" | "string_too_long":
            unit = "items" if kind == "too_long" else "characters"
            return f"have at most {ctx['max_length']} {unit}"
    return "be valid"


def sentence(errors: Sequence[Mapping[str, Any]]) -> tuple[str, str | None]:
    """One sentence about the first field at fault, and that field's path (None if it is the body as a whole)."""
    first = errors[0]
    loc = [part for part in first["loc"] if part != "body"] if first["loc"][:1] == ("body",) else list(first["loc"])
    if loc[:1] in (["(text)"], ["(chat)"]):  # which of two bodies /tokenize took it for
        del loc[0]
    if first["type"] == "json_invalid":
        return "The body is not valid JSON.", None
    if not loc:
        return "The body must be a JSON object, sent with the header Content-Type: application/json.", None
    if first["type"] == "missing":
        return f"{_path(loc)} is required.", _path(loc)
    for end in range(len(loc) - 1, 0, -1):  # a union reports each of its branches, named below the field's own path
        pattern = "".join("[]" if isinstance(part, int) else f".{part}" for part in loc[:end]).lstrip(".")
        if pattern in UNIONS:
            return f"{_path(loc[:end])} must be {UNIONS[pattern]}.", _path(loc[:end])
    return f"{_path(loc)} must {_expectation(first)}.", _path(loc)
