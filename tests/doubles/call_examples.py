"""Answers with tool calls as the families of models write them, each with the text and the calls that it means.

Where the formats are documented: Qwen3 and Nous Hermes in the chat template of Qwen/Qwen3-8B and the function calling
standard of NousResearch; Qwen3-Coder and Qwen3.5 in the chat template of Qwen/Qwen3-Coder-30B-A3B-Instruct; Llama 3 in
Meta's prompt formats (JSON based tool calling); Mistral in mistral-common's tokenizers v3, v7 and v11; pythonic calls
in Meta's prompt format of Llama 3.2 and Google's page on function calling with Gemma 3; FunctionGemma in Google's page
on its formatting. The examples are written for these tests.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

Call = tuple[str, dict[str, Any]]


class Example(NamedTuple):
    """What a model writes, and what it means."""

    written: str
    text: str
    calls: list[Call]


# What a call may contain. Each value becomes an argument of its own example.
VALUES: list[Any] = [
    "Bonn", "", " ", "a b", "123", "-1.5", "true", "null", "None", "[1]", '{"a": 1}', "it's", 'say "no"', "back\\slash",
    "tab\there", "line\nline", "two\n\nlines", "ünïcödé 東京 🙂", "{", "}", "[", "]", "}}", "a, b", "a=b", "x < y > z",
    "</tool_call>", "<tool_call>", "f(x)", "```", "<|im_end|>", "//", "%", "\\n", "\u2028", "0", "<", "&amp;",
    0, 1, -7, 123456789012345678901234567890, 1.5, -0.25, 1e-07, True, False, None,
    [], {}, [1, 2, 3], ["a", "b"], {"k": "v"}, {"k": {"l": [1, {"m": None}]}}, [[], [[]]], [True, None, 1.5, "x"],
    {"a": [], "b": {}, "c": ""},
]  # fmt: skip
CALLS: list[tuple[str, list[Call], str]] = [
    ("", [("ping", {})], ""),
    ("", [("ping", {}), ("get", {"place": "Bonn"})], ""),  # a call after an empty one
    ("", [("get", {"place": "Bonn"}), ("ping", {})], ""),
    ("", [("ping", {}), ("ping", {}), ("ping", {})], ""),
    ("", [("get", {"place": "Bonn"}), ("get", {"place": "Bonn"})], ""),
    ("Let me look.", [("get", {"place": "Bonn"})], ""),
    ("Let me\n\nlook.", [("ping", {})], ""),
    ("", [("get", {"place": "Bonn", "days": 3, "exact": True, "extra": None})], ""),
]


def schemas() -> dict[str, dict[str, Any]]:
    """The parameters of the tools of all examples, by name: one tool per value, whose argument has its type."""
    names = {
        str: "string",
        bool: "boolean",
        int: "integer",
        float: "number",
        type(None): "null",
        list: "array",
        dict: "object",
    }
    one = {f"tool_{at}": {"value": {"type": names.get(type(value), "null")}} for at, value in enumerate(VALUES)}
    more = {
        "ping": {},
        "get": {"place": {"type": "string"}, "days": {"type": "integer"}, "exact": {"type": "boolean"},
                "extra": {"type": ["string", "null"]}},
    }  # fmt: skip
    return {name: {"type": "object", "properties": fields} for name, fields in (one | more).items()}


def write(family: str, calls: list[Call]) -> str:
    """Return the calls as a family writes them."""
    return {
        "hermes": _hermes, "qwen3_coder": _coder, "llama3_json": _llama, "mistral": _mistral,
        "mistral_v11": _mistral_v11, "pythonic": _pythonic, "functiongemma": _gemma,
    }[family](calls)  # fmt: skip


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _hermes(calls: list[Call]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": {_json(name)}, "arguments": {_json(arguments)}}}\n</tool_call>'
        for name, arguments in calls
    )


def _coder(calls: list[Call]) -> str:
    def parameter(key: str, value: Any) -> str:
        text = _json(value) if isinstance(value, dict | list) else str(value)
        return f"<parameter={key}>\n{text}\n</parameter>\n"

    inner = ((name, "".join(map(parameter, arguments, arguments.values()))) for name, arguments in calls)
    return "\n".join(f"<tool_call>\n<function={name}>\n{each}</function>\n</tool_call>" for name, each in inner)


def _llama(calls: list[Call]) -> str:
    return "; ".join(f'{{"name": {_json(name)}, "parameters": {_json(arguments)}}}' for name, arguments in calls)


def _mistral(calls: list[Call]) -> str:
    return "[TOOL_CALLS]" + _json([{"name": name, "arguments": arguments} for name, arguments in calls])


def _mistral_v11(calls: list[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(arguments)}" for name, arguments in calls)


def _pythonic(calls: list[Call]) -> str:
    def call(name: str, arguments: dict[str, Any]) -> str:
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"

    return f"[{', '.join(call(*each) for each in calls)}]"


def _gemma(calls: list[Call]) -> str:
    def literal(value: Any) -> str:
        if isinstance(value, str):
            return f"<escape>{value}<escape>"
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{literal(each)}" for key, each in value.items()) + "}"
        return f"[{','.join(map(literal, value))}]" if isinstance(value, list) else _json(value)

    return "".join(
        f"<start_function_call>call:{name}{literal(arguments)}<end_function_call>" for name, arguments in calls
    )


_F, _G = ("get", {"place": "Bonn"}), ("ping", {})


def _get(parameters: str) -> str:
    return f"<tool_call>\n<function=get>\n{parameters}\n</function>\n</tool_call>"


def _text(written: str) -> Example:
    """An answer without calls."""
    return Example(written, written, [])


# What models write beside the plain form: other orders and blanks, text around calls, and what is no call.
ODD: dict[str, list[Example]] = {
    "hermes": [
        Example('<tool_call>{"name":"get","arguments":{"place":"Bonn"}}</tool_call>', "", [_F]),
        Example('<tool_call>\n{"arguments": {"place": "Bonn"}, "name": "get"}\n</tool_call>', "", [_F]),
        Example('<tool_call>\n{"name": "get", "parameters": {"place": "Bonn"}}\n</tool_call>', "", [_F]),
        Example('<tool_call>\n{"name": "get", "arguments": "{\\"place\\": \\"Bonn\\"}"}\n</tool_call>', "", [_F]),
        Example('<tool_call>\n{"name": "ping"}\n</tool_call>', "", [_G]),
        Example('<tool_call>\n{"name": "ping", "arguments": null}\n</tool_call>', "", [_G]),
        Example('<tool_call>\n{"type": "function", "name": "ping", "arguments": {}}\n</tool_call>', "", [_G]),
        Example('<tool_call>\n{"function": {"name": "ping", "arguments": {}}}\n</tool_call>', "", [_G]),
        Example('<tool_call>\n{"name": "ping", "arguments": {}, "id": {"a": "b"}}\n</tool_call>', "", [_G]),
        Example('<tool_call>{"name": "ping"}\n{"name": "ping", "arguments": {}}\n</tool_call>', "", [_G, _G]),
        Example('<tool_call>\n{"name": "ping", "arguments": {}}', "", [_G]),  # the end mark is missing
        Example('a<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>b', "ab", [_G]),
        Example('<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>', "", [("other", {})]),
        _text("<tool_call> is a tag"),
        _text('<tool_call>\n{"name": "get", "argum'),
        _text("no call\n"),
        _text('{"name": "ping", "arguments": {}}'),
    ],
    "qwen3_coder": [
        Example("<function=ping>\n</function>", "", [_G]),  # without the outer mark
        Example("<tool_call><function=ping></function></tool_call>", "", [_G]),
        Example(_get("<parameter=place>Bonn</parameter>"), "", [_F]),
        Example(_get("<parameter=place>\nBonn"), "", [_F]),
        Example("<tool_call>\n<function=get>\n<parameter=place>\nBonn\n</parameter>\n</tool_call>", "", [_F]),
        Example(_get("<parameter=q>\n1\n<parameter=days>\n3\n</parameter>"), "", [("get", {"q": "1", "days": 3})]),
        Example(_get("<parameter=place>\nBonn\n</parameter>\n<parameter=place>\nKöln\n</parameter>"), "", [_F]),
        Example(_get("<parameter=days>\nsoon\n</parameter>"), "", [("get", {"days": "soon"})]),
        Example(_get("<parameter=other>\n5\n</parameter>"), "", [("get", {"other": "5"})]),
        Example(_get("<parameter=exact>\ntrue\n</parameter>"), "", [("get", {"exact": True})]),
        Example("<tool_call>\n<function=ping>\n</function>\n<function=ping>\n</function>\n</tool_call>", "", [_G, _G]),
        Example("a<tool_call>\n<function=ping>\n</function>\n</tool_call>b", "ab", [_G]),
        _text("<tool_call> or <function="),
        Example("<tool_call>\n<function=get>\n<parameter=place>\nBo", "", []),  # cut
    ],
    "llama3_json": [
        Example('<|python_tag|>{"name": "ping", "parameters": {}}', "", [_G]),
        Example('{"name": "ping", "arguments": {}}', "", [_G]),
        Example('{"type": "function", "name": "ping", "parameters": {}}', "", [_G]),
        Example('{"parameters": {}, "name": "ping"}', "", [_G]),
        Example('{"name": "ping", "parameters": {}}\n{"name": "ping", "parameters": {}}', "", [_G, _G]),
        Example('A set {1, 2} and {"name": "ping", "parameters": {}}', "A set {1, 2} and", [_G]),
        _text('{"name": "other", "parameters": {}}'),
        _text('{"a": {"name": "ping", "parameters": {}}}'),
        _text('{"name": "Ann", "age": 3}'),
        _text('{"name": {"first": "Ann"}}!'),
        _text("if (x) { return; }"),
        Example('{"name": "get", "parameters": {"place": ', "", []),  # cut
        _text("{"),
    ],
    "mistral": [
        Example('[TOOL_CALLS] [{"name": "ping", "arguments": {}}]', "", [_G]),
        Example('[TOOL_CALLS]{"name": "ping", "arguments": {}}', "", [_G]),
        Example('[TOOL_CALLS][{"arguments": {}, "name": "ping", "id": "abcdefghi"}]', "", [_G]),
        Example('[TOOL_CALLS][{"name": "ping", "arguments": {}},\n {"name": "ping", "arguments": {}}]', "", [_G, _G]),
        Example('[TOOL_CALLS][{"name": "ping", "arguments": {}}', "", [_G]),
        Example('Hm.[TOOL_CALLS][{"name": "ping", "arguments": {}}]', "Hm.", [_G]),
        _text("[TOOL_CALLS][]"),
        _text('[TOOL_CALLS][{"name": "get", "argu'),
        _text("a [list] of [1, 2]"),
    ],
    "mistral_v11": [
        Example("[TOOL_CALLS]ping[CALL_ID]abcdefghi[ARGS]{}", "", [_G]),
        Example("[TOOL_CALLS]ping{}", "", [_G]),
        _text("[TOOL_CALLS]ping [ARGS] {}"),
        Example('Hm.[TOOL_CALLS]get[ARGS]{"place": "Bonn"}', "Hm.", [_F]),
        Example('[TOOL_CALLS]get[ARGS]{"place": ', "", []),  # cut
        _text("[TOOL_CALLS]ping[ARGS]"),
    ],
    "pythonic": [
        Example("[ping()]", "", [_G]),
        Example("[ ping( ) , ping() ]", "", [_G, _G]),
        Example("[get(place='Bonn')]", "", [_F]),
        Example('[get(place="Bonn",)]', "", [_F]),
        Example('[get(place="""Bonn""")]', "", [_F]),
        Example("[get(place='Bo' 'nn')]", "", [_F]),
        Example("[get(exact=true, extra=null)]", "", [("get", {"exact": True, "extra": None})]),
        Example("[get(place=('a', 'b'))]", "", [("get", {"place": ["a", "b"]})]),
        Example("```tool_code\n[ping()]\n```", "", [_G]),
        Example("See [1, 2] and [ping()]", "See [1, 2] and", [_G]),
        _text("[other()]"),
        _text("[ping(1)]"),
        _text("[get(place=open('x'))]"),
        _text("[get(place=1+1)]"),
        _text("[get(place={1, 2})]"),
        _text("[get(place='Bo"),
    ],
    "functiongemma": [
        Example("<start_function_call>call:ping{}", "", [_G]),
        Example("<start_function_call> call:get{place: <escape>Bonn<escape> }<end_function_call>", "", [_F]),
        Example("<start_function_call>call:get{place:Bonn}<end_function_call>", "", [_F]),
        Example("<start_function_call>call:get{place:12}<end_function_call>", "", [("get", {"place": "12"})]),
        Example("Hm.<start_function_call>call:ping{}<end_function_call>", "Hm.", [_G]),
        Example("<start_function_call>call:get{place:<escape>Bo", "", []),  # cut
        _text("<start_function_call>ping"),
        _text("<start_function_call>call:get{place}<end_function_call>"),
    ],
}  # fmt: skip
FAMILIES = tuple(ODD)


def examples(family: str) -> list[Example]:
    """Return all examples of a family."""
    plain = [("", [(f"tool_{at}", {"value": value})], "") for at, value in enumerate(VALUES)]
    made = [
        Example((f"{before}\n" if before else "") + write(family, calls) + after, before + after, calls)
        for before, calls, after in plain + CALLS
    ]
    return made + ODD[family]
