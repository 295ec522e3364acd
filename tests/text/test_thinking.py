"""Models that may think: they answer at once unless asked to think, and thoughts are never part of an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from meltcore.engine.sampling_params import SamplingParams
from meltcore.text.chat_template import ChatTemplate
from meltcore.text.detokenizer import Detokenizer
from meltcore.text.thinking import ThoughtMarks, template_defaults
from meltcore.text.tokenizer import Tokenizer

HYBRID = {"model_type": "qwen3_5_moe", "text_config": {"model_type": "qwen3_5_moe_text"}}
# How Qwen3.5's own template ends.
TEMPLATE = (
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}"
    "{%- else %}{{- '<think>\\n' }}{%- endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    raw = tokenizers.Tokenizer.from_str(Tokenizer.synthetic_bytes(300)._raw.to_str())
    marks = [tokenizers.AddedToken(text, special=False) for text in ("<think>", "</think>")]
    raw.add_tokens(marks)
    raw.add_special_tokens(["<|im_end|>"])
    return Tokenizer(raw)


@pytest.fixture(scope="module")
def marks(tokenizer: Tokenizer) -> ThoughtMarks:
    found = ThoughtMarks.of(tokenizer, HYBRID)
    assert found is not None
    assert tuple(found) == (300, 301)
    return found


@pytest.mark.parametrize(
    ("config", "kwargs", "expected"),
    [
        (HYBRID, None, "<think>\n\n</think>\n\n"),
        (HYBRID, {"enable_thinking": True}, "<think>\n"),
        (HYBRID, {"enable_thinking": False}, "<think>\n\n</think>\n\n"),
        (HYBRID["text_config"], None, "<think>\n\n</think>\n\n"),
        ({"model_type": "qwen3"}, None, "<think>\n"),
    ],
)
def test_thinking_is_off_for_the_family_unless_a_request_turns_it_on(
    tmp_path: Path, config: Any, kwargs: dict[str, Any] | None, expected: str
) -> None:
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    template = ChatTemplate.from_folder(tmp_path, template_defaults(config))
    assert template is not None
    assert template.render([{"role": "user", "content": "x"}], kwargs) == expected


def test_a_template_that_does_not_ask_decides_for_itself(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ '<think>\\n' }}"}))
    template = ChatTemplate.from_folder(tmp_path, template_defaults(HYBRID))
    assert template is not None
    assert template.render([]) == "<think>\n"


def test_only_the_family_s_thoughts_are_kept_apart(tokenizer: Tokenizer) -> None:
    assert ThoughtMarks.of(tokenizer, {"model_type": "qwen3"}) is None
    assert ThoughtMarks.of(Tokenizer.synthetic_bytes(300), HYBRID) is None


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
def test_a_prompt_that_ends_with_the_first_mark_begins_thoughts(
    tokenizer: Tokenizer, marks: ThoughtMarks, prompt: str, is_open: bool
) -> None:
    assert marks.left_open(tokenizer.encode(prompt, add_special_tokens=False)) == is_open


@pytest.mark.parametrize("at_once", [1, 3, 1000])
@pytest.mark.parametrize(
    ("written", "thinking", "answer", "thoughts"),
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
def test_thoughts_are_kept_apart_however_tokens_come(
    tokenizer: Tokenizer, marks: ThoughtMarks, written: str, thinking: bool, answer: str, thoughts: str, at_once: int
) -> None:
    """A stop string counts in an answer only."""
    token_ids = tokenizer.encode(written, add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop=["stop"]), marks, thinking=thinking)
    text = ""
    for start in range(0, len(token_ids), at_once):
        text += detokenizer.add(token_ids[start : start + at_once])[0]
    text += detokenizer.flush()
    assert text == answer
    assert "".join(detokenizer.thoughts) == thoughts


def test_without_marks_everything_is_text(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, SamplingParams())
    written = "a</think>b<|im_end|>"
    assert detokenizer.add(tokenizer.encode(written, add_special_tokens=False))[0] == "a</think>b"
