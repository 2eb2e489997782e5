"""Grammars of schemas that are not strict: bounds that llguidance cannot compile have no effect."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from ...errors import ConfigError
from ..grammar_trial import GrammarTrials
from ..guided import check_grammar
from ..params import StructuredOutputs
from .tools import VALUES

#: Keywords of bounds, in groups that may do without each other, then all.
_BOUNDS: list[set[str]] = [
    {"pattern", "patternProperties"},
    {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"},
]
_BOUNDS += [set().union(*_BOUNDS)]


def checked(asked: StructuredOutputs, trials: GrammarTrials) -> StructuredOutputs:
    """Return a grammar that compiles, if need be without bounds; raises as `check_grammar` does."""
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
