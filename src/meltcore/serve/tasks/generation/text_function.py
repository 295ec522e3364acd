"""Custom tools, whose input is a text that may follow a grammar. A model calls them as functions with one text.

A model that writes calls as JSON writes this text as a JSON string. The grammar of the text is therefore rewritten to
the grammar of its JSON string, terminal by terminal.
"""

from __future__ import annotations

import graphlib
import json
import re
from contextlib import suppress
from typing import Any, Literal

from meltcore.common.errors import RequestError
from meltcore.serve.requests.protocol import Function
from meltcore.text.grammar import literal

MAX_DEFINITION_CHARS = 65_536  # rewriting this many takes up to 50 ms on the event loop
_SCHEMA = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
# Characters that JSON writes with a backslash, and the letter after it. Grammars here do not allow what JSON writes by
# number, but in literals.
_ESCAPES = {'"': '"', "\\": "\\", "\n": "n", "\r": "r", "\t": "t", "\f": "f", "\b": "b"}
_PLAIN = r'[^"\\\x00-\x1f\x7f]'
# Terminals that Lark's `common` has and that contain such characters.
_COMMON = {
    "CR": r"\r", "LF": r"\n", "NEWLINE": r"(\r?\n)+", "WS": r"[ \t\f\r\n]+", "WS_INLINE": r"[ \t]+",
    "ESCAPED_STRING": r'"([^"\\\n]|\\[^\n])*"',
}  # fmt: skip
_LARK = re.compile(
    r"""(?P<comment>(?:\#|//)[^\n]*)
    |%import\s+common\s*\.\s*(?P<common>\w+)(?:\s*->\s*(?P<alias>\w+))?
    |(?P<string>"(?:\\.|[^"\\\n])*")(?P<flag>i?)
    |(?P<regex>/(?:\\.|[^/\\])+/)(?P<flags>[imslux]*)
    |(?P<ignore>%ignore\b)
    |(?P<tree>->\s*\w+|(?m:^)[?!]+)
    |(?P<rule>\b_?[a-z]\w*)(?P<defines>\s*:)?
    |[A-Z_]\w*
    |(?P<other>%\w+|[@<]|~(?!\s*\d))""",
    re.VERBOSE,
)
# Parts of a regular expression that may match such a character; all others stay as they are.
_ATOM = re.compile(r"\\[pP]\{\w+\}|\\x[0-9a-fA-F]{2}|\\[^bBAz]|\[\^?\]?(?:\\.|[^\]\\])*(?:\]|\\?\Z)|[.\"\x00-\x1f\x7f]")
_NESTED = re.compile(r"\[|&&|~~|--")
_ESCAPED, _SLASH = re.compile(r"\\.", re.DOTALL), re.compile(r"(\\.)|/", re.DOTALL)
# The arguments of a call that is cut within its text, or after it. The group has the whole characters as JSON.
_CUT_INPUT = re.compile(
    r'\s*\{\s*"input"\s*:\s*"((?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*+)(?:\\(?:u\w{0,3})?|"\s*\}?\s*)?'
)


class _UnquotableError(ValueError):
    """Names the part of a grammar that JSON strings cannot have."""


class TextFunction(Function, kw_only=True):
    """A custom tool as a function. `grammar` is the Lark grammar of its input, or None for any text.

    `grammar_param` is the field of the request that holds the grammar.
    """

    grammar: str | None = None
    grammar_param: str = "tools"


def text_function(
    name: str,
    description: str | None,
    definition: str | None = None,
    syntax: Literal["lark", "regex"] = "lark",
    *,
    param: str = "tools",
) -> TextFunction:
    """Return a custom tool as a function. The model reads its grammar in its description.

    `param` is the field that holds the grammar. Raises RequestError (400) for a grammar that is too long.
    """
    if definition is None:
        return TextFunction(name, description, _SCHEMA)
    if len(definition) > MAX_DEFINITION_CHARS:
        raise RequestError(
            f"{param}: the grammar of {name[:128]!r} has {len(definition)} characters; the limit is "
            f"{MAX_DEFINITION_CHARS}",
            param=param,
        )
    shown = f"The input follows this {'Lark grammar' if syntax == 'lark' else 'regular expression'}:\n{definition}"
    grammar = definition if syntax == "lark" else "start: /" + _SLASH.sub(_escape_slash, definition) + "/"
    shown = "\n".join(filter(None, [description, shown]))
    return TextFunction(name, shown, _SCHEMA, strict=True, grammar=grammar, grammar_param=param)


