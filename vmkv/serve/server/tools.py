"""Tools of a chat's request: their types and bounds, and the form of forced calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from ...errors import shown
from .errors import invalid
from .formats import VALUES, Lenient

#: Tools of one request, and characters of their JSON.
TOOLS_MAX = 1024
TOOLS_CHARS_MAX = 1 << 20
#: Keywords of schemas with names of the caller's.
_SCHEMAS_BY_NAME = {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}


class Function(Lenient):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Lenient):
    """A tool; only functions are known."""

    type: Literal["function"] = "function"
    function: Function


class NamedFunction(Lenient):
    """Names a function."""

    name: str


class NamedChoice(Lenient):
    """Forces a call of one function."""

    type: Literal["function"] = "function"
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedChoice


class CalledFunction(NamedFunction):
    """A function that was called; arguments are JSON, as text in OpenAI's API."""

    arguments: str | dict[str, Any] = ""


class ToolCall(Lenient):
    """A call in an assistant's message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def rendered(self, *, as_text: bool) -> dict[str, Any]:
        """Return the call for a chat template; arguments that are no JSON object stay text."""
        arguments: Any = self.function.arguments
        if as_text and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        elif not as_text and isinstance(arguments, str):
            try:
                read = json.loads(arguments or "{}")
            except ValueError:
                read = None
            arguments = read if isinstance(read, dict) else arguments
        whole = self.model_dump(exclude_none=True)
        return {**whole, "function": {"name": self.function.name, "arguments": arguments}}


def served_tools(tools: Sequence[Any]) -> tuple[list[Any], set[str]]:
    """Return a body's functions, those of namespaces too, and the types of other tools, unused."""
    found: list[Any] = []
    skipped: set[str] = set()
    for each in tools:
        kind, is_anthropics = None, False
        if isinstance(each, dict):
            kind, is_anthropics = each.get("type"), "input_schema" in each
        if kind == "namespace" and isinstance(each.get("tools"), list):
            inner, skipped_inner = served_tools(each["tools"])
            of = {"namespace": each.get("name")}
            found += [{**one, **of} if isinstance(one, dict) else one for one in inner]
            skipped |= skipped_inner
        elif kind == "function" or is_anthropics or not isinstance(kind, str):
            found.append(each)
        else:
            skipped.add(kind)
    return found, skipped


def check_tools(tools: Sequence[Tool], choice: ToolChoice | None) -> None:
    """Raise `ApiError` for tools that are too large, or a choice that is none of them."""
    num_chars = sum(len(json.dumps(each.model_dump(), ensure_ascii=False)) for each in tools)
    if num_chars > TOOLS_CHARS_MAX:
        raise invalid(
            f"tools have {num_chars} characters as JSON; at most {TOOLS_CHARS_MAX} are taken",
            "tools",
        )
    if choice in (None, "none", "auto"):
        return
    if not tools:
        raise invalid("tool_choice forces a call, and there are no tools", "tool_choice")
    if isinstance(choice, NamedChoice):
        name = choice.function.name
        if all(tool.function.name != name for tool in tools):
            raise invalid(f"tool_choice names {name!r}, which is none of the tools", "tool_choice")


def forced_schema(
    tools: Sequence[Tool], choice: ToolChoice, *, is_parallel: bool
) -> dict[str, Any]:
    """Return the JSON schema of a forced answer: a function's arguments, or a list of calls."""
    functions = {each.function.name: each.function for each in tools}
    if isinstance(choice, NamedChoice):
        functions = {choice.function.name: functions[choice.function.name]}
    guidance = {"x-guidance": {"lenient": not any(each.strict for each in functions.values())}}
    schemas = {name: _closed(function) for name, function in functions.items()}
    if isinstance(choice, NamedChoice):
        return guidance | schemas[choice.function.name]
    calls = []
    for at, (name, schema) in enumerate(schemas.items()):
        inner = _moved(schema, f"#/items/anyOf/{at}/properties/parameters")
        inner.pop("$id", None)  # It would be the root of references.
        properties = {"name": {"enum": [name]}, "parameters": inner}
        own = {"properties": properties, "required": [*properties], "additionalProperties": False}
        calls.append({"type": "object", **own})
    most = {} if is_parallel else {"maxItems": 1}
    return {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}, **guidance}


def _closed(function: Function) -> dict[str, Any]:
    schema = {"type": "object", **(function.parameters or {})}
    if schema["type"] not in ("object", ["object"], ["object", "null"]):
        told = f"the parameters of {shown(function.name)} are of type {shown(schema['type'])}"
        raise invalid(f"tools: {told}, and a call's arguments are an object", "tools")
    closed = {"additionalProperties": False} if "properties" in schema else {}
    return {**closed, **schema, "type": "object"}


def _moved(schema: Any, root: str) -> Any:
    if isinstance(schema, list):
        return [_moved(each, root) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _SCHEMAS_BY_NAME and isinstance(value, dict):
            moved[key] = {name: _moved(each, root) for name, each in value.items()}
        else:
            moved[key] = value if key in VALUES else _moved(value, root)
    target = schema.get("$ref")
    if isinstance(target, str) and (target == "#" or target.startswith("#/")):
        moved["$ref"] = root + target[1:]
    return moved
