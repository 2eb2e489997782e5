"""Forms of an answer as clients ask for them: OpenAI's `response_format`, and vLLM's fields."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from ...errors import ConfigError
from ..grammar_trial import GrammarTrials
from ..guided import check_grammar
from ..params import StructuredOutputs
from .errors import invalid

#: A JSON schema, as an object or as its text.
Schema = str | dict[str, Any]
T = TypeVar("T")
#: A list that is validated up to its first wrong element.
Listed = Annotated[list[T], Field(fail_fast=True)]


class Lenient(BaseModel):
    """A part of a body whose undeclared fields have no effect."""

    model_config = ConfigDict(extra="ignore", strict=True)


class JsonSchema(Lenient):
    """OpenAI's `json_schema`."""

    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Lenient):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def form(self) -> dict[str, Any]:
        """Return arguments of `StructuredOutputs`; none for plain text."""
        if self.type == "text":
            return {}
        if self.type == "json_object":
            return {"json_object": True}
        if self.json_schema is None:
            raise invalid(
                'response_format of type "json_schema" needs json_schema', "response_format"
            )
        lenient = {"lenient": not self.json_schema.strict}
        return {"json": {"x-guidance": lenient, **self.json_schema.schema_}}


class StructuredFields(Lenient):
    """vLLM's `structured_outputs`."""

    json_: Schema | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: Listed[str] | None = None

    def form(self) -> dict[str, Any]:
        """Return arguments of `StructuredOutputs`."""
        return self.model_dump(by_alias=True, exclude_none=True)


class Formatted(BaseModel):
    """Fields of a request that say which form its answer has."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredFields | None = None
    # vLLM's older parameters, from before `structured_outputs`.
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: Listed[str] | None = None

    @cached_property
    def form(self) -> tuple[str, dict[str, Any]] | None:
        """The field that asks for a form, and arguments of `StructuredOutputs`."""
        found: dict[str, dict[str, Any]] = {}
        for name in Formatted.model_fields:
            value = getattr(self, name)
            if isinstance(value, ResponseFormat | StructuredFields):
                found[name] = value.form()
            elif value is not None:
                found[name] = {name.removeprefix("guided_"): value}
        if found.get("response_format") == {}:
            del found["response_format"]
        if len(found) > 1:
            names = " and ".join(found)
            raise invalid(f"{names}: an answer has one form, so send one of them", [*found][1])
        return next(iter(found.items()), None)


# ---- grammars ------------------------------------------------------------------------------------

#: Keywords of schemas with values that are no schemas.
VALUES = {"enum", "const", "default", "examples"}
#: Keywords of bounds, in groups that may do without each other, then all.
_BOUNDS: list[set[str]] = [
    {"pattern", "patternProperties"},
    {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"},
]
_BOUNDS += [set().union(*_BOUNDS)]


def checked(asked: StructuredOutputs, trials: GrammarTrials) -> StructuredOutputs:
    """Return a grammar that compiles, for a schema that is not strict if need be without bounds.

    Raises as `check_grammar` does.
    """
    try:
        check_grammar(asked, trials)
        return asked
    except ConfigError:
        schema: Any = None
        with contextlib.suppress(ValueError, TypeError):
            schema = json.loads(asked.json)  # type: ignore[arg-type]
        guidance = schema.get("x-guidance") if isinstance(schema, dict) else None
        is_lenient = isinstance(guidance, dict) and guidance.get("lenient")
        for names in _BOUNDS if is_lenient else ():
            looser = replace(asked, json=_without(schema, names))
            with contextlib.suppress(ConfigError):
                check_grammar(looser, trials)
                return looser
        raise


def _without(schema: Any, names: Collection[str]) -> Any:
    if isinstance(schema, list):
        return [_without(each, names) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: each if key in VALUES else _without(each, names)
        for key, each in schema.items()
        if key not in names or (isinstance(each, dict) and key != "patternProperties")
    }
