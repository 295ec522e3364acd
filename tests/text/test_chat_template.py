"""Chat templates: where they are found, what they may do, and what their errors become."""

import json
from pathlib import Path

import gguf
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from meltcore.common.errors import ConfigError, RequestError, UnservableModelError
from meltcore.models.checkpoints.checkpoint import BUNDLED_MODEL, Checkpoint
from meltcore.serve.tasks.generation.servable import check_servable
from meltcore.settings.fleet_spec import ModelSection
from meltcore.text.chat_template import ChatTemplate, MissingTemplate, special_token_texts

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


# threat: a chat template: it can compute text and nothing else
@pytest.mark.parametrize(
    "source",
    [
        "{{ lipsum(n=10 ** 9) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({}) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ range(100000000) | list }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[7].content }}",
        "{{ 1 / 0 }}",
        "{{ strftime_now(1) }}",
        "{{ 1e999 }}",  # which Jinja compiles to the name `inf`
        "{% for x in messages %}{{ loop(1e999) }}{% endfor %}",
    ],
)
def test_what_leaves_the_sandbox_or_fails_is_a_400(source: str) -> None:
    with pytest.raises(RequestError, match=r"chat template (failed|was stopped)"):
        render(source)


def test_output_without_end_is_a_400() -> None:
    with pytest.raises(RequestError, match="more than"):
        render("{% for i in range(99999) %}{{ 'x' * 10000 }}{% endfor %}")


# threat: a client: variables of a template that the server sets stay its own
def test_requests_cannot_replace_what_the_server_sets() -> None:
    with pytest.raises(RequestError, match="may not set 'messages'"):
        render(CHATML, messages=[])


@pytest.mark.parametrize("source", ["{{ messages }}" * 10_000, "x" * (2**17 + 1)])
def test_template_that_takes_long_to_compile_is_refused_by_its_length(source: str) -> None:
    """Jinja takes 12 s per million characters of expressions, and a GGUF file may have 64 MiB of them."""
    with pytest.raises(ConfigError, match=rf"has {len(source)} characters; at most 131072 are compiled"):
        ChatTemplate(source)


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


