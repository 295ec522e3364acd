"""Reasoning: off unless a request turns it on, and never part of an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

import meltcore
from meltcore.models.checkpoints.gguf.gguf_config import FAMILIES
from meltcore.protocol.sampling_params import SamplingParams
from meltcore.text.answer_format import AnswerFormat, answer_format, template_defaults
from meltcore.text.chat_prompt import render_chat
from meltcore.text.chat_template import ChatTemplate, MissingTemplate
from meltcore.text.detokenizer import Detokenizer
from meltcore.text.tokenizer import Tokenizer

HYBRID = {"model_type": "qwen3_5_moe", "text_config": {"model_type": "qwen3_5_moe_text"}}
# How Qwen3.5's own template ends.
TEMPLATE = (
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}"
    "{%- else %}{{- '<think>\\n' }}{%- endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    raw = tokenizers.Tokenizer.from_str(Tokenizer.synthetic_bytes(300)._backend.to_str())
    raw.add_tokens([tokenizers.AddedToken(text, special=False) for text in ("<think>", "</think>")])
    raw.add_special_tokens(["<|im_end|>"])
    return Tokenizer(raw)


@pytest.fixture(scope="module")
def parser(tokenizer: Tokenizer) -> AnswerFormat:
    found = answer_format(tokenizer, HYBRID, MissingTemplate())
    assert found.reasoning_ids == (300, 301)
    return found


def _reasoning_of(detokenizer: Detokenizer) -> list[str]:
    return [] if detokenizer.parser is None else detokenizer.parser.take()[0]


@pytest.mark.parametrize(
    ("config", "kwargs", "expected"),
    [
        (HYBRID, None, "<think>\n\n</think>\n\n"),
        (HYBRID, {"enable_thinking": True}, "<think>\n"),
        (HYBRID, {"enable_thinking": False}, "<think>\n\n</think>\n\n"),
        (HYBRID["text_config"], None, "<think>\n\n</think>\n\n"),
        ({"model_type": "qwen3"}, None, "<think>\n\n</think>\n\n"),
        ({"model_type": "qwen3"}, {"enable_thinking": True}, "<think>\n"),
        ({"model_type": "qwen3_moe"}, None, "<think>\n\n</think>\n\n"),
        ({"model_type": "smollm3"}, None, "<think>\n\n</think>\n\n"),
        ({"model_type": "llama"}, None, "<think>\n"),
    ],
)
def test_reasoning_is_off_unless_a_request_turns_it_on(
    tmp_path: Path, config: Any, kwargs: dict[str, Any] | None, expected: str
) -> None:
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    template = ChatTemplate.from_folder(tmp_path, template_defaults(config))
    assert template is not None
    assert template.render([{"role": "user", "content": "x"}], kwargs) == expected


def test_template_without_the_variable_decides_by_itself(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ '<think>\\n' }}"}))
    template = ChatTemplate.from_folder(tmp_path, template_defaults(HYBRID))
    assert template is not None
    assert template.render([]) == "<think>\n"


@pytest.mark.parametrize("published", ["qwen3-0.6b", "qwen3-30b-a3b", "qwen3.5-35b-a3b", "smollm3-3b"])
def test_published_models_that_reason_have_a_parser(tokenizer: Tokenizer, published: str) -> None:
    config = json.loads(
        (Path(meltcore.__file__).parent / "models" / "published" / published / "config.json").read_text()
    )
    assert answer_format(tokenizer, config, MissingTemplate()).reasoning_ids is not None
    assert template_defaults(config) == {"enable_thinking": False}


@pytest.mark.parametrize("name", ["qwen3", "qwen3moe"])
def test_gguf_files_of_models_that_reason_have_a_parser(tokenizer: Tokenizer, name: str) -> None:
    config = {"model_type": FAMILIES[name].model_type}
    assert answer_format(tokenizer, config, MissingTemplate()).reasoning_ids is not None
    assert template_defaults(config) == {"enable_thinking": False}


# How the templates of models that were trained on a reasoning one's answers begin the next answer: within reasoning, as
# DeepSeek-R1's distilled models and QwQ, or before it. They drop the reasoning of earlier answers.
OPENING = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<A>' + m.content.split('</think>')[-1] }}"
    "{% else %}{{ '<U>' + m.content }}{% endif %}{% endfor %}{{ '<A><think>\\n' }}"
)
DROPPING = OPENING.replace("<think>", "")
PLAIN = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}assistant"


@pytest.mark.parametrize("model_type", ["qwen2", "llama", "gemma3_text", ""])
def test_template_or_model_type_shows_that_a_model_reasons(tokenizer: Tokenizer, model_type: str) -> None:
    config = {"model_type": model_type}
    for source in (OPENING, DROPPING, "assistant: <think>"):
        found = answer_format(tokenizer, config, ChatTemplate(source))
        assert found.reasoning_ids == (300, 301)
    for template in (ChatTemplate(PLAIN), MissingTemplate()):
        assert answer_format(tokenizer, config, template).reasoning_ids is None
    without_tokens = Tokenizer.synthetic_bytes(300)
    assert answer_format(without_tokens, config, ChatTemplate(OPENING)).reasoning_ids is None
    assert answer_format(without_tokens, HYBRID, MissingTemplate()).reasoning_ids is None
    assert template_defaults(config) == {}


@pytest.mark.parametrize(
    ("source", "written", "answer", "reasoning"),
    [
        (OPENING, "Two and two.\n</think>\n\n4", "4", "Two and two.\n"),
        (OPENING, "never ends", "", "never ends"),
        (OPENING, "<think>\nAgain.</think>4", "4", "\nAgain."),  # the mark twice
        (DROPPING, "<think>\nTwo.\n</think>\n\n4", "4", "\nTwo.\n"),
        (DROPPING, "Four. 4", "Four. 4", ""),
    ],
)
def test_reasoning_of_a_distilled_model_is_separate(
    tokenizer: Tokenizer, source: str, written: str, answer: str, reasoning: str
) -> None:
    template = ChatTemplate(source)
    messages = [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "Hm.</think>4"}]
    prompt = render_chat(tokenizer, template, [*messages, {"role": "user", "content": "again"}])
    assert "Hm." not in prompt.text
    parser = answer_format(tokenizer, {"model_type": "qwen2"}, template)
    detokenizer = Detokenizer(tokenizer, SamplingParams(), parser, prompt.encode(tokenizer))
    text = "".join(detokenizer.add([each])[0] for each in tokenizer.encode(written, add_special_tokens=False))
    assert (text + detokenizer.flush(), "".join(_reasoning_of(detokenizer))) == (answer, reasoning)


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        ("user: hi<think>\n", True),
        ("user: hi<think>", True),
        ("user: hi<think>\n\n  \n \t\n", True),
        ("</think>\n<think>\n\n", True),
        ("<think>", True),
        ("user: hi<think>\n\n</think>\n\n", False),
        ("user: hi<think>\n\n.\n\n", False),
        ("\n\n", False),
        ("user: what is <think>? assistant: ", False),
        ("", False),
    ],
)
def test_prompt_that_ends_with_the_start_token_starts_reasoning(
    tokenizer: Tokenizer, parser: AnswerFormat, prompt: str, is_open: bool
) -> None:
    assert parser.starts_in_reasoning(tokenizer.encode(prompt, add_special_tokens=False)) == is_open


@pytest.mark.parametrize("tokens", [1, 3, 1000])
@pytest.mark.parametrize(
    ("written", "in_reasoning", "answer", "reasoning"),
    [
        ("2 + 2 = 4\n</think>\n\nIt is 4.", True, "It is 4.", "2 + 2 = 4\n"),
        ("It is\n\n4.", False, "It is\n\n4.", ""),
        ("Hm.<think>Wait</think>  4.", False, "Hm.4.", "Wait"),
        ("<think>\n\n</think>\n\n4", False, "4", "\n\n"),
        ("never ends", True, "", "never ends"),
        ("stop</think>a stop b", True, "a ", "stop"),
        ("\u2603</think>\u2603", True, "\u2603", "\u2603"),
    ],
)
def test_reasoning_is_separated_for_any_division_into_calls(
    tokenizer: Tokenizer,
    parser: AnswerFormat,
    written: str,
    in_reasoning: bool,
    answer: str,
    reasoning: str,
    tokens: int,
) -> None:
    """A stop string counts in an answer only."""
    token_ids = tokenizer.encode(written, add_special_tokens=False)
    prompt = [parser.reasoning_ids[0]] if in_reasoning else []
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop=["stop"]), parser, prompt)
    text = ""
    for start in range(0, len(token_ids), tokens):
        text += detokenizer.add(token_ids[start : start + tokens])[0]
    text += detokenizer.flush()
    assert text == answer
    assert "".join(_reasoning_of(detokenizer)) == reasoning


def test_without_a_parser_all_text_is_the_answer(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, SamplingParams())
    written = "a</think>b<|im_end|>"
    assert detokenizer.add(tokenizer.encode(written, add_special_tokens=False))[0] == "a</think>b"
