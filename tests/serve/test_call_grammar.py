"""Grammars of tool calls: what the families write is accepted, and nothing else."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import msgspec
import pytest
import tokenizers
from llguidance import LLMatcher

from meltcore.serve.requests.protocol import Function
from meltcore.serve.tasks.generation.call_grammar import call_grammar
from meltcore.serve.tasks.generation.text_function import text_function
from meltcore.text.answer_format import CALL_FORMATS, AnswerFormat, answer_format
from meltcore.text.answer_parser import AnswerParser, ToolSet
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


def accepts(form: AnswerFormat, written: str, **options: Any) -> bool:
    grammar = call_grammar(form, [PING, GET], **{"is_forced": True, "is_parallel": True} | options)
    assert grammar is not None
    compiler = GrammarCompiler(form.tokenizer, [END])
    compiler.check(grammar)
    matcher = compiler.matcher(grammar)
    token_ids = form.tokenizer.encode(written, add_special_tokens=False)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


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
]  # fmt: skip
BETWEEN = {"hermes": "\n", "qwen3_coder": "\n", "llama3_json": "; ", "mistral": ""}


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
    if name != "mistral" or more:
        joined = BETWEEN[name].join(good)
        assert accepts(form, joined)
        assert not accepts(form, joined, is_parallel=False)


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
    grammar = call_grammar(form, [PING], is_forced=True, is_parallel=True)
    assert (grammar is None) == (name in ("functiongemma", "pythonic"))
    if name == "llama3_json":  # nothing tells a call from text
        assert call_grammar(form, [PING], is_forced=False, is_parallel=True) is None


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
    grammar = call_grammar(form, [PING, PATCH], is_forced=True, is_parallel=False)
    assert grammar is not None
    matcher = GrammarCompiler(form.tokenizer, [END]).matcher(grammar)
    written = text if name == "qwen3_coder" else json.dumps(text)[1:-1]
    call = call.replace("{{", "{").replace("}}", "}").replace("{}", written, 1)
    token_ids = form.tokenizer.encode(call, add_special_tokens=False)
    accepted = matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()
    assert accepted is is_valid


def test_names_and_schemas_cannot_leave_their_place() -> None:
    odd = Function('a"b\nstart: "x"', parameters={"properties": {'k"\n': {"enum": ['v"\n']}}})
    for name in ("hermes", "qwen3_coder"):
        form = make_format(name)
        grammar = call_grammar(form, [odd], is_forced=True, is_parallel=False)
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
@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_odd_schemas_compile_or_are_refused_by_the_compiler(name: str, schema: dict[str, Any]) -> None:
    form = make_format(name)
    grammar = call_grammar(form, [Function("f", parameters=schema)], is_forced=True, is_parallel=True)
    assert grammar is not None
    with suppress(ValueError):
        GrammarCompiler(form.tokenizer, [END]).check(grammar)
