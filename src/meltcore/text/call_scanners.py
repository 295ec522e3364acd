"""Reads text that arrives in pieces, and the arguments of tool calls within, which it writes as JSON.

All that is read is consumed, apart from the few characters that may begin a mark. So the work is linear, and the result
does not depend on how a text is divided.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Generator, Iterable, Mapping
from functools import lru_cache
from typing import Any, Literal, NamedTuple

MAX_DEPTH = 64  # of nested objects and lists; templates and clients read what is parsed here by recursion

Steps = Generator[None, None, Any]

_RUNS = {
    "string": re.compile(r'[^"\\\x00-\x1f]+'),
    "scalar": re.compile(r"[-+.0-9A-Za-z]+"),
    "space": re.compile(r"[ \t\n\r]+"),
}
SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_HEX = frozenset("0123456789abcdefABCDEF")
# What may follow outside of strings and scalars: the characters that are allowed in each state.
_ALLOWED = {
    "start": "{", "value": '{["', "first value": '{["]', "key": '"', "first key": '"}', "colon": ":", "after": ",]}",
}  # fmt: skip


class Marks:
    """Finds the first of several marks, and how much of a text's end may begin one."""

    def __init__(self, marks: tuple[str, ...]) -> None:
        self.pattern = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))))
        self._beginnings = {mark[:length] for mark in marks for length in range(1, len(mark))}
        self._longest = max(map(len, marks)) - 1

    def held(self, text: str, start: int) -> int:
        """Return the length of the longest end of text[start:] that may begin a mark."""
        longest = min(self._longest, len(text) - start)
        return next((length for length in range(longest, 0, -1) if text[-length:] in self._beginnings), 0)


find_marks = lru_cache(maxsize=64)(Marks)


class CharacterReader:
    """Holds the text that has come, and the steps that read it. A step yields while it needs more."""

    def __init__(self) -> None:
        self._buffer, self._at = "", 0
        self._has_ended = False
        self._raw: list[str] = []  # what was taken since it was last emptied

    def _take(self, end: int) -> str:
        text = self._buffer[self._at : end]
        self._raw.append(text)
        self._at = end
        return text

    def _some(self) -> Steps:
        """Wait for a character. Return whether there is one."""
        while self._at == len(self._buffer) and not self._has_ended:
            yield
        return self._at < len(self._buffer)

    def _piece(self, marks: Marks) -> Steps:
        """Return text up to the next mark, and the mark; or all text that has come, and None.

        Empty text and None mean that the text has ended.
        """
        while True:
            if found := marks.pattern.search(self._buffer, self._at):
                text = self._take(found.start())
                self._take(found.end())
                return text, found[0]
            held = 0 if self._has_ended else marks.held(self._buffer, self._at)
            text = self._take(len(self._buffer) - held)
            if text or self._has_ended:
                return text, None
            yield

    def _until(self, *marks: str) -> Steps:
        """Return all text up to the next mark, and the mark, or None if there is none."""
        parts: list[str] = []
        mark = None
        while mark is None:
            text, mark = yield from self._piece(find_marks(marks))
            parts.append(text)
            if not text and mark is None:
                break
        return "".join(parts), mark

    def _run_of(self, pattern: re.Pattern[str]) -> Steps:
        """Return the characters in a row of a class, which a pattern of one or more matches."""
        parts: list[str] = []
        while (yield from self._some()):
            found = pattern.match(self._buffer, self._at)
            if not found:
                break
            parts.append(self._take(found.end()))
        return "".join(parts)

    def _peek(self, *options: str) -> Steps:
        """Return the longest of the texts that comes next, or "" if none does."""
        while True:
            rest = self._buffer[self._at : self._at + max(map(len, options))]
            if self._has_ended or not any(len(rest) < len(each) and each.startswith(rest) for each in options):
                return max((each for each in options if rest.startswith(each)), key=len, default="")
            yield

    def _accept(self, text: str) -> Steps:
        """Take a text if it comes next. Return whether it did."""
        if not (yield from self._peek(text)):
            return False
        self._take(self._at + len(text))
        return True


