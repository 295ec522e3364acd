"""Chat templates: where they are found, what they may do, and what their errors become."""

import json
from pathlib import Path

import pytest

from meltcore.errors import ConfigError, RequestError
from meltcore.text.chat_template import ChatTemplate, render_chat

HELLO = [{"role": "user", "content": "<b>hé</b>"}]
CHATML = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def render(source: str, **kwargs: object) -> str:
    return ChatTemplate(source).render(HELLO, kwargs)


def test_chatml_ends_where_the_answer_begins() -> None:
    assert render(CHATML) == "<|im_start|>user\n<b>hé</b><|im_end|>\n<|im_start|>assistant\n"


def test_helpers_templates_expect_are_there() -> None:
    assert render("{{ messages[0].content | tojson }}") == '"<b>hé</b>"'
    assert render("{{ {'b': 1, 'a': [1]} | tojson(indent=1) }}") == '{\n "b": 1,\n "a": [\n  1\n ]\n}'
    assert render("{{ strftime_now('%Y') }}").isdigit()
    assert render("{% generation %}x{% endgeneration %}") == "x"
    assert render("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}") == "1"
    assert render("{{ enable_thinking }}", enable_thinking=False) == "False"


def test_raise_exception_is_a_400_with_its_words() -> None:
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({}) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ range(100000000) | list }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[7].content }}",
        "{{ 1 / 0 }}",
        "{{ strftime_now(1) }}",
    ],
)
def test_what_leaves_the_sandbox_or_fails_is_a_400(source: str) -> None:
    with pytest.raises(RequestError, match="chat template failed"):
        render(source)


def test_output_without_end_is_a_400() -> None:
    with pytest.raises(RequestError, match="more than"):
        render("{% for i in range(99999) %}{{ 'x' * 10000 }}{% endfor %}")


def test_requests_cannot_replace_what_the_server_sets() -> None:
    with pytest.raises(RequestError, match="may not set 'messages'"):
        render(CHATML, messages=[])


def test_template_with_bad_syntax_is_found_at_start_up() -> None:
    with pytest.raises(ConfigError, match="line 2"):
        ChatTemplate("ok\n{% if %}")


def test_templates_are_found_in_each_of_their_places(tmp_path: Path) -> None:
    assert ChatTemplate.from_folder(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "one {{ bos_token }}", "bos_token": {"content": "<s>"}}))
    assert _from(tmp_path) == "one <s>"
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "two"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert _from(tmp_path) == "two"
    (tmp_path / "chat_template.jinja").write_text("three")
    assert _from(tmp_path) == "three"


def test_template_that_is_no_utf_8_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe{{ messages }}")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja cannot be read: .*utf-8"):
        ChatTemplate.from_folder(tmp_path)


def test_named_templates_need_a_default(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": [{"name": "rag", "template": "x"}]}))
    with pytest.raises(ConfigError, match="none is named 'default'"):
        ChatTemplate.from_folder(tmp_path)


def test_no_template_is_a_400_that_points_to_completions() -> None:
    with pytest.raises(RequestError, match="/v1/completions"):
        render_chat(None, HELLO)


def _from(folder: Path) -> str:
    template = ChatTemplate.from_folder(folder)
    assert template is not None
    return template.render(HELLO)