def test_no_template_is_a_400_that_names_the_flag_and_completions() -> None:
    with pytest.raises(RequestError, match=r"no chat template; .*/v1/completions.*--chat-template FILE"):
        MissingTemplate().render(HELLO)


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"chat_template.jinja": "a\n{{ x | from_json }}"}, "error in line 2: No filter named 'from_json'"),
        ({"chat_template.jinja": "{% include %}"}, "error in line 1"),
        ({"tokenizer_config.json": '{"chat_template": 5}'}, "neither text nor a list"),
        ({"tokenizer_config.json": '{"chat_template": [{"name": "rag", "template": "x"}]}'}, "none is named 'default'"),
        *(
            ({file: json.dumps({"chat_template": [{"name": "default", "template": source}]})}, "'default' is .* a text")
            for file in ("tokenizer_config.json", "chat_template.json")
            for source in (None, 5, ["x"], {})
        ),
        ({"tokenizer_config.json": '{"chat_template": [{"name": ["default"], "template": "x"}]}'}, "neither text nor"),
        ({"chat_template.jinja": "{% set x = " + "(" * 9000 + ")" * 9000 + " %}"}, "cannot be compiled|error in line"),
    ],
)
def test_checkpoint_with_a_broken_template_gives_the_reason_in_a_400(
    tmp_path: Path, files: dict[str, str], reason: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    template = ChatTemplate.from_checkpoint(Checkpoint("m", tmp_path, {}, {}))
    assert not template.is_usable
    with pytest.raises(RequestError, match=reason) as caught:
        template.render(HELLO)
    assert caught.value.status == 400
    (tmp_path / "own.jinja").write_text("{{ eos_token }}{{ messages[0].role }}")
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<e>"}')
    own = ChatTemplate.from_checkpoint(Checkpoint("m", tmp_path, {}, {}), path=str(tmp_path / "own.jinja"))
    assert own.render(HELLO) == "<e>user"


def test_named_file_that_is_missing_or_broken_is_an_error_at_start(tmp_path: Path) -> None:
    checkpoint = Checkpoint("m", tmp_path, {}, {})
    with pytest.raises(ConfigError, match=r"--chat-template .*none\.jinja: .* cannot be read"):
        ChatTemplate.from_checkpoint(checkpoint, path=str(tmp_path / "none.jinja"))
    (tmp_path / "bad.jinja").write_text("{% if %}")
    with pytest.raises(ConfigError, match=r"--chat-template .*bad\.jinja: .*line 1"):
        ChatTemplate.from_checkpoint(checkpoint, path=str(tmp_path / "bad.jinja"))
    model = ModelSection(checkpoint=BUNDLED_MODEL, chat_template=str(tmp_path / "bad.jinja"))
    with pytest.raises(ConfigError, match=r"--chat-template .*bad\.jinja: .*line 1"):
        check_servable(model)  # before a server starts anything


@pytest.mark.parametrize("template", ["none.jinja", "bad.jinja"])
@pytest.mark.parametrize("is_gguf", [False, True])
def test_template_file_is_one_of_all_reasons_of_a_refusal(tmp_path: Path, template: str, is_gguf: bool) -> None:
    (tmp_path / "bad.jinja").write_text("{% if %}")
    (tmp_path / "config.json").write_text('{"architectures": ["RwkvForCausalLM"], "eos_token_id": 1}')
    if is_gguf:
        writer = gguf.GGUFWriter(tmp_path / "m.gguf", "rwkv6")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    path = tmp_path / "m.gguf" if is_gguf else tmp_path
    model = ModelSection(checkpoint=str(path), chat_template=str(tmp_path / template))
    with pytest.raises(UnservableModelError, match=r"(rwkv6|Rwkv).*--chat-template .*" + template):
        check_servable(model)


@pytest.mark.parametrize("value", [None, True, False])
def test_null_leaves_a_variable_at_its_default(value: bool | None) -> None:
    template = ChatTemplate("{{ enable_thinking is false }} {{ other is none }}", defaults={"enable_thinking": False})
    assert template.render(HELLO, {"enable_thinking": value, "other": None}) == f"{value is not True} True"


# threat: a chat template: its time and its text are bounded
@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x=['ab']) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
        "{% set n = namespace(x=['ab']) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
        "{{ n.x | tojson }}",
        "{{ 'ab' * 10 ** 9 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ 'x'.center(10 ** 6 * 900) }}",
        "{{ 'x' | center(900000000) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ ('x' * 9000).replace('x', 'y' * 90000) }}",
        "{{ ('x' * 9000) | replace('x', 'y' * 90000) }}",
        "{{ range(90000) | join('y' * 90000) }}",
        "{{ (7).to_bytes(10 ** 6 * 900, 'big') }}",
        "{{ '{:{}}'.format('x', 900000000) }}",
    ],
)
def test_template_that_computes_or_grows_without_end_is_stopped(source: str) -> None:
    template = ChatTemplate(source)  # nothing of it is computed while compiling
    with pytest.raises(RequestError, match=r"the chat template (was stopped|made more)") as caught:
        template.render(HELLO)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "source",
    [
        "{% if tools is not none %}TOOLS{% endif %}{% if documents is not none %}DOCUMENTS{% endif %}",
        "{{ messages[0] | tojson(separators=(',', ':'), sort_keys=True) }}{{ messages | tojson(indent=2) }}",
        "{{ messages[0].content | tojson(ensure_ascii=True) }}{{ tools | tojson }}",
        "{% for m in messages %}{{ loop.index0 ~ loop.last ~ loop.length }}"
        "{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}none{% endfor %}",
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ messages[-1]['content'][::-1] }}",
        "{% macro f(x) %}[{{ x | trim }}]{% endmacro %}{{ f(' a ') }}{{ '%s-%02d' % ('a', 7) }}{{ 'a' * 3 }}",
        "{{ 1732800000 | string }}{{ 1732800000 | tojson }}{{ {1732800000: 'a'}.get(1732800000) }}",
        "{% set ns = namespace(found=false) %}{% for m in messages %}{% set ns.found = true %}{% endfor %}"
        "{{ ns.found }}",
        "{% for k, v in {'a': 1}.items() recursive %}{{ k }}{{ v }}{% endfor %}{{ bos_token }}{{ undefined_name }}|",
        "  {% if true %}\n  x\n  {% endif %}\n{%- set a = [1] + [2] %}{{ a }}{{ 'x{}'.format(1) }}",
    ],
)
def test_templates_see_what_transformers_gives_them(source: str) -> None:
    expected = render_jinja_template(
        [HELLO], tools=None, documents=None, chat_template=source, add_generation_prompt=True, bos_token="<s>"
    )[0][0]
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(HELLO) == expected


def test_special_tokens_have_the_names_that_transformers_reads(tmp_path: Path) -> None:
    config = {"bos_token": "<b>", "eos_token": {"content": "<e>"}, "extra_special_tokens": {"image_token": "<img>"}}
    others = {
        "bos_token": {"content": "<B>", "lstrip": False},
        "unk_token": "<u>",
        "additional_special_tokens": ["<x>"],
    }
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(others))
    assert special_token_texts(tmp_path) == {"bos_token": "<B>", "unk_token": "<u>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    named = {"bos_token": "<B>", "eos_token": "<e>", "unk_token": "<u>", "image_token": "<img>"}
    assert special_token_texts(tmp_path) == named
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"added_tokens_decoder": {}}))
    assert special_token_texts(tmp_path) == {"bos_token": "<b>", "eos_token": "<e>", "image_token": "<img>"}


def test_special_tokens_of_a_models_own_stand_beside_the_others(tmp_path: Path) -> None:
    """What else has a name that ends so is no token, and the fields for such names win."""
    fields = {
        "image_token": "</s>",
        "boi_token": {"__type": "AddedToken", "content": "<boi>", "special": True},
        "video_token": "<v>",
        "extra_special_tokens": {"video_token": "<video>"},
        "add_bos_token": True,
        "pad_token": None,
        "video_token_id": 7,
        "chat_template": "{{ image_token }}{{ boi_token }}{{ video_token }}{{ add_bos_token }}{{ video_token_id }}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    assert special_token_texts(tmp_path) == {"image_token": "</s>", "boi_token": "<boi>", "video_token": "<video>"}
    template = ChatTemplate.from_folder(tmp_path)
    assert template is not None
    assert template.render(HELLO) == "</s><boi><video>"


def _from(folder: Path) -> str:
    template = ChatTemplate.from_folder(folder)
    assert template is not None
    return template.render(HELLO)
