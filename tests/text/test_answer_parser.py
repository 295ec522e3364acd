"""Tool calls and reasoning: one result however an answer is divided, no lost call, no exception, linear work."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import call_examples
import pytest
import tokenizers
from call_examples import FAMILIES, VALUES, examples, schemas, write

from meltcore.protocol.sampling_params import SamplingParams
from meltcore.text import answer_parser, call_scanners
from meltcore.text.answer_format import CALL_FORMATS, AnswerFormat, answer_format
from meltcore.text.answer_parser import AnswerParser
from meltcore.text.call_scanners import CallDelta, ToolSet, divide_pieces
from meltcore.text.chat_template import ChatTemplate, MissingTemplate
from meltcore.text.detokenizer import Detokenizer
from meltcore.text.tokenizer import Tokenizer

TOOLS = ToolSet(schemas())
START, END = 300, 301  # of reasoning
Result = tuple[str, str, list[tuple[str, Any]]]


def marks_of(family: str) -> list[str]:
    form = CALL_FORMATS[family.removesuffix("_v11")]
    marks = (*form.opens, *form.closes, *form.name_ends, form.quote)
    return sorted({mark for mark in marks if len(mark) > 2 and mark.isprintable()})


def make_format(family: str) -> AnswerFormat:
    """A vocabulary of bytes and of all marks of a family."""
    raw = tokenizers.Tokenizer.from_str(Tokenizer.synthetic_bytes(300)._backend.to_str())
    marks = marks_of(family)
    raw.add_tokens([tokenizers.AddedToken(text, special=False) for text in ("<think>", "</think>", *marks)])
    template = ChatTemplate("<think> tools")
    return answer_format(Tokenizer(raw), {}, template, calls=family.removesuffix("_v11"))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def form(family: str) -> AnswerFormat:
    return make_format(family)


def merged(calls: Sequence[CallDelta]) -> list[tuple[str, str, str | None]]:
    """The name, the arguments and the end of each call."""
    found: dict[int, tuple[str, str, str | None]] = {}
    for delta in calls:
        name, arguments, end = found.get(delta.call_index, ("", "", None))
        assert end is None, "nothing follows the end of a call"
        assert (delta.name is None) == (delta.call_index in found), "the name comes first"
        found[delta.call_index] = (delta.name or name, arguments + delta.arguments, delta.end)
    assert [*found] == sorted(found)
    return [*found.values()]


def complete(calls: Sequence[CallDelta]) -> list[tuple[str, Any]]:
    every = merged(calls)
    assert all(end is not None for _, _, end in every), "each call is complete or broken in the end"
    return [(name, json.loads(arguments, parse_int=_integer)) for name, arguments, end in every if end == "complete"]


def _integer(digits: str) -> int | str:
    """JSON's integers have no limit, Python's conversion of texts has one."""
    return int(digits) if len(digits) < 1000 else digits


def parse(form: AnswerFormat, pieces: Sequence[str], tools: ToolSet = TOOLS, prompt: Sequence[int] = ()) -> Result:
    parser = AnswerParser(form, tools, prompt)
    text = "".join(map(parser.feed, pieces)) + parser.end()
    reasoning, calls = parser.take()
    return text, "".join(reasoning), complete(calls)


def parse_ids(form: AnswerFormat, token_ids: Sequence[int], size: int, tools: ToolSet | None = TOOLS) -> Result:
    detokenizer = Detokenizer(form.tokenizer, SamplingParams(), form, tools=tools)
    steps = [detokenizer.add(token_ids[at : at + size])[0] for at in range(0, len(token_ids), size)]
    text = "".join([*steps, detokenizer.flush()])
    assert detokenizer.parser is not None
    reasoning, calls = detokenizer.parser.take()
    return text, "".join(reasoning), complete(calls)


def divisions(text: str, chance: random.Random) -> Iterator[list[str]]:
    """Yield a text in single characters, in each two parts, and in pieces of random lengths."""
    yield [*text]
    yield from ([text[:at], text[at:]] for at in range(1, len(text), 1 if len(text) < 100 else 7))
    for _ in range(8):
        cuts = sorted(chance.sample(range(len(text) + 1), min(len(text), 6)))
        yield [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def test_examples_mean_what_they_say(family: str, form: AnswerFormat) -> None:
    written = examples(family)
    assert len(written) >= 60
    for example in written:
        assert parse(form, [example.written]) == (example.text, "", example.calls), example


@pytest.mark.slow
def test_any_division_of_the_characters_gives_the_same(family: str, form: AnswerFormat) -> None:
    chance = random.Random(1)
    for example in examples(family):
        for pieces in divisions(example.written, chance):
            assert parse(form, pieces) == (example.text, "", example.calls), pieces


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 2, 5, 1000])
def test_marks_may_be_tokens_or_spelled(family: str, form: AnswerFormat, tokens: int) -> None:
    """vllm #58105: some answers spell a mark in ordinary tokens. Several tokens may come together."""
    for example in examples(family):
        token_ids = form.tokenizer.encode(example.written, add_special_tokens=False)
        for each in (token_ids, [*example.written.encode()]):
            assert parse_ids(form, each, tokens) == (example.text, "", example.calls), example


