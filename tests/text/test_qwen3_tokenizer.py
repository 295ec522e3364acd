"""Qwen3's real tokenizer: ids, text, chat prompts and streamed pieces are those of transformers."""

from __future__ import annotations

import json
import os
import unicodedata
from typing import Any

from places import SHARED

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from call_examples import CALLS, VALUES, write
from hypothesis import given
from hypothesis import strategies as st

from meltcore.protocol.sampling_params import SamplingParams
from meltcore.text.answer_format import answer_format
from meltcore.text.call_scanners import ToolSet
from meltcore.text.chat_prompt import render_chat
from meltcore.text.chat_template import ChatTemplate, MissingTemplate
from meltcore.text.detokenizer import REPLACEMENT_CHAR, Detokenizer
from meltcore.text.tokenizer import Tokenizer

FOLDER = SHARED / "data" / "qwen3-tokenizer"
VOCAB = 151_936  # rows of the published embedding: more than the tokenizer has ids
END = 151_645  # <|im_end|>
TEXTS = [
    "",
    "Hello  world,\tit's DON'T \r\n\r\n  123 4567.89\n",
    "def f(x):\n    return x  # nothing\n" * 40,
    "日本語とかなカナ, 한국어, Ελληνικά, עברית, हिन्दी, ಕನ್ನಡ",
    "e\u0301 and \u00e9, \u1e9b\u0323, 👩‍👩‍👧 🏳️‍🌈, \u200b\ufeff\x00\x7f",
    "<|im_start|>user\nhi<|im_end|>\n<think>\n\n</think><|endoftext|> <tool_call>{}</tool_call>",
    "<|im_start> <|im_end|",  # nearly special
]
CHATS = [
    [{"role": "user", "content": "What is 7 * 8?"}],
    [
        {"role": "system", "content": "Be brief.\n"},
        {"role": "user", "content": "<b>Grüße</b> & 你好 <|im_end|>"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "  \n"},
    ],
]

pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="needs Qwen3's tokenizer beside the repository")


@pytest.fixture(scope="module")
def ours() -> Tokenizer:
    return Tokenizer.from_folder(FOLDER)


@pytest.fixture(scope="module")
def theirs() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(FOLDER)


def streamed(tokenizer: Tokenizer, token_ids: list[int], **sampling: Any) -> list[str]:
    detokenizer = Detokenizer(tokenizer, SamplingParams(**sampling))
    return [*(detokenizer.add([token_id])[0] for token_id in token_ids), detokenizer.flush()]


def assert_encoded_alike(ours: Tokenizer, theirs: Any, text: str) -> None:
    for add_special_tokens in (True, False):
        found = ours.encode(text, add_special_tokens=add_special_tokens)
        assert found == theirs.encode(text, add_special_tokens=add_special_tokens)
    assert ours.decode(found, skip_special_tokens=False) == unicodedata.normalize("NFC", text)


@pytest.mark.slow
@pytest.mark.parametrize("text", TEXTS)
def test_written_text_is_encoded_as_transformers_does(ours: Tokenizer, theirs: Any, text: str) -> None:
    assert_encoded_alike(ours, theirs, text)


@pytest.mark.slow
@given(text=st.text())
def test_any_text_is_encoded_as_transformers_does(ours: Tokenizer, theirs: Any, text: str) -> None:
    assert_encoded_alike(ours, theirs, text)


@pytest.mark.slow
def test_every_id_stands_for_the_same_text(ours: Tokenizer, theirs: Any) -> None:
    assert ours.vocab_size == len(theirs) == 151_669
    assert END in ours.special_ids
    assert theirs.eos_token_id == END
    for token_id in range(VOCAB):
        text = theirs.decode([token_id])
        assert ours.decode([token_id], skip_special_tokens=False) == text, token_id
        assert ours.token_bytes(token_id).decode(errors="replace") == text, token_id


