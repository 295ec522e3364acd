"""Calls that a chat template writes into the history are read back as the same calls."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from call_examples import CALLS, VALUES, Call, schemas
from test_answer_parser import TOOLS, make_format, parse

from meltcore.serve.requests.protocol import CalledFunction, ToolCall
from meltcore.serve.tasks.generation.tools import template_calls
from meltcore.text.chat_template import ChatTemplate

pytestmark = pytest.mark.slow

_LOOP = "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}{% for c in m.tool_calls %}"
_END = "{% endfor %}{% endif %}{% endfor %}"
# The assistant's turns as the published templates write them: of Qwen3, Hermes 2 Pro, Qwen3-Coder, Llama 3.1, Mistral
# 7B v0.3 and Small 3.2, and FunctionGemma; with text as arguments, which DeepSeek's templates expect.
TEMPLATES = {
    "hermes": _LOOP + "{% set f = c.function %}{% if m.content or not loop.first %}{{ '\\n' }}{% endif %}"
    "{{ '<tool_call>\\n{\"name\": \"' }}{{ f.name }}{{ '\", \"arguments\": ' }}{% if f.arguments is string %}"
    "{{ f.arguments }}{% else %}{{ f.arguments | tojson }}{% endif %}{{ '}\\n</tool_call>' }}" + _END,
    "hermes text": _LOOP + "{{ '\\n<tool_call>\\n{\"name\": \"' + c.function.name + '\", \"arguments\": ' + "
    "c.function.arguments + '}\\n</tool_call>' }}" + _END,
    "qwen3_coder": _LOOP + "{{ '\\n<tool_call>\\n<function=' + c.function.name + '>\\n' }}"
    "{% for k, v in c.function.arguments | items %}{{ '<parameter=' + k + '>\\n' }}"
    "{% set v = v | tojson if v is mapping or (v is sequence and v is not string) else v | string %}"
    "{{ v }}{{ '\\n</parameter>\\n' }}{% endfor %}{{ '</function>\\n</tool_call>' }}" + _END,
    "llama3_json": _LOOP + "{{ '{\"name\": \"' + c.function.name + '\", \"parameters\": ' }}"
    "{{ c.function.arguments | tojson }}{{ '}' }}" + _END,
    "mistral": "{% for m in messages if m.tool_calls %}{{ m.content + '[TOOL_CALLS] [' }}{% for c in m.tool_calls %}"
    "{% set out = c.function | tojson %}{{ out[:-1] }}{{ ', \"id\": \"' + c.id + '\"}' }}"
    "{% if not loop.last %}{{ ', ' }}{% else %}{{ ']' }}{% endif %}{% endfor %}{% endfor %}",
    "mistral_v11": _LOOP + "{{ '[TOOL_CALLS]' + c.function.name + '[ARGS]' + c.function.arguments | tojson }}" + _END,
    "functiongemma": "{% macro w(v) %}{% if v is string %}<escape>{{ v }}<escape>{% elif v is mapping %}{{ '{' }}"
    "{% for k, e in v | items %}{{ k }}:{{ w(e) }}{% if not loop.last %},{% endif %}{% endfor %}{{ '}' }}"
    "{% elif v is sequence %}[{% for e in v %}{{ w(e) }}{% if not loop.last %},{% endif %}{% endfor %}]"
    "{% else %}{{ v | tojson }}{% endif %}{% endmacro %}" + _LOOP
    + "<start_function_call>call:{{ c.function.name }}{{ w(c.function.arguments) }}<end_function_call>" + _END,
}  # fmt: skip


def as_sent_back(calls: list[Call]) -> list[ToolCall]:
    return [
        ToolCall(f"abcdefg{at:02}", CalledFunction(name, json.dumps(arguments)))
        for at, (name, arguments) in enumerate(calls)
    ]


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_through_a_template_are_read_back_equal(name: str) -> None:
    template = ChatTemplate(TEMPLATES[name])
    assert template.expects_text_arguments == (name == "hermes text")
    form = make_format(name.removesuffix(" text"))
    histories = [("", [(f"tool_{at}", {"value": value})], "") for at, value in enumerate(VALUES)] + CALLS
    for content, calls, _ in histories:
        sent_back: Any = template_calls(as_sent_back(calls), "tool_calls", template)
        written = template.render([{"role": "user", "content": "x"},
                                   {"role": "assistant", "content": content, "tool_calls": sent_back}])  # fmt: skip
        for pieces in ([written], [*written]):
            assert parse(form, pieces, TOOLS) == (content, "", calls)


@pytest.mark.parametrize("name", TEMPLATES)
def test_arguments_of_a_cut_call_are_shown(name: str) -> None:
    template = ChatTemplate(TEMPLATES[name])
    cut = ToolCall("abcdefg00", CalledFunction("get", '{"place": "Bonn'))
    sent_back: Any = template_calls([cut], "tool_calls", template)
    messages: Any = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": sent_back}]
    assert "Bonn" in template.render(messages)


def test_numbers_keep_their_digits() -> None:
    """msgspec reads integers beyond 64 bits as JSON has them."""
    assert msgspec.json.decode("123456789012345678901234567890") == 123456789012345678901234567890
    assert [*schemas()]
