"""Writes the grammars of tool calls and of limited reasoning, in the Lark of llguidance.

Marks that are tokens stand in a grammar by their ids, so that no text can pass for them. Arguments follow the JSON
Schema of their tool.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from meltcore.common.errors import RequestError
from meltcore.serve.requests.protocol import ChatRequest, Function
from meltcore.serve.tasks.generation.literal_grammar import PYTHON, LiteralWriter, style_with_quote_token
from meltcore.serve.tasks.generation.structured import RequestedGrammar
from meltcore.serve.tasks.generation.text_function import TextFunction, quote_grammar
from meltcore.text.answer_format import AnswerFormat
from meltcore.text.call_scanners import listed, schema_types
from meltcore.text.grammar import literal

MAX_THINKING_TOKENS = 2**20
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_LENIENT = {"coerce_one_of": True, "lenient": True}
# The beginning of an object that the parser of answers may take for a call, where no mark tells.
_CALL_OBJECT = r'\{[ \t\r\n]*"(name|type|function|arguments|parameters|id)"[ \t\r\n]*:'


def call_grammar(
    form: AnswerFormat, functions: list[Function], weakened: list[str],
    *, is_forced: bool, is_parallel: bool, answer: str | None = None,
) -> str | None:  # fmt: skip
    """Return the grammar of an answer, or None if none can describe this format.

    Args:
        form: How the model writes calls.
        functions: The functions that may be called. One that is `strict` must be enforced as a whole; what llguidance
            does not know of the schemas of the others is left out.
        weakened: Gets the parts of schemas that the grammar does not enforce, other than those that llguidance names.
        is_forced: Whether the answer is a call. Otherwise text may precede and follow calls.
        is_parallel: Whether there may be several calls.
        answer: A grammar of llguidance, in Lark or JSON, that the answer follows if it is no call.
    """
    writer = _GrammarWriter(form)
    calls = form.calls
    # Beside another object, only a mark tells a call. Beside text, it may also be a text that cannot begin a call.
    needs_mark = not is_forced and (answer is not None or (calls is not None and calls.has_marks))
    if calls is None or (needs_mark and not (calls.has_marks and writer.is_token(calls.opens[0]))):
        return None
    if any(isinstance(function, TextFunction) and function.grammar is not None for function in functions) and (
        calls.body == "python" or calls.prefix
    ):
        return None  # its strings are no JSON
    begin, between, end, call = "", "", "", "call"
    if calls.body == "xml":
        rules = [writer.tagged(function) for function in functions]
    elif calls.body == "json":
        rules = [writer.json_object(function) for function in functions]
        between = '"; "' if not calls.has_marks else '"\\n"'
        begin = f"{writer.mark(calls.opens[0])}?" if not calls.has_marks and writer.is_token(calls.opens[0]) else ""
    elif calls.body == "named" and calls.quote == '"' and not calls.prefix:
        if writer.is_token("[ARGS]"):
            rules = [writer.named(function) for function in functions]
        else:  # of a tokenizer before v11: a list of objects
            rules = [writer.json_object(function, has_marks=False) for function in functions]
            begin, between, end = f'{writer.mark(calls.opens[0])} "["', '", "', '"]"'
    elif calls.body == "named" and calls.prefix and calls.closes and writer.is_token(calls.quote):
        literals = LiteralWriter(style_with_quote_token(writer.mark(calls.quote)), writer.rules, weakened)
        rules = [writer.prefixed(function, literals.arguments(function)) for function in functions]
    elif calls.body == "python":
        literals = LiteralWriter(PYTHON, writer.rules, weakened)
        arguments = {function.name: literals.arguments(function) for function in functions}
        rules = [f'{literal(f"{name}(")} {each} ")"' for name, each in arguments.items()]
        # One literal, up to where a text that begins like it can no longer be one.
        first = " | ".join(f'{literal(f"[{name}(")} {each} ")"' for name, each in arguments.items())
        writer.rules.append(f"first: {first}")
        call, between, end = "first", '", "', '"]"'
    else:
        return None
    between = '"\\n"' if calls.body == "xml" else between
    block = f"{begin} {call} ({between} call)* {end}" if is_parallel else f"{begin} {call} {end}"
    if is_forced:
        start = f"start: {block}"
    elif calls.has_marks:
        start = f"start: TEXT? ({block} TEXT?)?\nTEXT: /(.|\\n)+/"
    else:
        beginning = _CALL_OBJECT if calls.body == "json" else _python_call([function.name for function in functions])
        start = f"start: {block} | TEXT\nTEXT: /(.|\\n)+/ & ~/(.|\\n)*{beginning}(.|\\n)*/"
    text = "\n".join([start, f"call: {' | '.join(rules)}", *writer.rules]) + "\n"
    if answer is None:
        return text
    text = text.replace(start, f"start: {block} | @answer", 1)
    return json.dumps({"grammars": [{"lark_grammar": text}, *_named_answer(answer)]})


def limit_reasoning(
    request: ChatRequest, form: AnswerFormat, answer: RequestedGrammar | None, prompt: Sequence[int]
) -> RequestedGrammar | None:
    """Return the grammar of reasoning of at most `thinking_token_budget` tokens with the answer after it.

    Returns None if the request has no such limit, or if its prompt has ended the reasoning. Raises RequestError (400)
    for a limit out of range, and for a model that does not reason.
    """
    limit, param = request.thinking_token_budget, "thinking_token_budget"
    if limit is None:
        return None
    if not 0 <= limit <= MAX_THINKING_TOKENS:
        raise RequestError(f"{param} must be at least 0 and at most {MAX_THINKING_TOKENS}; got {limit}", param=param)
    if form.reasoning_ids is None:
        raise RequestError(f"{param}: this model does not reason", param=param)
    if form.has_ended_reasoning(prompt):
        return None
    start_id, end_id = form.reasoning_ids
    reasoning = f"thinking <[{end_id}]>" if limit else f"<[{end_id}]>"
    begin = reasoning if form.starts_in_reasoning(prompt) else f"(<[{start_id}]> {reasoning})?"
    rules = [f"start: {begin} @answer", *([f"thinking[max_tokens={limit}]: /(.|\\n)*/"] if limit else [])]
    head = {"lark_grammar": "\n".join(rules)}
    calls, weakened = None, list[str]()
    if answer is None and request.tools and request.tool_choice != "none":
        functions = [tool.function for tool in request.tools]
        is_parallel = request.parallel_tool_calls is not False
        calls = call_grammar(form, functions, weakened, is_forced=False, is_parallel=is_parallel)
    if answer is None:
        answer = RequestedGrammar(param, (calls or "start: /(.|\\n)*/",), tuple(dict.fromkeys(weakened)))
    candidates = (json.dumps({"grammars": [head, *_named_answer(each)]}) for each in answer.candidates)
    return RequestedGrammar(param, tuple(candidates), answer.weakened)


def _named_answer(grammar: str) -> list[dict[str, Any]]:
    """Return the parts of a grammar in Lark or JSON, the first with the name "answer"."""
    first, *others = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    return [first | {"name": "answer"}, *others]


class _GrammarWriter:
    """Collects the rules of one grammar."""

    def __init__(self, form: AnswerFormat) -> None:
        self.rules: list[str] = []
        self._tokenizer = form.tokenizer
        assert form.calls is not None
        self._format = form.calls

    def is_token(self, mark: str) -> bool:
        return self._tokenizer.token_id(mark) is not None

    def mark(self, text: str) -> str:
        token_id = self._tokenizer.token_id(text)
        return literal(text) if token_id is None else f"<[{token_id}]>"

    def json_object(self, function: Function, *, has_marks: bool | None = None) -> str:
        """Return the rule of {"name": ..., "arguments": {...}}, in the format's marks."""
        has_marks = self._format.has_marks if has_marks is None else has_marks
        key = "arguments" if self._format.has_marks else "parameters"
        head = literal(f'{{"name": {json.dumps(function.name)}, "{key}": ')
        body = f'{head} {self._arguments(function)} "}}"'
        if not has_marks:
            return self._rule(body)
        return self._rule(f'{self.mark(self._format.opens[0])} "\\n" {body} "\\n" {self.mark(self._format.closes[0])}')

    def named(self, function: Function) -> str:
        """Return the rule of [TOOL_CALLS]name[ARGS]{...}."""
        arguments = self._arguments(function)
        head = f"{self.mark(self._format.opens[0])} {literal(function.name)} {self.mark('[ARGS]')}"
        return self._rule(f"{head} {arguments}")

    def _arguments(self, function: Function) -> str:
        """Return the rule of the object of all arguments."""
        if isinstance(function, TextFunction) and function.grammar is not None:
            begin, end = literal('{"input": "'), literal('"}')
            return self._rule(f"{begin} {_nested(quote_grammar(function.grammar, function.grammar_param))} {end}")
        return self._schema(_parameters(function), function)

    def prefixed(self, function: Function, arguments: str) -> str:
        """Return the rule of a name and arguments between marks, such as <start_function_call>call:name{...}."""
        begin, end = self.mark(self._format.opens[0]), self.mark(self._format.closes[0])
        return self._rule(f'{begin} {literal(f"{self._format.prefix}{function.name}{{")} {arguments} "}}" {end}')

    def tagged(self, function: Function) -> str:
        """Return the rule of <function=name> with a tag for each parameter, in the order of the schema."""
        schema = _parameters(function)
        properties = schema.get("properties")
        parts = [f'{self.mark(self._format.opens[0])} "\\n" {literal(f"<function={function.name}>")} "\\n"']
        for name, value in (properties if isinstance(properties, dict) else {}).items():
            is_required = name in listed(schema, "required")
            parts.append(self._parameter(name, value, schema, function) + ("" if is_required else "?"))
        return self._rule(f'{" ".join(parts)} "</function>\\n" {self.mark(self._format.closes[0])}')

    def _parameter(self, name: str, value: Any, schema: Mapping[str, Any], function: Function) -> str:
        head, end = literal(f"<parameter={name}>\n"), "\n</parameter>\n"
        fields = value if isinstance(value, dict) else {}
        texts = listed(fields, "enum") or ([fields["const"]] if "const" in fields else [])
        if texts and all(isinstance(each, str) for each in texts):
            chosen = " | ".join(literal(each + end) for each in texts)
            return self._rule(f"{head} ({chosen})")
        if isinstance(function, TextFunction) and function.grammar is not None:
            return self._rule(f"{head} {_nested(function.grammar)} {literal(end)}")
        if schema_types(value) in ((), ("string",)):
            text = self._rule("/(.|\\n)*/", f"[suffix={literal(end)}]")
            return self._rule(f"{head} {text}")
        definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        return self._rule(f"{head} {self._schema(definitions | value, function)} {literal(end)}")

    def _schema(self, schema: Mapping[str, Any], function: Function) -> str:
        options = _SPACING | ({} if function.strict else _LENIENT)
        return self._rule(f"%json {json.dumps({**schema, 'x-guidance': options}, ensure_ascii=False)}")

    def _rule(self, body: str, options: str = "") -> str:
        name = f"rule_{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name


def _parameters(function: Function) -> dict[str, Any]:
    return {"type": "object", **function.parameters} if function.parameters else _NO_PARAMETERS


def _nested(grammar: str) -> str:
    return f"%lark {{\n{grammar}\n}}"


def _python_call(names: list[str]) -> str:
    """Return the regular expression of the beginning of a call in Python's form."""
    blanks = r"[ \t\r\n]*"
    return rf"\[{blanks}({'|'.join(map(re.escape, names))}){blanks}\("
