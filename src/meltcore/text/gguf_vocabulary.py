"""Writes the tokenizer and chat template of a checkpoint folder as the metadata of a GGUF file.

gguf_tokenizer.py reads the metadata. A GGUF file names only the kind of its tokenizer, so every part of a
tokenizer.json must match one kind. The kinds are byte-level BPE with a known pattern, and BPE with SentencePiece's
spaces and bytes.
"""

from __future__ import annotations

import json
import random
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import TokenType

from meltcore.common.errors import ConfigError
from meltcore.models.checkpoints.checkpoint import Checkpoint
from meltcore.models.checkpoints.gguf.gguf_config import read_config
from meltcore.models.checkpoints.gguf.gguf_file import GGUFModel
from meltcore.models.configs.json_file import read_json
from meltcore.models.configs.turn_tokens import END_TOKENS
from meltcore.text.chat_template import find_source, special_token_texts, tokenizer_config
from meltcore.text.gguf_pre_tokenizers import PRE_TOKENIZERS
from meltcore.text.gguf_tokenizer import (
    PREFIX,
    SPACE,
    SPECIAL_NAMES,
    build_tokenizer,
    merges_from_scores,
    space_normalizer,
)
from meltcore.text.tokenizer import Tokenizer

_BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))
_UNUSED_SCORE, _ADDED_SCORE = -10_000.0, -1_000.0  # as llama.cpp's converter has them; nothing is merged to these
# Pre-tokenizers that split nothing after spaces have been replaced.
_NO_SPLIT = (None, {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False})
_METASPACE = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "never", "split": False}
_NUM_SAMPLES, _SAMPLE_PIECES = 64, 40
_SAMPLE_CHARACTERS = " \n\t'.,019aZé日한ನ🏳️\u0301"


class _Vocabulary:
    """The tokens of a tokenizer.json with their types, as many as the embedding has rows."""

    def __init__(self, path: Path, content: dict[str, Any], num_rows: int) -> None:
        """Read the tokens from the parsed file. Raises ConfigError if a GGUF file cannot express a token."""
        self.path, self.model = path, content["model"]
        self.is_sentencepiece = bool(self.model.get("byte_fallback"))
        vocab, unknown = self.model.get("vocab"), self.model.get("unk_token")
        if self.model.get("type") != "BPE" or not isinstance(vocab, dict):
            raise self.unsupported("model", self.model.get("type"), "BPE")
        outside = [token for token, token_id in vocab.items() if token_id >= num_rows]
        if outside:
            raise ConfigError(f"{path}: token {outside[0]!r} has the id {vocab[outside[0]]}; the model has {num_rows}")
        self.tokens = [f"[PAD{token_id}]" for token_id in range(num_rows)]
        self.types = np.full(num_rows, int(TokenType.UNUSED))
        for token, token_id in vocab.items():
            is_byte = self.is_sentencepiece and token in _BYTE_TOKENS
            self._set_token(token_id, token, TokenType.BYTE if is_byte else TokenType.NORMAL)
        for added in content.get("added_tokens", []):
            token_id, text = added["id"], added["content"]
            if token_id >= num_rows:  # a token of images, which a model of texts has no embedding for
                continue
            stripping = [name for name in ("lstrip", "rstrip", "single_word") if added.get(name)]
            if stripping:
                raise ConfigError(f"{path}: token {text!r} has {stripping[0]}, which a GGUF file cannot express")
            if added["special"]:
                self._set_token(token_id, text, TokenType.UNKNOWN if text == unknown else TokenType.CONTROL)
            else:  # it is matched before spaces are replaced
                text = text.replace(SPACE, " ") if self.is_sentencepiece else text
                self._set_token(token_id, text, TokenType.USER_DEFINED)
        self.ids = {token: token_id for token_id, token in enumerate(self.tokens)}

    def _set_token(self, token_id: int, token: str, token_type: TokenType) -> None:
        self.tokens[token_id], self.types[token_id] = token, token_type

    def merges(self) -> list[tuple[str, str]]:
        """Return the merges of the vocabulary, ordered by rank."""
        merges = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in self.model.get("merges", []))
        return [(left, right) for left, right in merges]

    def unsupported(self, what: str, value: Any, supported: str) -> ConfigError:
        """Return the error for a part of the tokenizer that GGUF has no name for."""
        text = json.dumps(value, ensure_ascii=False)
        text = text if len(text) <= 200 else f"{text[:200]}..."
        return ConfigError(f"{self.path}: {what} is {text}; a GGUF file can have {supported}")


