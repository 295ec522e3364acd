"""Tokenizers of the published layouts give the ids, texts and chats of transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import published_tokenizers as published
import pytest
import tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from meltcore.common.errors import ConfigError
from meltcore.models.checkpoints.checkpoint import open_checkpoint, read_json
from meltcore.protocol.sampling_params import SamplingParams
from meltcore.text.chat_prompt import render_chat
from meltcore.text.chat_template import ChatTemplate
from meltcore.text.detokenizer import Detokenizer
from meltcore.text.tokenizer import Tokenizer

LAYOUTS = published.layouts()
COUNT = 60
# AutoTokenizer rebuilds these by their class, and drops steps of the published tokenizer.json: Llama 2's normalizer,
# which puts a space after each special token, and SmolLM2's single digits. The file is what a model was trained with.
REBUILT = {"Aya Expanse", "Code Llama", "Command R+", "DeepSeek R1 Distill Qwen", "Gemma 1", "Gemma 2", "Llama 2"}
REBUILT |= {"Llama 2 of 2023", "SmolLM2", "Yi"}


def our_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_checkpoint(open_checkpoint(str(folder), files="text"))


def streamed(tokenizer: Tokenizer, ids: list[int], *, skip_special_tokens: bool) -> str:
    detokenizer = Detokenizer(tokenizer, SamplingParams(skip_special_tokens=skip_special_tokens))
    return "".join([*(detokenizer.add([token_id])[0] for token_id in ids), detokenizer.flush()])


def assert_alike(folder: Path, count: int = COUNT, reader: Any = AutoTokenizer) -> Any:
    """Compare all that a tokenizer does with the one that a class of transformers reads; return the latter."""
    ours, theirs = our_tokenizer(folder), reader.from_pretrained(folder)
    added = {token_id: token for token_id, token in theirs.added_tokens_decoder.items() if token_id < ours.vocab_size}
    specials = {token_id for token_id, token in added.items() if token.special}
    for text in published.texts(count, sorted(token.content for token in added.values())):
        for add_special_tokens in (True, False):
            ids = ours.encode(text, add_special_tokens=add_special_tokens)
            assert ids == theirs.encode(text, add_special_tokens=add_special_tokens), text
            for skip in (True, False):
                # The library forgets to skip a special token whose text its normalizer changes.
                seen = [token_id for token_id in ids if not (skip and token_id in specials)]
                whole = theirs.decode(seen, clean_up_tokenization_spaces=False)
                assert ours.decode(ids, skip_special_tokens=skip) == whole, text
                assert streamed(ours, ids, skip_special_tokens=skip) == whole, text
    if "eos_token" in read_json(folder / "tokenizer_config.json"):
        assert theirs.eos_token_id in (None, *open_checkpoint(str(folder), files="text").eos_token_ids)
    return theirs


def test_thirty_layouts_name_their_source() -> None:
    assert len(LAYOUTS) >= 30
    for entry in published.PUBLISHED.values():
        assert entry["source"].split()[0] in ("github", "npm", "PyPI")


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_gives_the_ids_and_texts_of_transformers(tmp_path: Path, name: str) -> None:
    assert_alike(LAYOUTS[name].write(tmp_path), reader=PreTrainedTokenizerFast if name in REBUILT else AutoTokenizer)


@pytest.mark.parametrize("flags", [{"add_bos_token": True, "add_eos_token": True}, {"add_bos_token": False}, {}])
@pytest.mark.parametrize("name", ["Llama 3.1", "SmolLM3", "Gemma 3"])
def test_tokenizer_json_decides_whether_a_text_has_bos_and_eos(
    tmp_path: Path, name: str, flags: dict[str, Any]
) -> None:
    assert_alike(LAYOUTS[name].write(tmp_path, {"add_bos_token": "absent", "add_eos_token": "absent"} | flags), 10)


@pytest.mark.parametrize("name", LAYOUTS)
def test_special_token_in_a_message_is_text(tmp_path: Path, name: str) -> None:
    ours = our_tokenizer(LAYOUTS[name].write(tmp_path))
    assert ours.special_ids
    for token in ours.control_tokens.texts:
        for text in (token, f"a {token} b", f"a{token}b"):
            assert not ours.special_ids & set(ours.control_tokens.encode(text, []))


# Tokens of turns that published templates write. The layouts have them as text ("special": false).
WRITTEN = {
    "Aya Expanse": ["<|START_OF_TURN_TOKEN|>"],
    "Command R+": ["<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"],
    "DeepSeek R1 Distill Qwen": ["<｜User｜>", "<｜Assistant｜>"],
    "DeepSeek V3": ["<｜User｜>"],
    "DeepSeek V4": ["<｜User｜>"],
    "Qwen 3": ["<tool_call>", "</tool_call>"],
}


def counts_in_chat(ours: Tokenizer, source: str, token: str) -> list[tuple[int, str]]:
    """How often a token is in a prompt, and the prompt, for messages with the token and for one without it."""
    template, found = ChatTemplate(source), []
    for content in ("x", token, f"hi{token}Sure", f"a < b {token}\n"):
        messages = [{"role": "User", "content": content}]
        ids = render_chat(ours, template, messages).encode(ours)
        found.append((ids.count(ours.token_id(token)), template.render(messages)))
        assert not ours.is_byte_level or ours.decode(ids, skip_special_tokens=False) == found[-1][1]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_added_token_that_a_template_writes_is_text_in_a_message(tmp_path: Path, name: str) -> None:
    """Special or not. Tokens of whitespace are no control tokens."""
    ours = our_tokenizer(LAYOUTS[name].write(tmp_path))
    listed = [token["content"] for token in LAYOUTS[name].tokenizer["added_tokens"] if not token["content"].isspace()]
    assert set(WRITTEN.get(name, ())) <= {*listed}
    for token in listed:
        for source in (f"{token}{{{{ messages[0].content }}}}z", f"{{{{ {token!r} ~ messages[0].content ~ 'z' }}}}"):
            assert {count for count, _ in counts_in_chat(ours, source, token)} == {1}, (token, source)


@pytest.mark.parametrize("name", ["DeepSeek R1 Distill Qwen", "DeepSeek V3", "DeepSeek V4"])
def test_token_of_a_turn_that_a_template_joins_of_parts_is_text_in_a_message(tmp_path: Path, name: str) -> None:
    source = "{% for m in messages %}{{ '<｜' ~ m.role ~ '｜>' ~ m.content }}{% endfor %}"
    found = counts_in_chat(our_tokenizer(LAYOUTS[name].write(tmp_path)), source, "<｜User｜>")
    assert {count for count, _ in found} == {1}


@pytest.mark.parametrize(
    ("name", "token", "sought"),
    [
        ("SmolLM3", "</think>", "{{ '' if '</think>' in messages[0].content }}"),
        ("SmolLM3", "<think>", "{{ messages[0].content.split('<think>')[5] }}"),
        ("Qwen 3", "<tool_call>", "{{ messages[0].content | replace('<tool_call>y', '') | length * 0 or '' }}"),
        ("GPT-NeoX", " " * 24, ""),
    ],
)
def test_token_that_a_template_looks_for_or_whitespace_stays_a_token(
    tmp_path: Path, name: str, token: str, sought: str
) -> None:
    source = f"{sought}{{{{ {token!r} ~ messages[0].content }}}}"
    ours = our_tokenizer(LAYOUTS[name].write(tmp_path))
    assert [count for count, _ in counts_in_chat(ours, source, token)][2:] == [2, 2]


# --- every field counts

# The library computes neither ids nor texts from these. It finds the kinds of some steps by their fields.
WITHOUT_EFFECT = {
    *("added_tokens.id", "model.fuse_unk", "model.unk_token", "normalizer.type", "normalizer.normalizers.type"),
    *("decoder.add_prefix_space", "decoder.trim_offsets", "decoder.use_regex", "decoder.decoders.type"),
    *("pre_tokenizer.trim_offsets", "pre_tokenizer.pretokenizers.trim_offsets"),
}
# An isolated match is isolated inverted, too; the stand-in vocabularies have no token without merges; a template may
# list a token that it does not use.
SELDOM = {
    *("pre_tokenizer.invert", "pre_tokenizer.pretokenizers.invert", "pre_tokenizer.pattern.String"),
    *("pre_tokenizer.split", "pre_tokenizer.pretokenizers.individual_digits"),
    *("post_processor.special_tokens.ids", "model.ignore_merges"),
    *("model.byte_fallback", "added_tokens.normalized", "added_tokens.single_word"),
}
OF_PAIRS_AND_OFFSETS = {"pair", "type_id", "type", "tokens", "add_prefix_space", "trim_offsets", "use_regex"}


def leaves(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values of a layout but those of the vocabulary."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for name, value in items:
        if name not in ("vocab", "merges"):
            yield from leaves(value, (*path, name))
    if not items:
        yield path


def at(node: Any, path: tuple[Any, ...]) -> Any:
    for name in path:
        node = node[name]
    return node


def name_of(path: tuple[Any, ...]) -> str:
    """The name of a field, without places in lists and the names of tokens."""
    return ".".join(name for name in path if isinstance(name, str) and name.isidentifier())


def has_effect(name: str) -> bool | None:
    """Whether another value must change an output; None where that depends on the layout."""
    parts = name.split(".")
    if name in WITHOUT_EFFECT or (parts[0] == "post_processor" and OF_PAIRS_AND_OFFSETS.intersection(parts)):
        return False
    if name == "post_processor.special_tokens.id" or name == "post_processor.processors.special_tokens.id":
        return False
    return None if name in SELDOM else True


def changed(name: Any, value: Any) -> Any:
    """Return another value of a field."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if name == "Regex":
        return "."
    if isinstance(value, str):
        return {"Isolated": "Removed"}.get(value, f"{value}x")
    steps = {"normalizer": {"type": "Lowercase"}, "pre_tokenizer": {"type": "Whitespace"}, "unk_token": "a"}
    return steps.get(name, "e")