def test_arguments_are_passed_on_while_they_come(family: str, form: AnswerFormat) -> None:
    """Every family passes on an argument before the call has ended, and most its characters as they come."""
    written = write(family, [("get", {"place": "B" * 50, "days": 3})])
    parser = AnswerParser(form, TOOLS)
    streamed = ""
    for char in written[: written.rindex("3")]:
        parser.feed(char)
        streamed += "".join(call.arguments for call in parser.take()[1])
    assert streamed.replace(" ", "").startswith('{"place":"' + "B" * (50 if family == "pythonic" else 48))


def test_without_tools_calls_are_text(family: str, form: AnswerFormat) -> None:
    written = write(family, [("ping", {})])
    token_ids = form.tokenizer.encode(written, add_special_tokens=False)
    assert parse_ids(form, token_ids, 1, tools=None)[0] == written


def test_no_markup_leaks_where_no_call_is_wanted(family: str, form: AnswerFormat) -> None:
    tools = ToolSet(TOOLS.schemas, max_calls=0)
    for example in examples(family):
        if example.calls and form.calls is not None and form.calls.has_marks:
            for pieces in ([example.written], [*example.written]):
                text, _, calls = parse(form, pieces, tools)
                assert (text, calls) == (example.text, []), example
    if form.calls is not None and form.calls.has_marks:
        cut = write(family, [("get", {"place": "Bonn"})])
        for end in range(len(form.calls.opens[0]), len(cut)):
            assert parse(form, [cut[:end]], tools) == ("", "", []), cut[:end]


def test_only_the_wanted_number_of_calls_is_passed_on(family: str, form: AnswerFormat) -> None:
    written = write(family, [("ping", {}), ("get", {"place": "Bonn"})])
    assert parse(form, [*written], ToolSet(TOOLS.schemas, max_calls=1)) == ("", "", [("ping", {})])


def test_cut_call_is_a_call_or_text_and_never_both(family: str, form: AnswerFormat) -> None:
    """A call whose name was passed on is marked as cut, however the characters arrive."""
    cut_calls = set[str]()
    written = write(family, [("ping", {}), ("get", {"place": "Bonn", "days": 3})])
    for end in range(len(written)):
        parser = AnswerParser(form, TOOLS)
        text = parser.feed(written[:end]) + parser.end()
        calls = merged(parser.take()[1])
        assert all(state in ("complete", "cut") for _, _, state in calls)
        by_character = AnswerParser(form, TOOLS)
        assert "".join(map(by_character.feed, written[:end])) + by_character.end() == text
        assert merged(by_character.take()[1]) == calls
        cut = [name for name, _, state in calls if state == "cut"]
        cut_calls.update(cut)
        if cut:
            assert (len(cut), text) == (1, "")
        elif not calls:
            assert text == written[:end]
    assert "get" in cut_calls


