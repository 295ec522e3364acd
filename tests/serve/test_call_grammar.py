"""Grammars of tool calls: what the families write is accepted, and nothing else."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any

import msgspec
import pytest
import tokenizers
from call_examples import write as write_calls
from llguidance import LLMatcher

from meltcore.common.errors import RequestError
from meltcore.serve.requests.protocol import ChatRequest, Function, decode_request
from meltcore.serve.tasks.generation.call_grammar import call_grammar
from meltcore.serve.tasks.generation.structured import requested_grammar
from meltcore.serve.tasks.generation.text_function import text_function
from meltcore.serve.tasks.generation.tools import tool_grammar
from meltcore.text.answer_format import CALL_FORMATS, AnswerFormat, answer_format
from meltcore.text.answer_parser import AnswerParser
from meltcore.text.call_scanners import ToolSet
from meltcore.text.chat_template import ChatTemplate
from meltcore.text.grammar import GrammarCompiler
from meltcore.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

END = 299  # of an answer
PING = Function("ping")
GET = Function(
    "get",
    parameters={
        "type": "object",
        "properties": {
            "place": {"type": "string"},
            "unit": {"enum": ["C", "F"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["place"],
        "additionalProperties": False,
    },
    strict=True,
)
HERMES = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
CODER = "<tool_call>\n<function={}>\n{}</function>\n</tool_call>"
BONN = "<parameter=place>\nBonn\n</parameter>\n"
MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]")


def make_format(name: str, *more: str) -> AnswerFormat:
    raw = tokenizers.Tokenizer.from_str(Tokenizer.synthetic_bytes(300)._backend.to_str())
    raw.add_tokens([tokenizers.AddedToken(text, special=False) for text in (*MARKS, *more)])
    return answer_format(Tokenizer(raw), {}, ChatTemplate("tools"), calls=name)


def accepts(form: AnswerFormat, written: str, *, functions: Any = (PING, GET), **options: Any) -> bool:
    grammar = call_grammar(form, list(functions), [], **{"is_forced": True, "is_parallel": True} | options)
    assert grammar is not None
    compiler = GrammarCompiler(form.tokenizer, [END])
    compiler.check(grammar)
    matcher = compiler.matcher(grammar)
    token_ids = form.tokenizer.encode(written, add_special_tokens=False)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


GEMMA_MARKS = ("<start_function_call>", "<end_function_call>", "<escape>")
GEMMA = "<start_function_call>call:{}<end_function_call>"
CASES: list[tuple[str, tuple[str, ...], list[str], list[str]]] = [
    (
        "hermes",
        (),
        [HERMES.format("ping", "{}"), HERMES.format("get", '{"place": "a\\"b", "days": 3}')],
        [HERMES.format("other", "{}"), HERMES.format("get", "{}"), HERMES.format("get", '{"place": "x", "days": 10}')],
    ),
    (
        "qwen3_coder",
        (),
        [CODER.format("ping", ""), CODER.format("get", BONN),
         CODER.format("get", BONN + "<parameter=unit>\nC\n</parameter>\n<parameter=days>\n3\n</parameter>\n"),
         CODER.format("get", "<parameter=place>\na < b\n\n</parameter>\n")],
        [CODER.format("get", ""), CODER.format("other", ""), CODER.format("ping", BONN),
         CODER.format("get", BONN + "<parameter=unit>\nK\n</parameter>\n"),
         CODER.format("get", BONN + "<parameter=days>\nthree\n</parameter>\n")],
    ),
    (
        "llama3_json",
        (),
        ['{"name": "ping", "parameters": {}}', '{"name": "get", "parameters": {"place": "x"}}'],
        ['{"name": "get", "parameters": {}}', '{"name": "ping", "arguments": {}}'],
    ),
    (
        "mistral",
        (),
        ['[TOOL_CALLS][{"name": "ping", "arguments": {}}]'],
        ['[TOOL_CALLS][]', "[TOOL_CALLS]ping[ARGS]{}"],
    ),
    (
        "mistral",
        ("[ARGS]",),
        ["[TOOL_CALLS]ping[ARGS]{}", '[TOOL_CALLS]get[ARGS]{"place": "x"}'],
        ["[TOOL_CALLS]other[ARGS]{}", "[TOOL_CALLS]get[ARGS]{}"],
    ),
    (
        "functiongemma",
        GEMMA_MARKS,
        [GEMMA.format("ping{}"), GEMMA.format("get{place:<escape>a, {b}:\n<escape>,days:3}"),
         GEMMA.format("get{place:<escape><escape>,unit:<escape>C<escape>}")],
        [GEMMA.format("get{}"), GEMMA.format("other{}"), GEMMA.format("get{place:Bonn}"),
         GEMMA.format("get{place:<escape>x<escape>,days:10}"), GEMMA.format("ping{a:1}")],
    ),
    (
        "pythonic",
        (),
        ["[ping()]", "[get(place='a \\'b', days=3)]", '[get(place="x", unit=\'C\')]'],
        ["[other()]", "[get()]", "[get(place='x', unit='K')]", "[get(place=x)]", "[get(days=3, place='x')]", "[]",
         "[get(place='x', place='y')]", "[get(place='x' days=3)]", "[get(place='x', days=3.5)]", "[ping()"],
    ),
]  # fmt: skip
BETWEEN = {"hermes": "\n", "qwen3_coder": "\n", "llama3_json": "; ", "mistral": "", "functiongemma": ""}


@pytest.mark.parametrize(("name", "more", "good", "bad"), CASES)
def test_forced_answer_is_a_call_of_a_given_tool(
    name: str, more: tuple[str, ...], good: list[str], bad: list[str]
) -> None:
    form = make_format(name, *more)
    for written in good:
        assert accepts(form, written), written
        parser = AnswerParser(form, ToolSet({"ping": {}, "get": GET.parameters or {}}))
        assert parser.feed(written) + parser.end() == ""
        arguments = "".join(call.arguments for call in parser.take()[1])
        msgspec.json.decode(arguments, type=dict[str, Any])
    for written in (*bad, "", f"Well. {good[0]}", f"{good[0]} Well."):
        assert not accepts(form, written), written
    if name in BETWEEN and (name != "mistral" or more):
        joined = BETWEEN[name].join(good)
        assert accepts(form, joined)
        assert not accepts(form, joined, is_parallel=False)


def test_answer_that_no_mark_tells_from_a_call_is_refused_by_the_field_that_was_sent() -> None:
    tool = {"type": "function", "function": {"name": "ping"}}
    fields = {"messages": [{"role": "user", "content": "x"}], "tools": [tool], "structured_outputs": {"regex": "a"}}
    request = decode_request(msgspec.json.encode(fields), ChatRequest)
    with pytest.raises(RequestError, match=r"^structured_outputs\.regex: nothing can enforce") as error:
        tool_grammar(request, make_format("llama3_json"), requested_grammar(request))
    assert error.value.param == "structured_outputs.regex"


def test_calls_of_python_share_one_list() -> None:
    form = make_format("pythonic")
    for written in ("[ping(), ping()]", "[get(place='x'), ping(), get(place='y')]"):
        assert accepts(form, written)
        assert not accepts(form, written, is_parallel=False)


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_strict_tools_leave_text_around_calls_free(name: str) -> None:
    form = make_format(name)
    call = HERMES.format("ping", "{}") if name == "hermes" else CODER.format("ping", "")
    for written in ("Just text.", call, f"Look.\n{call}", f"{call}\n{call}"):
        assert accepts(form, written, is_forced=False), written
    assert not accepts(form, f"Look.\n{call.replace('ping', 'pong')}", is_forced=False)


@pytest.mark.parametrize("name", [*CALL_FORMATS])
def test_format_without_a_grammar_says_so(name: str) -> None:
    form = make_format(name)
    grammar = call_grammar(form, [PING], [], is_forced=True, is_parallel=True)
    assert (grammar is None) == (name == "functiongemma")  # whose marks are no tokens of this vocabulary
    if name in ("llama3_json", "pythonic"):  # nothing tells a call from another object
        assert call_grammar(form, [PING], [], is_forced=False, is_parallel=True, answer="start: /.*/") is None


@pytest.mark.parametrize(
    ("name", "more", "calls", "texts", "bad"),
    [
        (
            "llama3_json",
            ("<|python_tag|>",),
            ['{"name": "ping", "parameters": {}}', '<|python_tag|>{"name": "get", "parameters": {"place": "x"}}'],
            ["Well.", '{"a": {"size": 1}', "a { b } [ping()]"],
            ['{"name": "get", "parameters": {}}', 'Look. {"name": "ping"}', '{ "type" : "function"}'],
        ),
        (
            "pythonic",
            (),
            ["[ping()]", "[get(place='x'), ping()]"],
            ["Well.", "a[0] = ping()", "[other()]", '{"name": "ping"}', "[1, 2]"],
            ["[get()]", "Look. [ping()]", "[ ping ("],
        ),
        (
            "functiongemma",
            GEMMA_MARKS,
            [GEMMA.format("ping{}"), "Look." + GEMMA.format("get{place:<escape>x<escape>}")],
            ["Well.", "call:get{}"],
            [GEMMA.format("get{}"), "Look." + GEMMA.format("other{}")],
        ),
    ],
)
def test_strict_tools_beside_text(
    name: str, more: tuple[str, ...], calls: list[str], texts: list[str], bad: list[str]
) -> None:
    form = make_format(name, *more)
    tools = ToolSet({"ping": {}, "get": GET.parameters or {}})
    for written in (*calls, *texts):
        assert accepts(form, written, is_forced=False), written
        parser = AnswerParser(form, tools)
        ids = form.tokenizer.encode(written, add_special_tokens=False)
        text = "".join(parser.mark(each) if each in parser.hidden_ids else
                       parser.feed(form.tokenizer.decode([each])) for each in ids) + parser.end()  # fmt: skip
        assert (text == written, parser.has_calls) == (written in texts, written in calls)
    for written in bad:
        assert not accepts(form, written, is_forced=False), written


ARGUMENTS: dict[str, Any] = {
    "text": {"type": "string"},
    "kind": {"enum": ["a b", "it's", 2, True, None], "description": "one of them"},
    "on": {"type": ["boolean", "null"]},
    "size": {"type": "number", "minimum": -1.5, "exclusiveMaximum": 3},
    "tags": {"type": "array", "items": {"type": "string"}},
    "area": {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}, "required": ["y"]},
    "anything": {},
    "tree": {"$ref": "#/$defs/tree", "description": "a list of its branches"},
    "counts": {"type": "object", "additionalProperties": {"type": "integer"}},
}
DEFINITIONS = {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}


@pytest.mark.parametrize("family", ["pythonic", "functiongemma"])
def test_arguments_of_all_kinds_are_accepted_and_read_back(family: str) -> None:
    form = make_format(family, *GEMMA_MARKS)
    schema = {"type": "object", "properties": ARGUMENTS, "required": ["kind"], "$defs": DEFINITIONS}
    function = Function("f", parameters=schema, strict=True)
    values: list[dict[str, Any]] = [
        {"text": "a\nb 東", "kind": "it's", "on": True, "size": 2.5, "tags": ["x", "y"], "area": {"x": 1, "y": -2}},
        {"kind": 2, "on": None, "size": -1.5, "tags": [], "area": {"y": 0}},
        {"kind": None, "anything": {"deep": [1, "two", {"three": [True, None]}], "e": ""}},
        {"kind": "a b", "anything": "text"},
        {"kind": True, "anything": []},
        {"kind": 2, "tree": [[], [[]]], "counts": {"a": 1, "b": -2}},
    ]
    for arguments in values:
        written = write_calls(family, [("f", arguments)])
        assert accepts(form, written, functions=[function]), written
        parser = AnswerParser(form, ToolSet({"f": function.parameters or {}}))
        assert parser.feed(written) + parser.end() == ""
        assert json.loads("".join(call.arguments for call in parser.take()[1])) == arguments
    bad = [{}, {"kind": "c"}, {"kind": 2, "size": 3}, {"kind": 2, "area": {"x": 1}}, {"kind": 2, "tags": [1]},
           {"kind": 2, "tree": [1]}, {"kind": 2, "counts": {"a": "x"}},
           {"kind": 2, "other": 1}, {"on": True, "kind": 2}, {"kind": 2, "text": 5}]  # fmt: skip
    for arguments in bad:
        assert not accepts(form, write_calls(family, [("f", arguments)]), functions=[function]), arguments


@pytest.mark.parametrize("family", ["pythonic", "functiongemma"])
@pytest.mark.parametrize(
    ("schema", "part"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "x"}}}, "pattern"),
        ({"properties": {"a": {"anyOf": [{"type": "string"}]}}}, "anyOf"),
        ({"properties": {"a": {"type": "array", "items": {"$ref": "#/x"}}}}, r"\$ref"),
        ({"properties": {"a b": {"type": "string"}}}, "the name 'a b'"),
        ({"properties": {"a": {"type": "array", "minItems": 1}}}, "minItems"),
        ({"properties": {}, "required": ["zz"]}, "the required name 'zz', which is no property,"),
        ({"properties": {"a": {"$ref": "#/$defs/b", "maxLength": 2}}, "$defs": {"b": {}}}, r"\$ref"),
        ({"properties": {"a": {"enum": [[1]]}}}, "an enum of lists or objects"),
        ({"minProperties": 1}, "minProperties"),
    ],
)
def test_strict_part_that_no_grammar_can_enforce_is_refused_by_name(
    family: str, schema: dict[str, Any], part: str
) -> None:
    form = make_format(family, *GEMMA_MARKS)
    with pytest.raises(RequestError, match=f"tools: {part} of the strict function f"):
        call_grammar(form, [Function("f", parameters=schema, strict=True)], [], is_forced=True, is_parallel=True)
    arguments = {"a": "anything"} if "a" in schema.get("properties", {}) else {}
    weakened: list[str] = []
    call_grammar(form, [Function("f", parameters=schema)], weakened, is_forced=True, is_parallel=True)
    assert re.match(part, weakened[0])
    if part != "an enum of lists or objects":
        written = write_calls(family, [("f", arguments if "array" not in str(schema) else {"a": ["anything"]})])
        assert accepts(form, written, functions=[Function("f", parameters=schema)])


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_answer_that_is_no_call_follows_its_own_schema(name: str) -> None:
    form = make_format(name)
    answer = LLMatcher.grammar_from_json_schema('{"type": "object", "properties": {"n": {"type": "integer"}}}')
    call = HERMES.format("ping", "{}") if name == "hermes" else CODER.format("ping", "")
    for written in (call, '{"n": 5}'):
        assert accepts(form, written, is_forced=False, answer=answer), written
    for written in ("Well.", '{"n": "five"}', f"{call} Well."):
        assert not accepts(form, written, is_forced=False, answer=answer), written


PATCH = text_function("patch", None, 'start: line+\nline: "+" /[^\\n]*/ LF\n%import common.LF')


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("hermes", HERMES.format("patch", '{{"input": "{}"}}')),
        ("mistral", '[TOOL_CALLS][{{"name": "patch", "arguments": {{"input": "{}"}}}}]'),
        ("llama3_json", '{{"name": "patch", "parameters": {{"input": "{}"}}}}'),
        ("qwen3_coder", CODER.format("patch", "<parameter=input>\n{}\n</parameter>\n")),
    ],
)
@pytest.mark.parametrize(("text", "is_valid"), [('+a "b"\n+\n', True), ("+\t\\\n", True), ("a\n", False), ("", False)])
def test_the_text_of_a_custom_tool_follows_its_grammar(name: str, call: str, text: str, is_valid: bool) -> None:
    form = make_format(name)
    grammar = call_grammar(form, [PING, PATCH], [], is_forced=True, is_parallel=False)
    assert grammar is not None
    matcher = GrammarCompiler(form.tokenizer, [END]).matcher(grammar)
    written = text if name == "qwen3_coder" else json.dumps(text)[1:-1]
    call = call.replace("{{", "{").replace("}}", "}").replace("{}", written, 1)
    token_ids = form.tokenizer.encode(call, add_special_tokens=False)
    accepted = matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()
    assert accepted is is_valid


@pytest.mark.parametrize("name", ["pythonic", "functiongemma"])
def test_no_grammar_has_the_text_of_a_custom_tool_where_strings_are_no_json(name: str) -> None:
    form = make_format(name, "<start_function_call>", "<end_function_call>", "<escape>")
    options: Any = {"is_forced": True, "is_parallel": False}
    assert call_grammar(form, [PING, text_function("patch", None)], [], **options) is not None
    assert call_grammar(form, [PING, PATCH], [], **options) is None


def test_names_and_schemas_cannot_leave_their_place() -> None:
    odd = Function('a"b\nstart: "x"', parameters={"properties": {'k"\n': {"enum": ['v"\n']}}})
    for name in ("hermes", "qwen3_coder"):
        form = make_format(name)
        grammar = call_grammar(form, [odd], [], is_forced=True, is_parallel=False)
        assert grammar is not None
        assert sum(line.startswith("start:") for line in grammar.splitlines()) == 1
        GrammarCompiler(form.tokenizer, [END]).check(grammar)


ODD_SCHEMAS: list[dict[str, Any]] = [
    {"properties": {"a": {}}, "required": 5},
    {"properties": {"a": {"enum": 5}}},
    {"properties": {"a": {"enum": []}}},
    {"properties": {"a": True, "b": {"const": "x"}}, "required": "a"},
    {"properties": 5},
    {"properties": {"a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/c"}}}}, "$defs": {"c": {}}},
]


@pytest.mark.parametrize("schema", ODD_SCHEMAS, ids=str)
@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "pythonic", "functiongemma"])
def test_odd_schemas_compile_or_are_refused_by_the_compiler(name: str, schema: dict[str, Any]) -> None:
    form = make_format(name, *GEMMA_MARKS)
    grammar = call_grammar(form, [Function("f", parameters=schema)], [], is_forced=True, is_parallel=True)
    assert grammar is not None
    with suppress(ValueError):
        GrammarCompiler(form.tokenizer, [END]).check(grammar)