@cache
def mutations() -> dict[str, list[tuple[Any, ...]]]:
    """Paths by layout: each field of a layout whose value no other layout before it has in the same place."""
    seen: set[tuple[Any, ...]] = set()
    found: dict[str, list[tuple[Any, ...]]] = {}
    for name, layout in LAYOUTS.items():
        kind = (layout.tokenizer["normalizer"] is None, layout.tokenizer["model"].get("byte_fallback"))
        for path in leaves(layout.tokenizer):
            value = at(layout.tokenizer, path)
            token = path[0] == "added_tokens" and not isinstance(value, bool)
            key = (*kind, name_of(path), type(value) if token else repr(value))
            if key not in seen:
                found.setdefault(name, []).append(path)
            seen.add(key)
    return found


@pytest.mark.parametrize(
    ("name", "path", "value", "reason"),
    [
        ("Llama 2", ("post_processor", "single", 0, "SpecialToken", "id"), "<bos>", "no entry found"),
        ("Qwen 3", ("model", "continuing_subword_prefix"), "##", "merge .* lacks continuing_subword_prefix, '##'"),
        ("Gemma 2", ("model", "continuing_subword_prefix"), "▁", "lacks continuing_subword_prefix, '▁'"),
        ("Mistral v0.1", ("decoder", "decoders", 3, "stop"), 2, "index out of bounds"),
    ],
)
def test_file_over_which_the_library_panics_is_refused(
    tmp_path: Path, name: str, path: tuple[Any, ...], value: Any, reason: str
) -> None:
    layout = LAYOUTS[name]
    layout.write(tmp_path)
    mutated = json.loads(json.dumps(layout.tokenizer))
    at(mutated, path[:-1])[path[-1]] = value
    (tmp_path / "tokenizer.json").write_text(json.dumps(mutated))
    with pytest.raises(ConfigError, match=f"tokenizer.json cannot be read: .*{reason}"):
        our_tokenizer(tmp_path)


