"""JSON Schemas in the shapes of public collections, written here: calls of functions, and documents of the web.

Most say what an argument of a tool is, as in the Berkeley Function-Calling Leaderboard. The others have what
JSONSchemaBench's have: nesting, references, patterns, formats, alternatives, and keywords that few servers enforce.
"""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]
_NOUNS = (
    *("user", "order", "city", "date", "price", "item", "level", "color", "route", "token", "score", "title"),
    *("genre", "amount", "status", "email", "zone"),
)
_UNITS = ["celsius", "fahrenheit", "kelvin"]
_FORMATS = ["date", "time", "date-time", "email", "ipv4", "uuid", "uri", "hostname"]
_PATTERNS = ["^[A-Z]{3}[0-9]{2,4}$", "^[a-z]+(-[a-z]+)*$", "^#[0-9a-f]{6}$", r"^\+?[0-9]{7,12}$", "^(on|off)$"]
# What llguidance 1.9 does not enforce, or only in part.
_PARTIAL: list[Schema] = [
    {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 3},
    {"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 0}]},
    {"type": "integer", "not": {"enum": [0]}},
    {"type": "object", "properties": {"a": {"type": "string", "maxLength": 5}}, "dependentRequired": {"a": ["b"]}},
    {"type": "array", "items": {"type": "integer"}, "contains": {"minimum": 5}, "maxItems": 4},
    {"if": {"type": "string"}, "then": {"maxLength": 9}, "type": "string"},
]
_REFUSED: list[Schema] = [
    {"type": "string", "pattern": "(?=a)[a-z]{2}"},
    {"$ref": "https://example.org/other.json"},
    {"$ref": "#/$defs/missing"},
]


class _Writer:
    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    def leaf(self) -> Schema:
        draw = self.draw
        kinds: list[Schema] = [
            {"type": "string", "maxLength": draw.randint(3, 24)},
            {"type": "string", "minLength": 1, "maxLength": draw.randint(2, 12)},
            {"type": "integer", "minimum": draw.randint(-20, 5), "maximum": draw.randint(6, 5000)},
            {"type": "number", "minimum": 0, "maximum": draw.choice([1, 10, 100])},
            {"type": "boolean"},
            {"enum": draw.sample(_UNITS, draw.randint(1, 3))},
            {"enum": [1, "one", None, True]},
            {"const": draw.choice(_NOUNS)},
            {"type": ["integer", "null"], "minimum": 0, "maximum": 99},
            {"type": "string", "format": draw.choice(_FORMATS)},
            {"type": "string", "pattern": draw.choice(_PATTERNS)},
            {"anyOf": [{"type": "integer", "maximum": 9, "minimum": 0}, {"enum": ["none", "all"]}]},
        ]
        return dict(draw.choice(kinds))

    def value(self, depth: int) -> Schema:
        draw = self.draw
        if depth == 0 or draw.random() < 0.6:
            return self.leaf()
        if draw.random() < 0.5:
            low = draw.randint(0, 2)
            return {
                "type": "array",
                "items": self.value(depth - 1),
                "minItems": low,
                "maxItems": low + draw.randint(0, 2),
            }
        return self.object(depth - 1)

    def object(self, depth: int, most: int = 4) -> Schema:
        names = self.draw.sample(_NOUNS, self.draw.randint(1, most))
        schema: Schema = {
            "type": "object",
            "properties": {name: self.value(depth) for name in names},
            "required": self.draw.sample(names, self.draw.randint(0, len(names))),
            "additionalProperties": False,
        }
        if self.draw.random() < 0.3:
            schema["properties"][names[0]] |= {"description": f"The {names[0]}.", "title": names[0].title()}
        return schema

    def document(self) -> Schema:
        """A schema with definitions, one of which may contain itself, at most a few levels deep."""
        kind = self.draw.randrange(4)
        if kind == 0:
            node = {"type": "object", "properties": {"name": self.leaf(), "child": {"$ref": "#/$defs/leaf"}},
                    "required": ["name"], "additionalProperties": False}  # fmt: skip
            return {"$defs": {"leaf": self.leaf(), "node": node}, "$ref": "#/$defs/node"}
        if kind == 1:
            return {"type": "array", "prefixItems": [self.leaf(), self.leaf()], "items": False, "minItems": 2}
        if kind == 2:
            base = self.object(0, 2)
            extra = {"properties": {"extra": self.leaf()}, "required": ["extra"]}
            return {"allOf": [{**base, "additionalProperties": True}, extra], "additionalProperties": False,
                    "type": "object", "properties": {name: {} for name in (*base["properties"], "extra")}}  # fmt: skip
        return {"anyOf": [self.object(1, 2), self.object(0, 3)]}

    def schema(self) -> Schema:
        chance = self.draw.random()
        if chance < 0.65:
            return self.object(2)
        if chance < 0.88:
            return self.document()
        schema = self.object(1, 3)
        special = self.draw.choice(_REFUSED if chance > 0.97 else _PARTIAL)
        schema["properties"]["special"] = special
        schema["required"] = [*schema["required"], "special"]
        return schema


def schemas(count: int, seed: int = 46) -> list[Schema]:
    """Return `count` schemas, the same for the same seed."""
    return [_Writer(seed * 100_003 + index).schema() for index in range(count)]