def test_stop_string_within_a_cut_call_does_not_end_the_answer(family: str, form: AnswerFormat) -> None:
    written = write(family, [("get", {"place": "Bonn", "days": 3})])
    for end in range(written.index("Bonn") + 4, len(written)):
        detokenizer = Detokenizer(form.tokenizer, SamplingParams(stop=("Bonn",)), form, tools=TOOLS)
        text = detokenizer.add(form.tokenizer.encode(written[:end], add_special_tokens=False))[0] + detokenizer.flush()
        assert detokenizer.parser is not None
        is_call = any(state != "broken" for _, _, state in merged(detokenizer.parser.take()[1]))
        assert (text, detokenizer.matched_stop) == ("" if is_call else written[:end], None)


def test_what_a_stream_has_sent_of_a_broken_call_is_no_text(family: str, form: AnswerFormat) -> None:
    """A client cannot take it back. However the characters arrive, each comes once."""
    tools = ToolSet(TOOLS.schemas, is_streamed=True)
    chance, broken = random.Random(5), 0
    for at in range(40):
        written = f"{mutated(write(family, [('get', {'place': f'Bonn{at}', 'days': 3})]), family, chance)} ok"
        results = []
        for pieces in ([written], [*written]):
            parser = AnswerParser(form, tools)
            text = "".join(map(parser.feed, pieces)) + parser.end()
            pieces_in_order = parser.take_pieces()
            calls = merged(divide_pieces(pieces_in_order)[1])
            begins = [place for place, part in pieces_in_order if isinstance(part, CallDelta) and part.name is not None]
            assert begins == sorted(begins)
            results.append((text, calls, begins, parser.has_calls))
        assert results[0] == results[1], written
        ends = [end for _, _, end in calls]
        assert parser.has_calls == ("complete" in ends or "broken" in ends)
        if ends == ["broken"]:
            broken += 1
            assert (text + calls[0][1]).count("Bonn") <= written.count("Bonn"), written
    assert broken


MUTATIONS = ["", '"', "'", "{", "}", "[", "]", "\\", "\n", ",", ":", "<", ">", "=", "(", ")", "x", "\u2028", "\ufffd"]


def mutated(text: str, family: str, chance: random.Random) -> str:
    characters = [*text]
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(characters) + 1)
        choice = chance.choice([*MUTATIONS, *marks_of(family)])
        characters[at : at + chance.randint(0, 3)] = choice
    end = chance.randrange(len(characters) + 1) if chance.random() < 0.3 else len(characters)
    return "".join(characters[:end])


