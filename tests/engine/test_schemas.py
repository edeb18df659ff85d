"""Which JSON schemas are taken, and that what is taken is followed: a text that breaks the schema does not match."""

import json

import pytest

from mla_serve.engine.embedded.schemas import DEEPEST, checked_schema
from mla_serve.engine.embedded.structured import WHITESPACE

NUMBER, TEXT = {"type": "integer"}, {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"not": {}}, "'not'"),
        ({"properties": {"a": {"if": NUMBER, "then": {"const": 7}}}}, "'if'"),
        ({"type": "array", "items": {"anyOf": [{"dependentRequired": {}}]}}, "'dependentRequired'"),
        ({"$defs": {"x": {"contains": {}}}}, "'contains'"),
        ({"type": "array", "uniqueItems": True}, "'uniqueItems'"),
        ({"type": "number", "multipleOf": 0.5}, "'multipleOf' of what is no integer"),
        ({"allOf": [NUMBER, {"minimum": 3}]}, "several schemas in 'allOf'"),
        ({"anyOf": [{"required": []}], "properties": {}}, "'properties' beside 'anyOf'"),
        ({"$ref": "#/$defs/x", "type": "string", "$defs": {"x": TEXT}}, "'type' beside '\\$ref'"),
        ({"$ref": "other.json"}, "'other.json'"),
        ({"type": "string", "pattern": "a+", "minLength": 3}, "'pattern' beside a length"),
        ({"type": "object", "required": ["z"], "properties": {"a": {}}}, "'z', which is not among"),
        ({"type": "object", "additionalProperties": {"not": {}}}, "'not'"),
    ],
)
def test_what_would_not_be_followed_is_refused(schema, message):
    with pytest.raises(ValueError, match=message):
        checked_schema(json.dumps(schema))


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"enum": [{"not": 1}], "default": {"if": 2}},
        {
            "type": "object",
            "properties": {"not": NUMBER, "contains": TEXT, "$ref": TEXT, "required": TEXT},
            "required": ["not"],
        },
        {"allOf": [NUMBER], "title": "one", "$defs": {}},
        {"type": "array", "uniqueItems": False, "items": NUMBER},
        {"type": "integer", "multipleOf": 5},
    ],
)
def test_names_and_values_are_no_keywords(schema):
    assert json.loads(checked_schema(json.dumps(schema))) == schema


def test_depth():
    def nested(levels):
        return '{"items": ' * (levels - 1) + "{}" + "}" * (levels - 1)

    checked_schema(nested(DEEPEST))
    for levels in (DEEPEST + 1, 100_000):
        with pytest.raises(ValueError, match=f"deeper than {DEEPEST} levels"):
            checked_schema(nested(levels))


@pytest.fixture(scope="module")
def matches():
    """Whether a whole text follows a schema, by xgrammar over single bytes."""
    import xgrammar

    end = 256
    spelled = [bytes([i]) for i in range(256)] + [b""]
    info = xgrammar.TokenizerInfo(spelled, xgrammar.VocabType.RAW, vocab_size=257, stop_token_ids=[end])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)

    def check(schema, text):
        compiled = compiler.compile_json_schema(checked_schema(json.dumps(schema)), max_whitespace_cnt=WHITESPACE)
        matcher = xgrammar.GrammarMatcher(compiled)
        return all(matcher.accept_token(byte) for byte in text.encode()) and matcher.accept_token(end)

    return check


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (True, "[1]", "[1"),
        ({"type": "object"}, '{"a": [1, {"b": null}]}', "[1]"),
        ({"type": "array"}, '[1, "a", {}]', "{}"),
        ({"type": "array", "prefixItems": [NUMBER], "items": TEXT}, '[1, "a"]', "[1, 2]"),
        ({"type": "array", "items": NUMBER, "minItems": 2, "maxItems": 2}, "[1, 2]", "[1, 2, 3]"),
        ({"type": "integer", "multipleOf": 5, "minimum": 3, "maximum": 12}, "10", "15"),
        ({"type": "number", "exclusiveMaximum": 3}, "2.5", "3"),
        ({"type": ["integer", "null"]}, "null", '"a"'),
        ({"enum": [1, "x", None]}, '"x"', "2"),
        ({"const": {"a": [1]}}, '{"a":[1]}', '{"a":[2]}'),
        ({"type": "string", "minLength": 2, "maxLength": 3}, '"客单"', '"客单价价"'),
        ({"type": "string", "pattern": "^a+$"}, '"aa"', '"ab"'),
        ({"type": "string", "format": "date"}, '"2026-01-31"', '"tomorrow"'),
        ({"type": "object", "properties": {"a": NUMBER}, "required": ["a"]}, '{"a": 1}', "{}"),
        ({"type": "object", "properties": {"a": NUMBER}}, "{}", '{"a": 1, "b": 2}'),
        (
            {"type": "object", "properties": {"a": NUMBER}, "additionalProperties": TEXT},
            '{"a": 1, "b": "x"}',
            '{"a": 1, "b": 2}',
        ),
        ({"type": "object", "propertyNames": {"pattern": "^a$"}}, '{"a": 1}', '{"b": 1}'),
        ({"type": "object", "patternProperties": {"^a.$": NUMBER}}, '{"ab": 1}', '{"ab": "x"}'),
        ({"anyOf": [NUMBER, {"type": "boolean"}]}, "true", "null"),
        ({"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}, "$ref": "#/$defs/t"}, "[[], [[]]]", "[1]"),
    ],
)
def test_what_is_taken_is_followed(matches, schema, good, bad):
    json.loads(good)
    assert matches(schema, good)
    assert not matches(schema, bad)
