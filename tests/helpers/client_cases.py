"""What every client library is asked for, and checks of what it must get; needs no vmkv.

Some clients read the annotations of functions, so these are no texts.
"""

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

MODEL = "smol"
QUESTION = "What is the capital of France?"
#: Its greedy answer names it.
ANSWER = "Paris"
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]
#: More than the answer, and than any JSON of `City` or call of `WEATHER`.
MAX_TOKENS = 80


class City(BaseModel):
    """A city. Enumerations bound its length; some clients drop bounds of numbers and texts."""

    model_config = ConfigDict(extra="forbid")

    name: Literal["Paris", "London", "Rome"]
    is_capital: bool
    stars: Literal[1, 2, 3]


def get_weather(city: Literal["Paris", "London"], unit: Literal["celsius", "kelvin"]) -> str:
    """Tell the weather of a city."""
    return f"It rains in {city}, at 280 {unit}."


def get_time(zone: Literal["CET", "UTC"]) -> str:
    """Tell the time of a zone."""
    return f"It is noon in {zone}."


def _schema(**properties: list[str]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {name: {"type": "string", "enum": of} for name, of in properties.items()},
        "required": [*properties],
        "additionalProperties": False,
    }


#: Name, description and JSON schema of each function.
FUNCTIONS: list[dict[str, Any]] = [
    {
        "name": "get_weather",
        "description": "Tell the weather of a city.",
        "parameters": _schema(city=["Paris", "London"], unit=["celsius", "kelvin"]),
    },
    {
        "name": "get_time",
        "description": "Tell the time of a zone.",
        "parameters": _schema(zone=["CET", "UTC"]),
    },
]
TOOLS = [{"type": "function", "function": {**each, "strict": True}} for each in FUNCTIONS]
#: A chat in which a tool has been called: assistants that call have no content.
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "How is the weather in Paris?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {
                    "name": "get_weather",
                    "arguments": '{"city": "Paris", "unit": "celsius"}',
                },
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "It rains in Paris, at 12 celsius."},
]


def check_call(name: str, arguments: str | dict[str, Any]) -> None:
    """Check that a call is of a tool above, with arguments that its function takes."""
    values = json.loads(arguments) if isinstance(arguments, str) else arguments
    schemas = {each["name"]: each["parameters"]["properties"] for each in FUNCTIONS}
    assert name in schemas, f"no such tool: {name!r}"
    assert values.keys() == schemas[name].keys(), values
    assert all(values[each] in of["enum"] for each, of in schemas[name].items()), values
