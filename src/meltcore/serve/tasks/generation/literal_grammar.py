"""Writes grammars of arguments that are no JSON: literals of Python, and objects whose strings have tokens as quotes.

llguidance enforces JSON Schemas in JSON alone. So these grammars are written out, for the keywords that tools mostly
have: types, properties, items, enumerations and limits of numbers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from meltcore.common.errors import RequestError
from meltcore.serve.requests.protocol import Function
from meltcore.serve.tasks.generation.text_function import TextFunction
from meltcore.text.call_scanners import listed, schema_types
from meltcore.text.grammar import literal

_LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_ANNOTATIONS = ("title", "description", "default", "examples", "deprecated", "$schema", "$comment")
_DEFINITIONS = ("$defs", "definitions")
_OTHERS = ("type", "nullable", "enum", "const", "properties", "required", "additionalProperties", "items")
_KEYWORDS = frozenset((*_ANNOTATIONS, *_DEFINITIONS, *_LIMITS, *_OTHERS))
_BARE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class LiteralStyle:
    """Describes how a model family writes arguments. The values are parts of a grammar.

    Args:
        string: any string.
        quote: returns a given string.
        words: true, false and null.
        comma: what stands between two values.
        key: returns the name of an object's field, up to its value.
        any_key: any such name.
        argument_end: what stands between the name of an argument and its value.
        has_bare_keys: whether names of fields have no quotes, so that they must be words.
    """

    string: str
    quote: Callable[[str], str]
    words: Mapping[bool | None, str]
    comma: str
    key: Callable[[str], str]
    any_key: str
    argument_end: str
    has_bare_keys: bool


def _python_quote(text: str) -> str:
    forms = dict.fromkeys((json.dumps(text, ensure_ascii=False), repr(text)))
    return f"({' | '.join(map(literal, forms))})"


_PYTHON_STRING = r"""(/"([^"\\\x00-\x1f]|\\["'\\nrt])*"/ | /'([^'\\\x00-\x1f]|\\["'\\nrt])*'/)"""
PYTHON = LiteralStyle(
    string=_PYTHON_STRING,
    quote=_python_quote,
    words={True: '"True"', False: '"False"', None: '"None"'},
    comma='", "',
    key=lambda name: f'{_python_quote(name)} ": "',
    any_key=f'{_PYTHON_STRING} ": "',
    argument_end="=",
    has_bare_keys=False,
)


def style_with_quote_token(quote: str) -> LiteralStyle:
    """Return the style of objects with bare names, whose strings stand between two tokens `quote`."""
    return LiteralStyle(
        string=rf"({quote} (/(.|\n)+/)? {quote})",
        quote=lambda text: f"({quote} {literal(text)} {quote})",
        words={True: '"true"', False: '"false"', None: '"null"'},
        comma='","',
        key=lambda name: literal(f"{name}:"),
        any_key=f"/{_BARE_NAME.pattern}:/",
        argument_end=":",
        has_bare_keys=True,
    )


class LiteralWriter:
    """Adds the rules of the arguments of functions to the rules of a grammar.

    A function is strict if its schema must be enforced. What cannot be enforced of the schemas of others is left out,
    and added to `weakened`.
    """

    def __init__(self, style: LiteralStyle, rules: list[str], weakened: list[str]) -> None:
        self._style, self._rules, self._weakened = style, rules, weakened
        self._function = Function("")
        self._has_any_value = False
        self._references: dict[tuple[str, str], str] = {}  # the names of rules, by function and $ref
        self._unwritten: list[tuple[str, Any]] = []  # such rules and their schemas

    def arguments(self, function: Function) -> str:
        """Return the grammar of a function's arguments, without the brackets around them.

        Raises RequestError (400) if the function is strict and its schema has a keyword that cannot be enforced.
        """
        self._function = function
        schema = function.parameters or {}
        self._check(schema)
        if isinstance(function, TextFunction) and function.grammar is not None:
            self._refuse("the grammar")
        names = self._names(schema, is_bare=True)
        members = self._members(schema, {name: literal(f"{name}{self._style.argument_end}") for name in names})
        while self._unwritten:
            name, definition = self._unwritten.pop()
            self._rules.append(f"{name}: {self._value(definition)}")
        return members

    def _value(self, schema: Any) -> str:
        if not isinstance(schema, dict) or not schema:
            return self._any_value()
        if "$ref" in schema and (reference := self._reference(schema)):
            return reference
        self._check(schema)
        given = [schema["const"]] if "const" in schema else listed(schema, "enum")
        if given:
            return f"({' | '.join(map(self._given, given))})"
        types = schema_types(schema) or (("object",) if "properties" in schema else ())
        forms = [each for name in types if (each := self._of_type(name, schema))]
        return f"({' | '.join(forms)})" if forms else self._any_value()

    def _reference(self, schema: Mapping[str, Any]) -> str:
        """Return the rule of a definition, or "" for a `$ref` that leads elsewhere or has keywords beside it."""
        path = str(schema["$ref"])
        _, kind, name = path.split("/", 2) if path.startswith("#/") and path.count("/") == 2 else ("", "", "")
        definitions = (self._function.parameters or {}).get(kind) if kind in _DEFINITIONS else None
        if not isinstance(definitions, dict) or name not in definitions or schema.keys() - {"$ref", *_ANNOTATIONS}:
            return ""
        key = (self._function.name, path)
        if key not in self._references:
            self._references[key] = f"reference_{len(self._references)}"
            self._unwritten.append((self._references[key], definitions[name]))
        return self._references[key]

    def _of_type(self, name: str, schema: Mapping[str, Any]) -> str:
        """Return the values of a type, or "" for an unknown type."""
        style = self._style
        if name in ("integer", "number"):
            limits = {key: schema[key] for key in _LIMITS if key in schema}
            return self._rule(f"%json {json.dumps({'type': name, **limits})}")
        if name == "array":
            value = self._value(schema.get("items"))
            return self._rule(f'"[" ({value} ({style.comma} {value})*)? "]"')
        if name == "object":
            names = self._names(schema, is_bare=style.has_bare_keys)
            others = schema.get("additionalProperties")
            if not names and others is not False:
                member = f"{style.any_key} {self._value(others)}"
                return self._rule(f'"{{" ({member} ({style.comma} {member})*)? "}}"')
            return self._rule(f'"{{" {self._members(schema, {key: style.key(key) for key in names})} "}}"')
        words = f"{style.words[True]} | {style.words[False]}"
        return {"string": style.string, "boolean": words, "null": style.words[None]}.get(name, "")

    def _members(self, schema: Mapping[str, Any], heads: dict[str, str]) -> str:
        """Return the fields in the order of the schema. Those that are not required may be left out."""
        fields, required = schema["properties"] if heads else {}, listed(schema, "required")
        first = rest = ""  # the fields from one on: where none precedes them, and where one does
        for name in reversed(heads):
            member = self._rule(f"{heads[name]} {self._value(fields[name])}")
            begun = f"{member} {rest}"
            if name in required:
                first, rest = begun, f"{self._style.comma} {begun}"
            else:
                first = f"{begun} | {first}" if first else f"({begun})?"
                rest = f"({self._style.comma} {member})? {rest}"
            first, rest = self._rule(first), self._rule(rest)
        return first

    def _given(self, value: Any) -> str:
        if isinstance(value, str):
            return self._style.quote(value)
        if value is None or isinstance(value, bool):
            return self._style.words[value]
        if isinstance(value, int | float):
            return literal(json.dumps(value))
        self._refuse("an enum of lists or objects")
        return self._any_value()

    def _any_value(self) -> str:
        """Return the name of the rule of any value."""
        if not self._has_any_value:
            self._has_any_value = True
            style, number = self._style, self._of_type("number", {})
            words = " | ".join(style.words.values())
            member = f"{style.any_key} any_value"
            self._rules += [
                f"any_value: {style.string} | {number} | {words} | any_list | any_object",
                f'any_list: "[" (any_value ({style.comma} any_value)*)? "]"',
                f'any_object: "{{" ({member} ({style.comma} {member})*)? "}}"',
            ]
        return "any_value"

    def _names(self, schema: Mapping[str, Any], *, is_bare: bool) -> list[str]:
        fields = schema.get("properties")
        names = list(fields) if isinstance(fields, dict) else []
        for name in names:
            if is_bare and not _BARE_NAME.fullmatch(name):
                self._refuse(f"the name {name[:80]!r}")
        for name in listed(schema, "required"):
            if name not in names:
                self._refuse(f"the required name {str(name)[:80]!r}, which is no property,")
        return [name for name in names if not is_bare or _BARE_NAME.fullmatch(name)]

    def _check(self, schema: Mapping[str, Any]) -> None:
        for keyword in schema:
            if keyword not in _KEYWORDS:
                self._refuse(keyword[:80] if keyword.isprintable() else repr(keyword[:80]))

    def _refuse(self, what: str) -> None:
        function = self._function
        if function.strict:
            raise RequestError(
                f"tools: {what} of the strict function {function.name} cannot be enforced in the form in which this "
                "model writes calls; leave out strict, or this part of the schema",
                param="tools",
            )
        self._weakened.append(what)

    def _rule(self, body: str) -> str:
        name = f"literal_{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name