@pytest.mark.slow
def test_no_mutation_costs_an_exception_or_an_intact_call(family: str, form: AnswerFormat) -> None:
    """10,000 texts in all. A call before a broken text is always found, and one after it if its begin has a mark."""
    chance = random.Random(family)
    texts = [example.written for example in examples(family)]
    intact = write(family, [("get", {"place": "intact"})])
    for number in range(10_000 // len(FAMILIES) + 1):
        broken = mutated(chance.choice(texts), family, chance)
        written = f"{intact}\n{broken}\n{intact}"
        calls = parse(form, [written])[2]
        assert calls[0] == ("get", {"place": "intact"}), broken
        assert calls.count(calls[0]) > 1 or family == "llama3_json", broken
        if number % 4 == 0:
            assert parse(form, [*written])[2] == calls, broken


# fmt: off
HOSTILE = [
    "{", "[", "<tool_call>", "<tool_call>{", '{"a":', '{"name":', "<tool_call>\n", "[TOOL_CALLS]", "[TOOL_CALLS][",
    "<function=", "<function=f>", "<parameter=a>", "<function=get>\n<parameter=place>\n", "\n", "\\", '"', " ", "f(",
    "[get(place=", "[get(place='", "<start_function_call>call:get{", "<escape>", '<tool_call>{"name": "get", "x": "',
    "[TOOL_CALLS]get[ARGS]{", "1", "a", "```tool_code\n", "``",
]
# fmt: on


def count_steps(form: AnswerFormat, written: str) -> tuple[int, int]:
    """The lines of code that an answer takes, and the characters that are read or moved."""
    files = {module.__file__ for module in (answer_parser, call_scanners)}
    lines = characters = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal lines
        if frame.f_code.co_filename not in files:
            return None
        lines += event == "line"
        return trace

    class Counting(AnswerParser):
        def feed(self, text: str) -> str:
            nonlocal characters
            characters += len(self._buffer) - self._at + len(text)
            return super().feed(text)

        def _take(self, end: int) -> str:
            nonlocal characters
            characters += end - self._at
            return super()._take(end)

    parser = Counting(form, TOOLS)
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for at in range(0, len(written), 3):
            parser.feed(written[at : at + 3])
        parser.end()
    finally:
        sys.settrace(before)
    return lines, characters


@pytest.mark.slow
def test_work_is_linear_in_the_length_of_the_answer(family: str, form: AnswerFormat) -> None:
    for begin in ("", write(family, [("get", {"place": "B"})])[:-20]):
        for each in HOSTILE:
            short, long = (count_steps(form, begin + each * count) for count in (30, 120))
            assert long[0] <= 4.4 * short[0] + 500, (begin, each)
            assert long[1] <= 4.4 * short[1] + 500, (begin, each)


def test_reasoning_and_calls_are_read_by_one_machine() -> None:
    form = make_format("hermes")
    call = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
    written = f"<think>\nHm, {{x}}.\n</think>\n\nYes.\n{call}"
    token_ids = form.tokenizer.encode(written, add_special_tokens=False)
    for tokens in (1, 3, 1000):
        assert parse_ids(form, token_ids, tokens) == ("Yes.", "\nHm, {x}.\n", [("ping", {})])


@pytest.mark.parametrize("family", ["hermes", "qwen3_coder"])
def test_call_within_reasoning_ends_it(family: str) -> None:
    """Qwen3.5 sometimes calls without ending its reasoning. A mark that begins no known call is reasoning."""
    form = make_format(family)
    for written, expected in [
        (f"<think>Look.{write(family, [('ping', {})])}", ("", "Look.", [("ping", {})])),
        ("<think>A <tool_call> is a tag.</think>Yes", ("Yes", "A <tool_call> is a tag.", [])),
        ("<think>A <tool_call></think>Yes", ("Yes", "A <tool_call>", [])),
        (f"<think>{write(family, [('other', {})])}</think>Yes", ("Yes", write(family, [("other", {})]), [])),
    ]:
        token_ids = form.tokenizer.encode(written, add_special_tokens=False)
        for tokens in (1, 4, 1000):
            assert parse_ids(form, token_ids, tokens) == expected


def test_objects_in_reasonings_of_unmarked_formats_are_reasoning_of() -> None:
    written = '{"name": "ping", "parameters": {}}'
    assert parse(make_format("llama3_json"), [written], prompt=[START]) == ("", written, [])


@pytest.mark.parametrize(
    ("schema", "raw", "expected"),
    [
        ({"type": "string"}, "123", "123"),
        ({"type": "integer"}, "123", 123),
        ({"type": "integer"}, "1.5", "1.5"),
        ({"type": "number"}, "1", 1),
        ({"type": "boolean"}, "True", True),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "integer"]}, "5", "5"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "5", 5),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "five", "five"),
        ({"oneOf": [{"type": "object"}, {"type": "array"}]}, "[1]", [1]),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"const": True}, "true", True),
        ({"type": "object"}, "{'a': None}", {"a": None}),
        ({"type": "array"}, "(1, 2)", [1, 2]),
        ({"type": "array"}, "[1, NaN]", "[1, NaN]"),
        ({"type": "integer", "nullable": True}, "None", None),
        ({}, "5", "5"),
        (True, "5", "5"),
        ({"type": 5}, "5", "5"),
        ({"type": "integer"}, "9" * 5000, "9" * 5000),
        ({"type": "object"}, "[" * 10_000, "[" * 10_000),
    ],
)
def test_untyped_arguments_get_the_types_of_the_schema(schema: Any, raw: str, expected: Any) -> None:
    form = make_format("qwen3_coder")
    tools = ToolSet({"f": {"properties": {"a": schema}}})
    written = f"<tool_call>\n<function=f>\n<parameter=a>\n{raw}\n</parameter>\n</function>\n</tool_call>"
    for pieces in ([written], [*written]):
        assert parse(form, pieces, tools) == ("", "", [("f", {"a": expected})])


