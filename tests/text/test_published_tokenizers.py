"""Tokenizers of the published layouts give the ids, texts and chats of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import published_tokenizers as published
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from meltcore.errors import ConfigError
from meltcore.models.checkpoint import open_checkpoint
from meltcore.protocol.sampling_params import SamplingParams
from meltcore.text.chat_template import ChatTemplate
from meltcore.text.detokenizer import Detokenizer
from meltcore.text.tokenizer import Tokenizer

LAYOUTS = published.layouts()
COUNT = 120
# AutoTokenizer rebuilds these by their class, and drops steps of the published tokenizer.json: Llama 2's normalizer,
# which puts a space after each special token, and SmolLM2's single digits. The file is what a model was trained with.
REBUILT = {"Llama 2", "SmolLM2"}


def our_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_checkpoint(open_checkpoint(str(folder), files="text"))


def streamed(tokenizer: Tokenizer, ids: list[int], *, skip_special_tokens: bool) -> str:
    detokenizer = Detokenizer(tokenizer, SamplingParams(skip_special_tokens=skip_special_tokens))
    return "".join([*(detokenizer.add([token_id])[0] for token_id in ids), detokenizer.flush()])


def assert_alike(folder: Path, count: int = COUNT, reader: Any = AutoTokenizer) -> Any:
    """Compare all that a tokenizer does with the one that a class of transformers reads; return the latter."""
    ours, theirs = our_tokenizer(folder), reader.from_pretrained(folder)
    specials = sorted(token.content for token in theirs.added_tokens_decoder.values())
    for text in published.texts(count, specials):
        for add_special_tokens in (True, False):
            ids = ours.encode(text, add_special_tokens=add_special_tokens)
            assert ids == theirs.encode(text, add_special_tokens=add_special_tokens), text
            for skip in (True, False):
                whole = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
                assert ours.decode(ids, skip_special_tokens=skip) == whole, text
                assert streamed(ours, ids, skip_special_tokens=skip) == whole, text
    assert theirs.eos_token_id in (None, *open_checkpoint(str(folder), files="text").eos_token_ids)
    return theirs


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_gives_the_ids_and_texts_of_transformers(tmp_path: Path, name: str) -> None:
    assert_alike(LAYOUTS[name].write(tmp_path), reader=PreTrainedTokenizerFast if name in REBUILT else AutoTokenizer)


@pytest.mark.parametrize("flags", [{"add_bos_token": True, "add_eos_token": True}, {"add_bos_token": False}, {}])
@pytest.mark.parametrize("name", ["Llama 3", "SmolLM3", "Gemma 3"])
def test_tokenizer_json_decides_whether_a_text_has_bos_and_eos(
    tmp_path: Path, name: str, flags: dict[str, Any]
) -> None:
    assert_alike(LAYOUTS[name].write(tmp_path, {"add_bos_token": "absent", "add_eos_token": "absent"} | flags), 10)


# --- tokens that other files list


def added(text: str, **flags: bool) -> dict[str, Any]:
    plain = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized", "special"), False)
    return {"content": text, **plain, **flags}


def next_id(name: str) -> int:
    return LAYOUTS[name].backend.get_vocab_size(with_added_tokens=True)


def last_added(name: str) -> str:
    """The text of the last added token, whose id is the last one."""
    backend = LAYOUTS[name].backend
    return str(backend.get_added_tokens_decoder()[next_id(name) - 1].content)


def listings(name: str) -> dict[str, dict[str, Any]]:
    """Files by name, for each way to list tokens that tokenizer.json does not have, or has as words alone."""
    first = next_id(name)
    special, text = added("<|new|>", special=True, rstrip=True), added("<tool>", normalized=True)
    word = "hello"
    return {
        "decoder": {"tokenizer_config": {"added_tokens_decoder": {str(first + 1): text, str(first): special}}},
        "named in the decoder": {
            "tokenizer_config": {"eos_token": "<|new|>", "added_tokens_decoder": {str(first): special}}
        },
        "objects": {
            "tokenizer_config": {"eos_token": {"__type": "AddedToken", **special}},
            "added_tokens": {"<|new|>": first},
        },
        "added_tokens.json": {
            "tokenizer_config": {"extra_special_tokens": ["<|new|>"]},
            "added_tokens": {"<tool>": first + 1, "<|new|>": first},
        },
        "map": {"special_tokens_map": {"eos_token": special}, "added_tokens": {"<|new|>": first}},
        "map and decoder": {
            "special_tokens_map": {"eos_token": "<|other|>"},
            "tokenizer_config": {"added_tokens_decoder": {str(first): special}},
        },
        "known with other flags": {
            "tokenizer_config": {
                "added_tokens_decoder": {str(first - 1): added(last_added(name), rstrip=True, special=True)}
            }
        },
        "a word": {"tokenizer_config": {"additional_special_tokens": [word]}},
        "a word's object": {
            "tokenizer_config": {
                "extra_special_tokens": [{"__type": "AddedToken", **added(word, lstrip=True, special=True)}]
            }
        },
    }


def write(folder: Path, name: str, files: dict[str, Any]) -> Path:
    LAYOUTS[name].write(folder, files.get("tokenizer_config"))
    for file, content in files.items():
        if file != "tokenizer_config":
            (folder / f"{file}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("listing", listings("Llama 3"))
@pytest.mark.parametrize("name", ["Llama 3", "Mistral v0.3", "Phi-4"])
def test_tokens_of_other_files_are_those_of_transformers(tmp_path: Path, name: str, listing: str) -> None:
    folder = write(tmp_path, name, listings(name)[listing])
    theirs = assert_alike(folder, 40)
    ours = our_tokenizer(folder)
    text = f"say <|new|>  <tool> hello it{last_added(name)}  it"
    assert ours.encode(text, add_special_tokens=True) == theirs.encode(text)
    assert ours.special_ids == {each for each, token in theirs.added_tokens_decoder.items() if token.special}


@pytest.mark.parametrize("name", ["Llama 3", "Gemma 3"])
def test_named_special_token_without_an_id_stays_text(tmp_path: Path, name: str) -> None:
    ours = our_tokenizer(LAYOUTS[name].write(tmp_path, {"pad_token": "[PAD]"}))
    assert ours.vocab_size == next_id(name)
    assert ours.decode(ours.encode("a [PAD] b", add_special_tokens=False)) == "a [PAD] b"


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (
            {"tokenizer_config": {"added_tokens_decoder": {"4000": added("<x>")}}},
            "'<x>' the id 4000.*gets .*--tokenizer",
        ),
        ({"tokenizer_config": {"added_tokens_decoder": {"3": added("<y>")}}}, "'<y>' the id 3"),
        ({"added_tokens": {"<z>": "7"}}, "id of '<z>' must be an integer, not '7'"),
        ({"added_tokens": {"<z>": True}}, "id of '<z>' must be an integer, not True"),
    ],
)
def test_token_with_another_id_is_refused_by_name(tmp_path: Path, files: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        our_tokenizer(write(tmp_path, "Qwen 3", files))


@pytest.mark.parametrize("files", [["tokenizer.model"], ["vocab.json", "merges.txt"], ["tekken.json"]])
def test_layout_without_tokenizer_json_is_refused_with_the_way_out(tmp_path: Path, files: list[str]) -> None:
    LAYOUTS["Qwen 3"].write(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    for file in files:
        (tmp_path / file).touch()
    with pytest.raises(ConfigError, match=rf"{' and '.join(files)} cannot be used instead: .*--tokenizer"):
        our_tokenizer(tmp_path)


# --- chats

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message['role'] }}>{{ message['content'] | trim }}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHAT = [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "Grüße & 你好"}]
NAMED = [{"name": "rag", "template": "no"}, {"name": "default", "template": TEMPLATE}]


def template_of(folder: Path) -> Any:
    return ChatTemplate.from_checkpoint(open_checkpoint(str(folder), files="text"))


@pytest.mark.parametrize("form", ["text", "list", "jinja", "jinja and text"])
@pytest.mark.parametrize("name", ["Llama 3", "Gemma 3", "Phi-3"])
def test_chat_is_rendered_as_by_transformers(tmp_path: Path, name: str, form: str) -> None:
    in_config = {"text": TEMPLATE, "list": NAMED, "jinja and text": "no"}.get(form, "absent")
    LAYOUTS[name].write(tmp_path, {"chat_template": in_config})
    if "jinja" in form:
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert template_of(tmp_path).render(CHAT) == expected


@pytest.mark.parametrize("template", [TEMPLATE, NAMED])
def test_template_of_a_processor_counts_where_the_tokenizer_has_none(tmp_path: Path, template: Any) -> None:
    LAYOUTS["Llama 3"].write(tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert template_of(tmp_path).render(CHAT).startswith("<|begin_of_text|><system>Be brief.<|eot_id|>")
    (tmp_path / "chat_template.jinja").write_text("own")
    assert template_of(tmp_path).render(CHAT) == "own"