def tokenizer_metadata(checkpoint: Checkpoint, num_rows: int) -> dict[str, Any]:
    """Return the metadata of tokenizer and chat template by key. The embedding has `num_rows` rows.

    Raises ConfigError that names the part of tokenizer.json which a GGUF file cannot express.
    """
    folder = checkpoint.folder
    tokenizer = Tokenizer.from_folder(folder)
    content = read_json(folder / "tokenizer.json")
    vocabulary = _Vocabulary(folder / "tokenizer.json", content, num_rows)
    kind = _sentencepiece_metadata if vocabulary.is_sentencepiece else _byte_level_metadata
    metadata = kind(vocabulary, content)
    metadata |= {"tokens": vocabulary.tokens, "token_type": vocabulary.types.tolist()}
    metadata |= _special_ids(checkpoint, tokenizer, vocabulary, special_token_texts(folder))
    metadata = {PREFIX + key: value for key, value in metadata.items()}
    template = find_source(folder, tokenizer_config(folder))
    return metadata if template is None else metadata | {"tokenizer.chat_template": template}


def _byte_level_metadata(vocabulary: _Vocabulary, content: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of byte-level BPE. Raises ConfigError for an unknown pattern."""
    seen = (
        _without_offsets(content.get("pre_tokenizer")),
        content.get("normalizer"),
        bool(vocabulary.model.get("ignore_merges")),
    )
    for name, pre in PRE_TOKENIZERS.items():
        if seen == (_without_offsets(_part_state(pre.splitter())), _part_state(pre.normalizer), pre.ignore_merges):
            merges = [" ".join(merge) for merge in vocabulary.merges()]
            return {"model": "gpt2", "pre": name, "merges": merges}
    raise vocabulary.unsupported(
        "pre_tokenizer", content.get("pre_tokenizer"), f"the patterns and settings of {', '.join(PRE_TOKENIZERS)}"
    )


def _sentencepiece_metadata(vocabulary: _Vocabulary, content: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of BPE with SentencePiece's spaces. Raises ConfigError if no scores give the merges."""
    normalizer, splitter = content.get("normalizer"), content.get("pre_tokenizer")
    if splitter in _NO_SPLIT and normalizer in (
        _part_state(space_normalizer(add_space=each)) for each in (True, False)
    ):
        add_space = normalizer == _part_state(space_normalizer(add_space=True))
    elif normalizer is None and splitter == _METASPACE:
        add_space = False
    else:
        both = {"normalizer": normalizer, "pre_tokenizer": splitter}
        raise vocabulary.unsupported("treatment of spaces", both, "a space before each text, or none")
    scores = np.full(len(vocabulary.tokens), _UNUSED_SCORE, dtype=np.float32)
    normal = vocabulary.types == TokenType.NORMAL
    # Tokens that are matched as text, as Gemma's runs of spaces are, need no merges.
    ids = {token: token_id for token, token_id in vocabulary.ids.items() if normal[token_id]}
    merges = [merge for merge in vocabulary.merges() if "".join(merge) in ids]
    scores[normal] = -len(merges)  # characters, which no merge gives
    scores[vocabulary.types == TokenType.USER_DEFINED] = _ADDED_SCORE
    scores[np.isin(vocabulary.types, (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.BYTE))] = 0.0
    joined = [token for token, _ in groupby("".join(merge) for merge in merges)]
    for rank, token in enumerate(joined):
        scores[ids[token]] = -rank
    # The splits of one token do not compete, so that their order among themselves is free.
    by_scores = merges_from_scores(vocabulary.ids, scores, vocabulary.types)
    if len(joined) != len(set(joined)) or set(by_scores) != set(merges):
        different = sorted(set(by_scores) ^ set(merges))[:3]
        raise ConfigError(
            f"{vocabulary.path}: the merges follow from no order of tokens, as GGUF needs it; such as {different}"
        )
    return {"model": "llama", "pre": "default", "scores": scores.tolist(), "add_space_prefix": add_space}


def _special_ids(
    checkpoint: Checkpoint, tokenizer: Tokenizer, vocabulary: _Vocabulary, texts: dict[str, str]
) -> dict[str, Any]:
    """Return the ids of special tokens, and whether BOS and EOS are added to a text."""
    ids = {
        key: vocabulary.ids[texts[f"{name}_token"]]
        for name, key in SPECIAL_NAMES.items()
        if texts.get(f"{name}_token") in vocabulary.ids
    }
    if vocabulary.model.get("unk_token") in vocabulary.ids:
        ids["unknown"] = vocabulary.ids[vocabulary.model["unk_token"]]
    plain, whole = (tokenizer.encode("a", add_special_tokens=add) for add in (False, True))
    start = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
    before, after = whole[:start], whole[start + len(plain) :]
    end_ids = [token_id for token_id in checkpoint.eos_token_ids if token_id < len(vocabulary.tokens)]
    if before:
        ids["bos"] = before[0]
    if after or ("eos" not in ids and end_ids):
        ids["eos"] = (after or end_ids)[0]
    if before != [ids.get("bos")][: len(before)] or after != [ids.get("eos")][: len(after)]:
        raise ConfigError(
            f"{vocabulary.path}: a text gets the tokens {before} before it and {after} behind it; "
            "a GGUF file can have one BOS and one EOS token"
        )
    # Known end tokens are found by their texts.
    others = [token_id for token_id in dict.fromkeys(end_ids) if token_id != ids.get("eos")]
    others.sort(key=lambda token_id: _is_found_by_text(vocabulary, token_id))
    ids |= dict(zip(("eot", "eom"), others, strict=False))
    flags = {"add_bos_token": bool(before), "add_eos_token": bool(after)}
    return {f"{key}_token_id": token_id for key, token_id in ids.items()} | flags


def _is_found_by_text(vocabulary: _Vocabulary, token_id: int) -> bool:
    return vocabulary.types[token_id] == TokenType.CONTROL and vocabulary.tokens[token_id] in END_TOKENS


def check_tokenizer(checkpoint: Checkpoint, written: GGUFModel) -> None:
    """Raise ConfigError unless the GGUF file has the checkpoint's end tokens and encodes random texts the same way."""
    ours = Checkpoint(checkpoint.name, written.path.parent, read_config(written), {}, written)
    lost = [each for each in checkpoint.eos_token_ids if each not in ours.eos_token_ids and each < _num_rows(ours)]
    if lost:
        raise ConfigError(f"{checkpoint.name} has the end tokens {checkpoint.eos_token_ids}; a GGUF file loses {lost}")
    source, read = Tokenizer.from_folder(checkpoint.folder), Tokenizer(build_tokenizer(written))
    for text in _sample_texts(source, min(source.vocab_size, _num_rows(ours))):
        expected, found = (each.encode(text, add_special_tokens=True) for each in (source, read))
        if expected != found:
            raise ConfigError(
                f"{checkpoint.name}: the text {text!r} has the tokens {expected[:20]}; "
                f"as GGUF it would have {found[:20]}"
            )
        if source.decode(expected, skip_special_tokens=False) != read.decode(expected, skip_special_tokens=False):
            raise ConfigError(f"{checkpoint.name}: as GGUF the tokens {expected[:20]} would be another text")


def _num_rows(checkpoint: Checkpoint) -> int:
    return int(checkpoint.config["vocab_size"])


def _sample_texts(tokenizer: Tokenizer, num_tokens: int) -> list[str]:
    """Return texts of random tokens, including special tokens, and of characters that a vocabulary may lack."""
    generator = random.Random(0)  # noqa: S311 - draws samples
    special_ids = [token_id for token_id in sorted(tokenizer.special_ids) if token_id < num_tokens]
    texts = []
    for _ in range(_NUM_SAMPLES):
        pieces = []
        for _ in range(_SAMPLE_PIECES):
            kind = generator.random()
            if kind < 0.2 and special_ids:
                pieces.append(tokenizer.decode([generator.choice(special_ids)], skip_special_tokens=False))
            elif kind < 0.8:
                pieces.append(tokenizer.decode([generator.randrange(num_tokens)], skip_special_tokens=False))
            else:
                pieces.append(generator.choice(_SAMPLE_CHARACTERS))
        texts.append("".join(pieces).replace("\ufffd", " "))
    return texts


def _part_state(part: Any) -> Any:
    """Return a part of a tokenizer as tokenizer.json has it."""
    return None if part is None else json.loads(part.__getstate__())


def _without_offsets(part: Any) -> Any:
    """Return a part of a tokenizer.json without the settings of character offsets, which change no token."""
    if isinstance(part, dict):
        return {key: _without_offsets(value) for key, value in part.items() if key != "trim_offsets"}
    return [_without_offsets(each) for each in part] if isinstance(part, list) else part