def outputs(folder: Path, texts: list[str]) -> list[Any]:
    """All that the tokenizer of a folder makes of texts, with the ids of the library."""
    ours, found = our_tokenizer(folder), []
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in texts:
        for add_special_tokens in (True, False):
            ids = ours.encode(text, add_special_tokens=add_special_tokens)
            assert ids == library.encode(text, add_special_tokens=add_special_tokens).ids
            found.append((ids, ours.decode(ids, skip_special_tokens=add_special_tokens)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", mutations())
def test_another_value_of_a_field_changes_ids_or_texts_or_is_refused(tmp_path: Path, name: str) -> None:
    layout = LAYOUTS[name]
    layout.write(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")  # its added_tokens_decoder would restore flags of tokens
    tokens = [token["content"] for token in layout.tokenizer["added_tokens"]]
    sides = [text for token in tokens for text in (f"a {token} b", f"a{token}b{token}", f" {token}  x")]
    texts = [*published.texts(16, tokens), *sides]
    base = outputs(tmp_path, texts)
    for path in mutations()[name]:
        mutated = json.loads(json.dumps(layout.tokenizer))
        at(mutated, path[:-1])[path[-1]] = changed(path[-1], at(mutated, path))
        (tmp_path / "tokenizer.json").write_text(json.dumps(mutated))
        try:
            found = outputs(tmp_path, texts)
        except ConfigError:
            continue
        assert has_effect(name_of(path)) in (None, found != base), path


# --- tokens that other files list


def added(text: str, **flags: bool) -> dict[str, Any]:
    plain = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized", "special"), False)
    return {"content": text, **plain, **flags}


def next_id(name: str) -> int:
    return LAYOUTS[name].backend.get_vocab_size(with_added_tokens=True)


def last_added(name: str) -> tuple[int, str]:
    """The id and the text of the last added token."""
    added = LAYOUTS[name].backend.get_added_tokens_decoder()
    return max(added), added[max(added)].content


def listings(name: str) -> dict[str, dict[str, Any]]:
    """Files by name, for each way to list tokens that tokenizer.json does not have, or has as words alone."""
    first, (last_id, last) = next_id(name), last_added(name)
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
            "tokenizer_config": {"added_tokens_decoder": {str(last_id): added(last, rstrip=True, special=True)}}
        },
        "a word": {"tokenizer_config": {"additional_special_tokens": [word]}},
        "a word's object": {
            "tokenizer_config": {
                "extra_special_tokens": [{"__type": "AddedToken", **added(word, lstrip=True, special=True)}]
            }
        },
    }


def write(folder: Path, name: str, files: dict[str, Any]) -> Path:
    LAYOUTS[name].write(folder, {"added_tokens_decoder": "absent"} | files.get("tokenizer_config", {}))
    for file, content in files.items():
        if file != "tokenizer_config":
            (folder / f"{file}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("listing", listings("Llama 3.1"))
@pytest.mark.parametrize("name", ["Llama 3.1", "Mistral v0.1", "OLMo 2"])
def test_tokens_of_other_files_are_those_of_transformers(tmp_path: Path, name: str, listing: str) -> None:
    folder = write(tmp_path, name, listings(name)[listing])
    theirs = assert_alike(folder, 40)
    ours = our_tokenizer(folder)
    text = f"say <|new|>  <tool> hello it{last_added(name)[1]}  it"
    assert ours.encode(text, add_special_tokens=True) == theirs.encode(text)
    assert ours.special_ids == {each for each, token in theirs.added_tokens_decoder.items() if token.special}


@pytest.mark.parametrize("name", ["Llama 3.1", "Gemma 3"])
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
@pytest.mark.parametrize("name", ["Llama 3.1", "Gemma 3", "Phi-3 mini"])
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
    LAYOUTS["Llama 3.1"].write(tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert template_of(tmp_path).render(CHAT).startswith("<|begin_of_text|><system>Be brief.<|eot_id|>")
    (tmp_path / "chat_template.jinja").write_text("own")
    assert template_of(tmp_path).render(CHAT) == "own"