class JsonScanner:
    """Follows one JSON object through a text.

    `is_done` says that the object is complete, `is_broken` that a character cannot belong to it. `depth` counts the
    open objects and lists. `stop` is the character after which `scan` stopped early: the colon after a field's name of
    the outermost object, or the brace that opens or closes a field's object.
    """

    def __init__(self) -> None:
        self.is_done = False
        self.is_broken = False
        self.stop = ""
        self._open: list[str] = []
        self._state = "start"
        self._scalar: list[str] = []
        self._is_key = False
        self._hex_left = 0

    @property
    def depth(self) -> int:
        """The number of open objects and lists."""
        return len(self._open)

    def scan(self, text: str, start: int = 0) -> int:
        """Read a text from `start`. Return where reading stopped: after the object, at a wrong character, or early."""
        at, end = start, len(text)
        self.stop = ""
        while at < end and not (self.is_done or self.is_broken):
            if self._state == "string":
                at = self._string(text, at)
            elif self._state in ("escape", "hex"):
                at = self._escape(text[at], at)
            elif self._scalar or text[at] in "-0123456789tfn":
                at = self._read_scalar(text, at)
            elif run := _RUNS["space"].match(text, at):
                at = run.end()
            elif text[at] not in _ALLOWED[self._state]:
                self.is_broken = True
            else:
                char = text[at]
                at += 1
                self._structure(char)
                if (self.depth == 1 and char in ":}") or (self.depth == 2 and char == "{"):
                    self.stop = char
                    break
        return at

    def accepts(self, text: str) -> bool:
        """Read a whole text. Return whether all of it belongs to the object."""
        at = 0
        while at < len(text) and not (self.is_done or self.is_broken):
            at = self.scan(text, at)
        return at == len(text) and not self.is_broken

    def _string(self, text: str, at: int) -> int:
        run = _RUNS["string"].match(text, at)
        at = run.end() if run else at
        if at == len(text):
            return at
        if text[at] == '"':
            self._state = "colon" if self._is_key else "after"
        elif text[at] == "\\":
            self._state = "escape"
        else:
            self.is_broken = True
            return at
        return at + 1

    def _escape(self, char: str, at: int) -> int:
        if self._state == "escape" and char in '"\\/bfnrtu':
            self._state, self._hex_left = ("hex", 4) if char == "u" else ("string", 0)
        elif self._state == "hex" and char in _HEX:
            self._hex_left -= 1
            self._state = "hex" if self._hex_left else "string"
        else:
            self.is_broken = True
            return at
        return at + 1

    def _read_scalar(self, text: str, at: int) -> int:
        if self._state not in ("value", "first value"):
            self.is_broken = True
            return at
        run = _RUNS["scalar"].match(text, at)
        if run:
            self._scalar.append(run[0])
            at = run.end()
        if at < len(text):
            self.is_broken = SCALAR.fullmatch("".join(self._scalar)) is None
            self._scalar.clear()
            self._state = "after"
        return at

    def _structure(self, char: str) -> None:
        if char in "{[":
            self._open.append(char)
            self._state = "first key" if char == "{" else "first value"
            self.is_broken = len(self._open) > MAX_DEPTH
        elif char == '"':
            self._is_key, self._state = self._state in ("key", "first key"), "string"
        elif char == ":":
            self._state = "value"
        elif char == ",":
            self._state = "key" if self._open[-1] == "{" else "value"
        elif {"{": "}", "[": "]"}[self._open[-1]] != char:
            self.is_broken = True
        else:
            self._open.pop()
            self._state = "after"
            self.is_done = not self._open


