"""Grammars of custom tools: what a text may be, its JSON string may be, and nothing else."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest

from meltcore.common.errors import RequestError
from meltcore.serve.tasks.generation.text_function import (
    MAX_DEFINITION_CHARS,
    quote_grammar,
    text_function,
    text_input,
)
from meltcore.text.grammar import GrammarCompiler
from meltcore.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.synthetic_bytes(300)
COMPILER = GrammarCompiler(TOKENIZER, [299])
# Shaped like the grammars of patches that agents send.
PATCH = r"""
// a patch
start: begin hunk+ end  # all of it
begin: "*** Begin" LF
end: "*** End" LF?
hunk: "*** Add: " filename LF add_line+
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

%import common.LF
"""
CASES: list[tuple[str, list[str], list[str]]] = [
    (
        PATCH,
        ['*** Begin\n*** Add: a "b"\\c\n+x\n+\n*** End', "*** Begin\n*** Add: ü\n+\ty\n*** End\n"],
        ["*** Begin\n*** End", "*** Begin\n*** Add: \n+x\n*** End", "*** Begin *** Add: a\n+x\n*** End"],
    ),
    ("!start: a?B\n?a: /[^a-z\\n]+/ \"\\n\"\nB: /\\s\\S/i", ["\"\\\n\tx", "A\n\rX"], ["a\n\tx", "A\n\t\n"]),
    (r"start: /[\"\\]|\\n|\n{2}|x\/y/", ['"', "\\", "\\n", "\n\n", "x/y"], ["\n", "n", "/"]),
    (r'start: "a\x2c"i | "\u00fc" | "\t"', ["A,", "ü", "\t"], ["u", "a"]),
    (r"start: /(?s:a)./s", ["a\n", 'a"', "a\\"], ["a", "ab\n"]),
    ("%import common.WS -> BLANK\nstart: (WORD BLANK)+\nWORD: /\\w{2,3}/", ["ab \n\t", "abc\nde "], ["a ", "ab"]),
    ('?start: "(" start ")" | /"+/', ['(("))', '"""'], ['("', "()"]),  # with recursion
    ('start: "a" "b"\n%ignore /[ \\n]+/', ["a \nb", "ab"], ["a", "a\tb"]),
]  # fmt: skip


def accepts(grammar: str, text: str) -> bool:
    COMPILER.check(grammar)
    matcher = COMPILER.matcher(grammar)
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(("grammar", "valid", "invalid"), CASES, ids=[case[0][:20] for case in CASES])
def test_json_strings_follow_the_grammar_of_their_texts(grammar: str, valid: list[str], invalid: list[str]) -> None:
    quoted = quote_grammar(grammar)
    for text in valid + invalid:
        is_valid = text in valid
        assert accepts(grammar, text) is is_valid, text
        assert accepts(quoted, json.dumps(text, ensure_ascii=False)[1:-1]) is is_valid, text
    for text in ('"', "\n", "\\x", "\\N", "\\"):  # no JSON string has them
        assert not accepts(quoted, text)


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ('%json {"type": "string"}', "%json"),
        ("%lark { start: /a/ }", "%lark"),
        ("@other", "@"),
        ("<think>", "<"),
        (r"/[[:alpha:]]/", "a class within a class"),
        (r"/[a-z&&[^b]]/", "a class within a class"),
        (r"/[z-a]/", "bad character range"),
        (r'"\n"i', "without case"),
        (r'"\q"', r"\q"),
        ("A\nA: ~/a/", "~"),
    ],
)
def test_parts_without_a_json_form_are_named(part: str, named: str) -> None:
    with pytest.raises(RequestError) as caught:
        quote_grammar(f"start: {part}")
    assert named in caught.value.message
    assert caught.value.param == "tools"


@pytest.mark.parametrize("pattern", ["[" * 60_000, "[\\", "[a\\]", '"' * 60_000, "(" * 60_000])
def test_the_work_for_a_grammar_is_linear(pattern: str) -> None:
    """An expression with a quadratic search took 25 s for 30,000 brackets without an end."""
    with suppress(RequestError):
        quote_grammar(f"start: /{pattern}/")


def test_a_long_grammar_is_refused_by_its_length() -> None:
    assert text_function("tool", None, "a" * MAX_DEFINITION_CHARS).grammar is not None
    with pytest.raises(RequestError, match="'tool' has 65537 characters; the limit is 65536"):
        text_function("tool", None, "a" * (MAX_DEFINITION_CHARS + 1))


@pytest.mark.parametrize(
    ("pattern", "text"), [(r"a/b", "a/b"), (r"a\/b", "a/b"), (r"\\/", "\\/"), (r"[/]+", "//"), ("\\d{2}", "07")]
)
def test_a_regular_expression_is_a_grammar(pattern: str, text: str) -> None:
    function = text_function("tool", "A tool.", pattern, "regex")
    assert function.grammar is not None
    assert accepts(function.grammar, text)
    assert accepts(quote_grammar(function.grammar), json.dumps(text)[1:-1])
    assert function.strict
    assert function.description == f"A tool.\nThe input follows this regular expression:\n{pattern}"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\n\\"b\\""}', 'a\n"b"'),
        ('{"input": ""}', ""),
        ('{"patch": "x"}', '{"patch": "x"}'),
        ('{"input": 3}', '{"input": 3}'),
        ("", ""),
        ('{"input": "a\\ud800b"}', "a\ufffdb"),
        ('{"input": ' + "9" * 5000 + "}", '{"input": ' + "9" * 5000 + "}"),
        ('{"input": ' + "[" * 3000, '{"input": ' + "[" * 3000),  # deeper than it can be read
    ],
)
def test_the_input_is_the_text_of_the_call(arguments: str, text: Any) -> None:
    assert text_input(arguments) == text


def test_the_input_of_a_cut_call_is_the_beginning_of_its_text() -> None:
    """Wherever the JSON is cut, also within an escape, and without what is around the text."""
    text = 'a\n"b" \\ü 😀\ud800c'
    shown = text.replace("\ud800", "\ufffd")
    for arguments in (json.dumps({"input": text}), ' {\n"input" :"' + json.dumps(text, ensure_ascii=False)[1:] + " }"):
        found = [text_input(arguments[:end], is_cut=True) for end in range(len(arguments) + 1)]
        assert all(shown.startswith(each) for each in found)
        assert found == sorted(found, key=len)
        assert set(found) >= {shown[:length] for length in range(9)} | {shown}
        assert found[-1] == text_input(arguments) == shown
    for other in ('{"place": "Bonn", ', '{"input": 3', '{"input": "a", "b'):
        assert text_input(other, is_cut=True) == other
