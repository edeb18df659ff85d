"""Which JSON schemas can be followed to the letter. xgrammar passes over some keywords in silence; here they are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

__all__ = ["checked_schema"]

DEEPEST = 64  # levels of a schema's text
LONGEST = 100_000  # characters of a string's bounds
CHARACTER = r'[^"\\\x00-\x1f]'  # of a JSON string, between its quotes; an escape is not offered

UNFOLLOWED = frozenset(
    ("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef",
     "contains", "minContains", "maxContains")
)  # fmt: skip
# Of a schema with one of these xgrammar follows nothing else.
ALONE = ("$ref", "anyOf", "oneOf", "allOf")
REMARKS = frozenset(
    ("title", "description", "default", "examples", "$comment", "$defs", "definitions", "$schema", "$id", "$anchor",
     "deprecated", "readOnly", "writeOnly", "discriminator", "nullable")
)  # fmt: skip
OF_NAMES = ("properties", "patternProperties", "$defs", "definitions")  # name -> schema
OF_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
OF_ONE = (
    "items",
    "additionalProperties",
    "unevaluatedProperties",
    "unevaluatedItems",
    "propertyNames",
    "contains",
    "additionalItems",
)


def checked_schema(text: str) -> str:
    """The schema as xgrammar is to have it. Raises ValueError, one sentence, for what is none or would not be followed.

    Objects have the properties that are named and no others, as OpenAI's strict mode demands; one that names none may have any,
    and so may an array that says nothing about its items. A `pattern` is met as a whole. `oneOf` is taken as `anyOf`, and a
    `format` that is not known is a remark, as the standard has it.
    """
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise ValueError(f"the JSON schema is not JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"the JSON schema is nested deeper than {DEEPEST} levels") from None
    if _depth(schema) > DEEPEST:
        raise ValueError(f"the JSON schema is nested deeper than {DEEPEST} levels")
    for each in _schemas(schema):
        _check_one(each)
        _bound_strings(each)
        if each.get("type") == "array" and not each.keys() & {"items", "prefixItems", *ALONE}:
            each["items"] = True
    return json.dumps(schema)


def _bound_strings(schema: dict[str, Any]) -> None:
    """Lengths become a pattern: for a bounded string xgrammar would let control characters through, which JSON does not."""
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if schema.get("type") != "string" or schema.keys().isdisjoint({"minLength", "maxLength"}):
        return
    if not (_whole(least) and (most is None or (_whole(most) and least <= most))):
        raise ValueError("the JSON schema bounds a string by lengths that are no whole numbers, or that leave no string")
    schema.pop("minLength", None)
    schema.pop("maxLength", None)
    schema["pattern"] = f"^{CHARACTER}{{{least},{'' if most is None else most}}}$"


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LONGEST


def _check_one(schema: dict[str, Any]) -> None:
    if unfollowed := sorted(UNFOLLOWED & schema.keys()):
        raise ValueError(f"the JSON schema uses {unfollowed[0]!r}, which cannot be followed; say it another way")
    for keyword in ALONE:
        if keyword in schema and (others := sorted(schema.keys() - REMARKS - {keyword})):
            raise ValueError(f"the JSON schema has {others[0]!r} beside {keyword!r}, and only one of them can be followed")
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1:
        raise ValueError("the JSON schema has several schemas in 'allOf', which cannot be followed; merge them into one")
    if "pattern" in schema and schema.keys() & {"minLength", "maxLength"}:
        raise ValueError(
            "the JSON schema has 'pattern' beside a length, and only one of them can be followed; put it in the pattern"
        )
    if schema.get("uniqueItems") not in (None, False):
        raise ValueError("the JSON schema uses 'uniqueItems', which cannot be followed; say it another way")
    if "multipleOf" in schema and schema.get("type") != "integer":
        raise ValueError("the JSON schema uses 'multipleOf' of what is no integer, which cannot be followed")
    required, properties = schema.get("required"), schema.get("properties", {})
    if isinstance(required, list) and isinstance(properties, dict):
        for name in required:
            if not isinstance(name, str) or name not in properties:
                raise ValueError(f"the JSON schema requires {name!r}, which is not among the properties beside it")
    reference = schema.get("$ref", "#")
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise ValueError(
            f"the JSON schema refers to {reference!r}; only references into itself, as '#/$defs/NAME', can be followed"
        )


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """A schema and all within it. What is not where a schema belongs is left to xgrammar to complain about."""
    if not isinstance(schema, dict):
        return
    yield schema
    for keyword in OF_NAMES:
        if isinstance(schema.get(keyword), dict):
            for each in schema[keyword].values():
                yield from _schemas(each)
    for keyword in OF_LISTS:
        if isinstance(schema.get(keyword), list):
            for each in schema[keyword]:
                yield from _schemas(each)
    for keyword in OF_ONE:
        yield from _schemas(schema.get(keyword))


def _depth(value: Any) -> int:
    deepest, line = 0, [(value, 1)]
    while line:
        each, depth = line.pop()
        deepest = max(deepest, depth)
        if isinstance(each, dict):
            line += [(below, depth + 1) for below in each.values()]
        elif isinstance(each, list):
            line += [(below, depth + 1) for below in each]
    return deepest