# As checkpoints publish them in tokenizer_config.json (transformers, response parsing).
_JSON_FIELD = {"open": "<call>", "close": "</call>", "content": "json", "repeats": True}
_XML_FIELD = {
    "open_pattern": r"<tool_call>\s*<function=(?P<name>\w+)>", "close": "</tool_call>", "repeats": True,
    "content": "xml-inline",
    "content_args": {"tag_pattern": r"<parameter=(?P<key>\w+)>\s*(?P<value>.*?)\s*</parameter>"},
}  # fmt: skip
_GEMMA_FIELD = {
    "open_pattern": r"<\|tool_call>call:(?P<name>\w+)", "close": "<tool_call|>", "repeats": True, "content": "json",
    "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
}  # fmt: skip


@pytest.mark.parametrize(
    ("field", "written"),
    [
        (_JSON_FIELD, '<call>{"name": "get", "arguments": {"place": "Bonn"}}</call>'),
        (_JSON_FIELD | {"open": None, "open_pattern": r"\s*<call>\s*"},
         '<call>{"name": "get", "arguments": {"place": "Bonn"}}</call>'),
        (_XML_FIELD, write("qwen3_coder", [("get", {"place": "Bonn"})])),
        (_GEMMA_FIELD, '<|tool_call>call:get{place:<|"|>Bonn<|"|>}<tool_call|>'),
    ],
)  # fmt: skip
def test_response_template_of_the_checkpoint_decides_first(field: dict[str, Any], written: str) -> None:
    template = {"start_anchor": "x", "fields": {"content": {}, "tool_calls": field}}
    found = answer_format(Tokenizer.synthetic_bytes(300), {}, ChatTemplate("<|python_tag|> tools"), template)
    for pieces in ([written], [*written]):
        assert parse(found, pieces) == ("", "", [("get", {"place": "Bonn"})])


@pytest.mark.parametrize("template", [None, {}, {"fields": 5}, {"fields": {"tool_calls": {"open": 5}}}, [],
                                      {"fields": {"tool_calls": {"open": "<x>", "content": "kv-lines"}}}])  # fmt: skip
def test_other_response_templates_leave_the_chat_template_to_decide(template: Any) -> None:
    found = answer_format(Tokenizer.synthetic_bytes(300), {}, ChatTemplate("{{ tools }}<tool_call>"), template)
    assert found.calls == CALL_FORMATS["hermes"]
    assert answer_format(Tokenizer.synthetic_bytes(300), {}, MissingTemplate(), template).calls is None


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("{{ tools }}<tool_call>\n<function=x>", "qwen3_coder"),
        ("{{ tools }}<tool_call>{", "hermes"),
        ("{{ tools }}[TOOL_CALLS]", "mistral"),
        ("{{ tools }}<start_function_call>", "functiongemma"),
        ('{{ tools }}{"name": x, "parameters": y}', "llama3_json"),
        ("{{ tools }}[func_name1(params_name1=params_value1)]", "pythonic"),
        ("{{ tools }}", None),
        ("<toll_call>", None),
    ],
)
def test_chat_template_shows_the_format(source: str, name: str | None) -> None:
    found = answer_format(Tokenizer.synthetic_bytes(300), {}, ChatTemplate(source))
    assert found.calls == (None if name is None else CALL_FORMATS[name])


def test_values_of_examples_are_distinct() -> None:
    assert len({repr(value) for value in VALUES}) == len(VALUES) == len(call_examples.VALUES)