@given(token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=60), skip=st.booleans())
def test_any_ids_are_decoded_and_streamed_as_transformers_does(
    ours: Tokenizer, theirs: Any, token_ids: list[int], skip: bool
) -> None:
    whole = theirs.decode(token_ids, skip_special_tokens=skip)
    assert ours.decode(token_ids, skip_special_tokens=skip) == whole
    assert "".join(streamed(ours, token_ids, skip_special_tokens=skip)) == whole


@pytest.mark.parametrize("text", TEXTS)
def test_written_text_is_streamed_in_whole_characters(ours: Tokenizer, theirs: Any, text: str) -> None:
    token_ids = theirs.encode(text)
    pieces = streamed(ours, token_ids, skip_special_tokens=False)
    assert not any(REPLACEMENT_CHAR in piece for piece in pieces)
    assert "".join(pieces) == theirs.decode(token_ids)


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
def test_chat_prompts_are_those_of_transformers(
    ours: Tokenizer, theirs: Any, messages: list[dict[str, str]], kwargs: dict[str, bool]
) -> None:
    template = ChatTemplate.from_folder(FOLDER)
    assert template is not None
    text = template.render(messages, kwargs)
    settings = {"add_generation_prompt": True, **kwargs}
    assert text == theirs.apply_chat_template(messages, tokenize=False, **settings)
    expected = theirs.apply_chat_template(messages, tokenize=True, return_dict=False, **settings)
    assert ours.encode(text, add_special_tokens=False) == expected


# As a checkpoint publishes it for transformers.
RESPONSE_TEMPLATE = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"content": "text"},
    },
}  # fmt: skip


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_by_ids_are_those_of_transformers(ours: Tokenizer, size: int) -> None:
    from transformers.utils.chat_parsing import parse_response

    form = answer_format(ours, {"model_type": "qwen3"}, MissingTemplate(), RESPONSE_TEMPLATE)
    compared = 0
    values = [value for value in VALUES if value != "<|im_end|>"]  # which is encoded as the end of the answer
    for before, calls, _ in [("", [("get", {"place": value})], "") for value in values] + CALLS:
        written = f"<think>\nHm.\n</think>\n\n{before}\n{write('hermes', calls)}".replace("\n\n\n", "\n\n")
        token_ids = ours.encode(written, add_special_tokens=False)
        detokenizer = Detokenizer(ours, SamplingParams(), form, tools=ToolSet({}))
        text = "".join(detokenizer.add(token_ids[at : at + size])[0] for at in range(0, len(token_ids), size))
        assert text + detokenizer.flush() == before
        assert detokenizer.parser is not None
        reasoning, deltas = detokenizer.parser.take()
        assert "".join(reasoning) == "\nHm.\n"
        found = ["".join(each.arguments for each in deltas if each.call_index == at) for at in range(len(calls))]
        assert [json.loads(arguments) for arguments in found] == [arguments for _, arguments in calls]
        if "tool_call>" not in str(calls):  # which transformers takes for a mark, within a text, too
            theirs = parse_response(written, RESPONSE_TEMPLATE, prefix="")
            assert [json.loads(arguments) for arguments in found] == [
                call["function"]["arguments"] for call in theirs["tool_calls"]
            ]
            compared += 1
    assert compared > 50


def test_control_tokens_in_calls_results_and_tools_are_text(ours: Tokenizer) -> None:
    template = ChatTemplate(
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
        "{{ c.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}{{ tools | tojson }}"
    )
    text = "a<|im_end|>b</tool_call>"
    function = {"name": "f", "arguments": {"k": text, text: 1}}
    call = {"id": text, "type": "function", "function": function}
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": text, "tool_call_id": text},
    ]
    prompt = render_chat(ours, template, messages, {"tools": [{"function": {"name": "f", "description": text}}]})
    token_ids = prompt.encode(ours)
    assert token_ids.count(END) == 2
    assert token_ids.count(ours.token_id("</tool_call>") or 0) == 1
    assert ours.decode(token_ids, skip_special_tokens=False).count(text) == 4
