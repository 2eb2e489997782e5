"""Forty JSON schemas with bounded lengths, of the kinds that applications send."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def obj(properties: Schema, *, optional: tuple[str, ...] = (), **more: Any) -> Schema:
    """An object with these properties and no others."""
    required = [name for name in properties if name not in optional]
    its = {"type": "object", "properties": properties, "required": required}
    return {**its, "additionalProperties": False, **more}


def array(items: Schema, least: int, most: int) -> Schema:
    """An array of so many items."""
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def text(most: int, least: int = 0) -> Schema:
    """A text of so many characters."""
    return {"type": "string", "minLength": least, "maxLength": most}


def whole(least: int, most: int) -> Schema:
    """An integer of this range."""
    return {"type": "integer", "minimum": least, "maximum": most}


def pattern(regex: str) -> Schema:
    """A text of this form."""
    return {"type": "string", "pattern": f"^{regex}$"}


BOOL: Schema = {"type": "boolean"}
COLOUR: Schema = {"enum": ["red", "green", "blue", "black"]}
DATE = pattern(r"(19|20)\d{2}-(0[1-9]|1[0-2])-(0[1-9]|1\d|2[0-8])")
PERSON = obj({"name": text(24, 1), "age": whole(0, 120)})
POINT = obj({"x": whole(-100, 100), "y": whole(-100, 100)})
TREE = {"value": whole(0, 9), "left": {"$ref": "#/$defs/leaf"}, "right": {"$ref": "#/$defs/leaf"}}
LEAF = obj({"value": whole(0, 9), "name": text(8)}, optional=("name",))

#: By kind.
SCHEMAS: dict[str, list[Schema]] = {
    "flat": [
        PERSON,
        obj({"city": text(20, 2), "country": pattern("[A-Z]{2}"), "people": whole(0, 40_000_000)}),
        obj({"title": text(30, 1), "done": BOOL, "priority": whole(1, 5)}),
        obj({"a": whole(0, 9), "b": whole(0, 9), "c": text(5)}, optional=("b", "c")),
        obj({"answer": text(60, 1), "confidence": whole(0, 100)}),
        obj({"one": {"const": 1}, "nothing": {"type": "null"}, "name": text(12)}),
    ],
    "nested": [
        obj({"person": PERSON, "address": obj({"street": text(20, 1), "number": whole(1, 999)})}),
        obj({"a": obj({"b": obj({"c": obj({"d": whole(0, 99), "e": BOOL})})})}),
        obj({"from": POINT, "to": POINT, "label": text(16)}),
        obj({"order": obj({"id": whole(1, 99_999), "buyer": PERSON}), "paid": BOOL}),
        obj({"meta": obj({"tags": array(text(8, 1), 0, 3)}), "body": obj({"text": text(40)})}),
        obj({"left": obj({"in": POINT}), "right": obj({"in": POINT}, optional=("in",))}),
        obj({"config": obj({"debug": BOOL, "level": COLOUR}, optional=("debug",))}),
    ],
    "arrays": [
        array(whole(0, 1000), 1, 8),
        array(text(12, 1), 2, 5),
        array(BOOL, 0, 10),
        array(POINT, 1, 4),
        array(array(whole(0, 9), 2, 3), 1, 3),
        obj({"people": array(PERSON, 1, 3), "count": whole(0, 10)}),
        obj({"rows": array(obj({"id": whole(0, 99), "colour": COLOUR}), 1, 4)}),
    ],
    "enums": [
        COLOUR,
        {"enum": ["yes", "no", None, 0, 1.5]},
        obj({"colour": COLOUR, "size": {"enum": ["S", "M", "L", "XL"]}, "n": {"enum": [1, 2, 3]}}),
        array({"enum": ["Mon", "Tue", "Wed", "Thu", "Fri"]}, 1, 5),
        obj({"tool": {"const": "search"}, "arguments": obj({"query": text(30, 1)})}),
    ],
    "references": [
        {"$defs": {"p": PERSON}, **obj({"mother": {"$ref": "#/$defs/p"}, "child": PERSON})},
        {"$defs": {"p": POINT}, **array({"$ref": "#/$defs/p"}, 2, 4)},
        {"$defs": {"leaf": LEAF}, **obj(TREE)},
        {"$defs": {"c": COLOUR, "d": {"$ref": "#/$defs/c"}}, **obj({"c": {"$ref": "#/$defs/d"}})},
        {
            "$defs": {"node": obj({"n": whole(0, 9), "to": array({"$ref": "#/$defs/node"}, 0, 1)})},
            "$ref": "#/$defs/node",
        },
    ],
    "patterns": [
        pattern("[a-z]{3,12}"),
        DATE,
        obj({"phone": pattern(r"\+\d{2} \d{6,9}"), "mail": pattern(r"[a-z]{2,9}@[a-z]{2,9}\.org")}),
        obj({"from": DATE, "to": DATE}),
        array(pattern("#[0-9a-f]{6}"), 1, 4),
    ],
    "unions": [
        {"anyOf": [PERSON, POINT]},
        obj({"value": {"anyOf": [whole(0, 99), text(10), {"type": "null"}]}}),
        array({"anyOf": [whole(0, 9), COLOUR]}, 2, 5),
        obj({"shape": {"anyOf": [obj({"r": whole(1, 9)}), obj({"w": whole(1, 9), "h": BOOL})]}}),
        obj({"id": {"type": ["integer", "null"], "minimum": 0, "maximum": 999}, "next": COLOUR}),
    ],
}
