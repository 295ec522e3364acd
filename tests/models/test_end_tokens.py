"""The end tokens of an answer, from every field of a checkpoint that names one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meltcore.common.errors import ConfigError
from meltcore.models.checkpoints.checkpoint import open_checkpoint

ENDOFTEXT, IM_END = "<|endoftext|>", "<|im_end|>"
LISTED = [{"id": 7, "content": ENDOFTEXT, "special": True}, {"id": 9, "content": IM_END, "special": True}]


def write(folder: Path, **files: Any) -> Path:
    """Writes JSON files by their names without .json; None: no such file."""
    for name, content in ({"config": {}} | files).items():
        if content is not None:
            (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def end_ids(folder: Path) -> tuple[int, ...]:
    return open_checkpoint(str(folder), files="text").eos_token_ids


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 1}, None, (1,)),
        ({"eos_token_id": 0}, {}, (0,)),
        ({"eos_token_id": 1}, {"eos_token_id": None}, (1,)),
        ({"eos_token_id": 1}, {"eos_token_id": []}, (1,)),
        ({"eos_token_id": 1}, {"eos_token_id": 0}, (0,)),
        ({"eos_token_id": [1, 2]}, {}, (1, 2)),
        ({"eos_token_id": 1}, {"eos_token_id": [3, 2, 3]}, (3, 2)),
        ({"eos_token_id": 1, "text_config": {"eos_token_id": 4}}, {}, (4,)),
        ({"eos_token_id": 1, "text_config": {"eos_token_id": None}}, {}, (1,)),
        ({"eos_token_id": 1, "text_config": {"eos_token_id": []}}, {}, (1,)),
        ({"eos_token_id": 10**9}, {}, (10**9,)),
        ({"eos_token_id": None}, None, ()),
        ({}, {}, ()),
    ],
)
def test_end_ids_come_from_the_first_file_that_has_them(
    tmp_path: Path, config: dict, generation: dict | None, expected: tuple[int, ...]
) -> None:
    assert end_ids(write(tmp_path, config=config, generation_config=generation)) == expected


@pytest.mark.parametrize("wrong", ["</s>", -1, 1.5, True, {"id": 1}, ["</s>"], [[1]], [1, -1], [None]])
@pytest.mark.parametrize(
    ("file", "field"),
    [
        ("generation_config", "eos_token_id"),
        ("config", "eos_token_id"),
        ("config", "text_config.eos_token_id"),
    ],
)
def test_invalid_end_id_is_refused_in_any_file(tmp_path: Path, file: str, field: str, wrong: Any) -> None:
    value: dict[str, Any] = {"eos_token_id": wrong}
    files = {"generation_config": {"eos_token_id": 1}} | {file: {"text_config": value} if "." in field else value}
    write(tmp_path, **files)
    with pytest.raises(ConfigError) as raised:
        end_ids(tmp_path)
    must = "a whole number of at least 0, or a list of them"
    assert str(raised.value) == f"{file}.json: {field} must be {must}; got {json.dumps(wrong)}"


@pytest.mark.parametrize("end_token", [IM_END, {"content": IM_END, "special": True}])
@pytest.mark.parametrize("listed_in", ["tokenizer", "tokenizer_config"])
def test_end_token_of_the_tokenizer_is_an_end_id(tmp_path: Path, end_token: Any, listed_in: str) -> None:
    """As published for Qwen3.5: config.json names the token that ends texts, tokenizer_config.json that of chats."""
    settings: dict[str, Any] = {"eos_token": end_token}
    if listed_in == "tokenizer_config":
        settings["added_tokens_decoder"] = {str(token["id"]): token for token in LISTED}
    listed = {"added_tokens": LISTED if listed_in == "tokenizer" else []}
    config = {"text_config": {"eos_token_id": 7}}
    assert end_ids(write(tmp_path, config=config, tokenizer_config=settings, tokenizer=listed)) == (7, 9)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7]}))
    assert end_ids(tmp_path) == (9, 7)


@pytest.mark.parametrize(
    ("settings", "tokenizer"),
    [
        ({}, {"added_tokens": LISTED}),
        ({"eos_token": None}, {"added_tokens": LISTED}),
        ({"eos_token": "</s>"}, {"added_tokens": LISTED}),
        ({"eos_token": IM_END}, {}),
        ({"eos_token": IM_END}, None),
        ({"eos_token": IM_END, "added_tokens_decoder": {}}, None),
    ],
)
def test_end_token_without_a_known_id_adds_none(tmp_path: Path, settings: dict, tokenizer: dict | None) -> None:
    assert end_ids(write(tmp_path, config={"eos_token_id": 7}, tokenizer_config=settings, tokenizer=tokenizer)) == (7,)


@pytest.mark.parametrize(
    ("file", "content", "field"),
    [
        ("tokenizer_config", {"eos_token": 5}, "eos_token"),
        ("tokenizer_config", {"eos_token": {"id": 9}}, "eos_token"),
        ("tokenizer_config", {"eos_token": IM_END, "added_tokens_decoder": []}, "added_tokens_decoder"),
        ("tokenizer_config", {"eos_token": IM_END, "added_tokens_decoder": {"x": LISTED[0]}}, "added_tokens_decoder"),
        ("tokenizer_config", {"eos_token": IM_END, "added_tokens_decoder": {"9": IM_END}}, "added_tokens_decoder"),
        ("tokenizer", {"added_tokens": {"9": IM_END}}, "added_tokens"),
        ("tokenizer", {"added_tokens": [{"id": "9", "content": IM_END}]}, "added_tokens"),
    ],
)
def test_invalid_tokenizer_file_is_named(tmp_path: Path, file: str, content: dict, field: str) -> None:
    write(tmp_path, **({"tokenizer_config": {"eos_token": IM_END}} | {file: content}))
    with pytest.raises(ConfigError, match=rf"^{file}\.json: {field} must be .*; got "):
        end_ids(tmp_path)


@pytest.mark.parametrize(
    ("settings", "others", "expected"),
    [
        ({}, {"special_tokens_map": {"eos_token": IM_END}, "added_tokens": {IM_END: 5}}, (7, 5)),
        ({"eos_token": "</s>"}, {"special_tokens_map": {"eos_token": {"content": IM_END}}}, (7, 9)),
        ({"eos_token": IM_END, "added_tokens_decoder": {}}, {"special_tokens_map": {"eos_token": "</s>"}}, (7, 9)),
        ({"eos_token": IM_END}, {"added_tokens": {IM_END: "5"}}, (7, 9)),
    ],
)
def test_end_token_of_the_other_files_is_an_end_id(
    tmp_path: Path, settings: dict, others: dict, expected: tuple[int, ...]
) -> None:
    listed = {} if "special_tokens_map" in others and "added_tokens" in others else {"added_tokens": LISTED}
    write(tmp_path, config={"eos_token_id": 7}, tokenizer_config=settings, tokenizer=listed, **others)
    assert end_ids(tmp_path) == expected