def _escape_slash(match: re.Match[str]) -> str:
    return match[1] or r"\/"


def text_input(arguments: str, *, is_cut: bool = False) -> str:
    """Return the text with which a model has called a custom tool: all of the arguments if they are of another form.

    With `is_cut` the arguments may end anywhere, and the text ends with its last whole character. A half of a surrogate
    pair becomes U+FFFD.
    """
    fields: Any = None
    if is_cut and (found := _CUT_INPUT.fullmatch(arguments)):
        text = json.loads(f'"{found[1]}"')
        fields = {"input": text[:-1] if "\ud800" <= text[-1:] <= "\udbff" else text}  # the other half may have been cut
    elif is_cut:
        return "" if '{"input":"'.startswith("".join(arguments.split())) else arguments
    else:
        with suppress(ValueError, RecursionError):  # a number is too long, or it is nested too deeply to be read
            fields = json.loads(arguments or "{}")
    if not (isinstance(fields, dict) and list(fields) == ["input"] and isinstance(fields["input"], str)):
        return arguments
    return str(fields["input"]).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def quote_grammar(grammar: str, param: str = "tools") -> str:
    """Return the grammar of the JSON strings, without their quotes, of the texts of a Lark grammar.

    Terminals end where no further character fits, and two of them may begin with the same backslash. So the rules of a
    grammar without recursion become one terminal. Raises RequestError (400), which names `param`, for parts that cannot
    be rewritten.
    """
    references: dict[str, set[str]] = {}
    current = ""
    tokens = list(_LARK.finditer(grammar))
    for token in tokens:
        if token["rule"] and token["defines"]:
            current = token["rule"]
        elif token["rule"]:
            references.setdefault(current, set()).add(token["rule"])
    try:
        graphlib.TopologicalSorter(references).prepare()
        is_regular = not any(token["ignore"] for token in tokens)
    except graphlib.CycleError:
        is_regular = False

    def quote(token: re.Match[str]) -> str:
        if token["rule"] and is_regular:
            return f"RULE_{token['rule'].upper()}{token['defines'] or ''}"
        return _quote_token(token)

    try:
        quoted = _LARK.sub(quote, grammar)
    except _UnquotableError as error:
        raise RequestError(f"{param}: {error}", param=param) from error
    return f"start: RULE_START\n{quoted}" if is_regular else quoted


def _quote_token(match: re.Match[str]) -> str:
    if match["string"]:
        try:
            text = json.loads(re.sub(r"\\x([0-9a-fA-F]{2})", r"\\u00\1", match["string"]))
        except ValueError as error:
            raise _unsupported(match["string"], error) from error
        quoted = json.dumps(text, ensure_ascii=False)[1:-1]
        if match["flag"] and quoted != text:
            raise _unsupported(match[0], "a string without case has no quotes, backslashes and control characters")
        return literal(quoted) + match["flag"]
    if match["regex"]:
        return f"/{_quote_regex(match['regex'][1:-1], match['flags'])}/{match['flags']}"
    if match["common"]:
        pattern = _COMMON.get(match["common"])
        return match[0] if pattern is None else f"{match['alias'] or match['common']}: /{_quote_regex(pattern)}/"
    if match["other"]:
        raise _unsupported(match[0], "the model writes calls as JSON")
    return "" if match["comment"] or match["tree"] else match[0]


def _quote_regex(pattern: str, flags: str = "") -> str:
    def quote(match: re.Match[str]) -> str:
        atom = match[0]
        if atom == ".":
            atom = r"[\s\S]" if "s" in flags else r"[^\n]"
        elif atom[0] != "[":
            atom = f"[{atom}]"
        elif _NESTED.search(_ESCAPED.sub("", atom[1:-1])):
            raise _unsupported(atom, "a class within a class")
        plain = f"[{atom}&&{_PLAIN}]"
        if atom[1:3] in (r"\p", r"\P"):  # of Unicode, which Python does not know
            return plain
        try:
            is_in = re.compile(atom).fullmatch
        except re.error as error:
            raise _unsupported(match[0], error) from error
        letters = re.escape("".join(letter for char, letter in _ESCAPES.items() if is_in(char)))
        return rf"(?:{plain}|(?-i:\\[{letters}]))" if letters else plain

    return _ATOM.sub(quote, pattern)


def _unsupported(part: str, reason: object) -> _UnquotableError:
    return _UnquotableError(f"{part[:80]} in the grammar of a tool is not supported: {reason}")
