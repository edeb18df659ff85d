"""What an output must look like, in the three ways that clients say it: OpenAI's response_format, vLLM's structured_outputs and
its older guided_* fields."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from mla_serve.engine.base import Structured
from mla_serve.server.errors import bad_request
from mla_serve.server.protocol.base import FAST, Strict

MAX_SCHEMA = 128 * 1024  # characters of a schema, an expression or a list of choices

Json = dict[str, Any]
Choices = Annotated[list[str], FAST]


class JsonSchemaFormat(Strict):
    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    description: str | None = None
    schema_: Json | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def structured(self) -> Structured | None:
        """Raises ApiError where the schema is missing."""
        match self.type:
            case "text":
                return None
            case "json_object":
                return Structured("json_object")
        if self.json_schema is None or self.json_schema.schema_ is None:
            raise bad_request(
                "response_format of the type json_schema needs json_schema.schema.", "response_format.json_schema.schema"
            )
        return json_schema(self.json_schema.schema_, "response_format.json_schema.schema")


class StructuredOutputs(Strict):
    """vLLM's field: exactly one of its kinds."""

    json_: str | Json | None = Field(None, alias="json")
    regex: str | None = Field(None, min_length=1)
    choice: Choices | None = Field(None, min_length=1)
    json_object: bool | None = None

    def structured(self) -> Structured:
        """Raises ApiError unless exactly one kind is there."""
        name = "structured_outputs"
        found: list[Structured] = []
        if self.json_ is not None:
            found.append(json_schema(self.json_, f"{name}.json"))
        if self.regex is not None:
            found.append(regex(self.regex, f"{name}.regex"))
        if self.choice is not None:
            found.append(choice(self.choice, f"{name}.choice"))
        if self.json_object:
            found.append(Structured("json_object"))
        if len(found) != 1:
            raise bad_request(f"{name} needs exactly one of json, json_object, regex and choice.", name)
        return found[0]


def json_schema(schema: str | Json, param: str) -> Structured:
    """A JSON schema, given as an object or as its text. One that says nothing means any object: any value at all would let a
    model count digits until its tokens are spent. Raises ApiError for a text that is no JSON object, or for one too long."""
    found: Any = schema
    if isinstance(schema, str):
        try:
            found = json.loads(_bounded(schema, param))
        except (ValueError, RecursionError):
            found = None
    if not isinstance(found, dict):
        raise bad_request(f"{param} must be a JSON schema: an object, or its text.", param)
    text = json.dumps(found, ensure_ascii=False)
    return Structured("json_schema", _bounded(text, param)) if found else Structured("json_object")


def regex(expression: str, param: str) -> Structured:
    """A regular expression that the whole output matches."""
    return Structured("regex", _bounded(expression, param))


def choice(texts: Sequence[str], param: str) -> Structured:
    """One of several texts, none of them empty."""
    if not all(texts):
        raise bad_request(f"{param} may not hold an empty string.", param)
    return Structured("choice", _bounded(json.dumps(texts, ensure_ascii=False), param))


def _bounded(text: str, param: str) -> str:
    if len(text) > MAX_SCHEMA:
        raise bad_request(f"{param} may have at most {MAX_SCHEMA} characters.", param)
    return text