class PythonScanner:
    """Finds the end of one Python literal: the comma or the bracket after it."""

    def __init__(self) -> None:
        self.is_done = False
        self.is_broken = False
        self._brackets: list[str] = []
        self._quote = ""  # of the open string
        self._opening = ""  # quotes that may begin a string
        self._is_escaped = False
        self._closing = 0  # closing quotes in a row

    def scan(self, text: str, start: int = 0) -> int:
        """Read a text from `start`. Return where reading stopped: at the end of the literal, or of the text."""
        for at in range(start, len(text)):
            self._read(text[at])
            if self.is_done or self.is_broken:
                return at
        return len(text)

    def _read(self, char: str) -> None:
        if self._quote:
            self._read_string(char)
        elif self._opening:
            self._read_opening(char)
        elif char in "'\"":
            self._opening = char
        elif char in "([{":
            self._brackets.append({"(": ")", "[": "]", "{": "}"}[char])
            self.is_broken = len(self._brackets) > MAX_DEPTH
        elif char in ")]}":
            self.is_done = not self._brackets
            self.is_broken = bool(self._brackets) and self._brackets.pop() != char
        elif char == ",":
            self.is_done = not self._brackets
        elif char == "=" and not self._brackets:
            self.is_broken = True

    def _read_opening(self, char: str) -> None:
        """Read the character after one or two quotes: they are an empty string, or begin one."""
        if char == self._opening[0]:
            self._opening += char
            if len(self._opening) == 3:
                self._quote, self._opening = self._opening, ""
        elif len(self._opening) == 2:
            self._opening = ""
            self._read(char)
        else:
            self._quote, self._opening = self._opening, ""
            self._read_string(char)

    def _read_string(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif char == self._quote[0]:
            self._closing += 1
            if self._closing == len(self._quote):
                self._quote, self._closing = "", 0
            return
        elif char == "\\":
            self._is_escaped = True
        elif char == "\n" and len(self._quote) == 1:
            self.is_broken = True
        self._closing = 0


def python_to_json(text: str) -> str | None:
    """Return a Python literal, or a JSON value, as JSON. Return None if the text is neither. Nothing is evaluated."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of unknown escapes in strings
            value = ast.literal_eval(text.strip())
        return to_json(value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        pass
    try:
        return to_json(json.loads(text))
    except (ValueError, RecursionError):
        return None


def to_json(value: Any) -> str:
    """Return a value as JSON that any client can read: no NaN, and no half of a surrogate pair.

    Raises ValueError or TypeError if JSON cannot write the value.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if text.isascii() or is_encodable(text) else json.dumps(value, allow_nan=False)


def is_encodable(text: str) -> bool:
    """Return whether a text has no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,), "number": (int, float), "boolean": (bool,), "null": (type(None),), "object": (dict,),
    "array": (list,), "string": (str,),
}  # fmt: skip


def schema_types(schema: Any, depth: int = 0) -> tuple[str, ...]:
    """Return the JSON types that a schema allows, in the order in which it names them. An empty tuple means any."""
    if not isinstance(schema, dict) or depth > 8:
        return ()
    declared = [schema.get("type"), *listed(schema, "type")]
    types = [each for each in declared if isinstance(each, str)]
    for each in (*listed(schema, "anyOf"), *listed(schema, "oneOf"), *listed(schema, "allOf")):
        types += schema_types(each, depth + 1)
    constants = [*listed(schema, "enum"), *([schema["const"]] if "const" in schema else [])]
    if not types:
        types = [name for name in _PYTHON_TYPES if any(_has_type(each, name) for each in constants)]
    if schema.get("nullable") is True:
        types.append("null")
    return tuple(dict.fromkeys(types))


def listed(schema: Mapping[str, Any], key: str) -> list[Any]:
    """Return the list in a field of a schema, or an empty one if the field is absent or no list."""
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _has_type(value: Any, name: str) -> bool:
    return isinstance(value, _PYTHON_TYPES[name]) and (name == "boolean" or not isinstance(value, bool))


def typed_json(raw: str, types: tuple[str, ...]) -> str:
    """Return an untyped argument as JSON of the first type that it can have; text if it can have none.

    `types` is of `schema_types`. Without a type the argument is text.
    """
    stripped = raw.strip()
    if "null" in types and stripped in ("null", "None"):
        return "null"
    for name in types:
        if name == "string":
            break
        candidate = stripped.lower() if name == "boolean" else stripped
        found = python_to_json(candidate)
        if found is not None and name in _PYTHON_TYPES and _has_type(json.loads(found), name):
            return found
    return to_json(raw)


def whole_call(text: str) -> tuple[str | None, str]:
    """Return the name and the arguments of an object, whatever the order of its fields; None if it is no call."""
    try:
        call = json.loads(text)
        call = call.get("function", call) if isinstance(call.get("function"), dict) else call
        name, arguments = call.get("name"), call.get("arguments", call.get("parameters"))
        if isinstance(arguments, str):  # encoded twice
            arguments = json.loads(arguments)
        if isinstance(name, str) and isinstance(arguments, dict | None):
            return name, to_json(arguments or {})
    except (ValueError, RecursionError):
        pass
    return None, ""


class CallDelta(NamedTuple):
    """A part of one call: its name, which comes first, or more of its arguments, or how it ended."""

    call_index: int
    name: str | None = None
    arguments: str = ""
    end: Literal["complete", "broken", "cut"] | None = None

    @property
    def size(self) -> int:
        """The number of characters that wait for the client."""
        return len(self.name or "") + len(self.arguments)


# Reasoning or a part of a call, and the number of characters of the answer's text before it.
Piece = tuple[int, str | CallDelta]


def divide_pieces(pieces: Iterable[Piece]) -> tuple[list[str], list[CallDelta]]:
    """Return the reasoning and the parts of calls."""
    found = [piece for _, piece in pieces]
    return [each for each in found if isinstance(each, str)], [each for each in found if isinstance(each, CallDelta)]


class ToolSet(NamedTuple):
    """Holds the tools of a request: the schema of the parameters of each by its name, and how many calls may follow.

    Further calls are dropped. With 0 no call and no markup of calls reaches the client. If `is_streamed` is true, the
    client receives each call as it comes, so a call that breaks stays a call. Otherwise its characters become text.
    """

    schemas: Mapping[str, Mapping[str, Any]]
    max_calls: int | None = None
    is_streamed: bool = False

    def types(self, tool: str, parameter: str) -> tuple[str, ...]:
        """Return the JSON types of a parameter; an empty tuple if it may have any."""
        properties = self.schemas.get(tool, {}).get("properties")
        return schema_types(properties.get(parameter)) if isinstance(properties, dict) else ()
