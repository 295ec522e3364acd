"""Converts text to token ids and back, with the `tokenizers` library and a checkpoint's tokenizer.json."""

from __future__ import annotations

import json
import re
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from meltcore.common.errors import ConfigError
from meltcore.models.checkpoints.checkpoint import Checkpoint
from meltcore.models.configs.config_fields import Fields
from meltcore.models.configs.json_file import read_json
from meltcore.text.chat_template import named_special_tokens
from meltcore.text.control_tokens import ControlTokens

NUM_BYTES = 256
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # of vocabularies made by SentencePiece
_PREFIX = re.compile(rb'"continuing_subword_prefix"\s*:\s*"[^"]')
_LETTER = "x"
MIN_BATCH_DECODE_TOKENS = 1024
OTHER_LAYOUTS = ("tokenizer.model", "tekken.json", "vocab.json", "merges.txt", "spiece.model", "vocab.txt")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def byte_alphabet() -> dict[str, int]:
    """Return the byte for which each printable character stands in a byte-level vocabulary.

    The table is GPT-2's: printable Latin-1 bytes stand for themselves. The characters from U+0100 on stand for the
    other 68 bytes.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(NUM_BYTES) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(NUM_BYTES + i): byte for i, byte in enumerate(unprintable)}


_ALPHABET = byte_alphabet()


class Tokenizer:
    """Holds a checkpoint's tokenizer.

    `is_synthetic` is True for the substitute tokenizer of a dummy model without a tokenizer.
    """

    def __init__(self, backend: tokenizers.Tokenizer, *, is_synthetic: bool = False) -> None:
        self._backend = backend
        self.is_synthetic = is_synthetic
        backend.no_truncation()  # a tokenizer.json may ask for it; a prompt that is too long is refused, never cut
        backend.no_padding()
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        added_tokens = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added_tokens.items() if token.special)
        self._decoder_steps = _decoder_steps(backend)
        self.is_byte_level = self._decoder_steps == ["ByteLevel"]
        self._token_bytes: dict[int, bytes] = {}

    @cached_property
    def control_tokens(self) -> ControlTokens:
        """The control tokens. Outside of a chat template, their characters in a text are ordinary text."""
        return ControlTokens(self._backend)

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, *, allow_missing: bool = False) -> Tokenizer:
        """Load the tokenizer of --tokenizer, else of the checkpoint.

        With `allow_missing` a checkpoint without a tokenizer.json gets a synthetic tokenizer. Raises ConfigError if the
        tokenizer is missing or broken.
        """
        folder = checkpoint.text_folder
        if folder is None:
            from meltcore.text.gguf_tokenizer import build_tokenizer

            assert checkpoint.gguf is not None
            return cls(build_tokenizer(checkpoint.gguf))
        if not allow_missing or (folder / "tokenizer.json").exists():
            return cls.from_folder(folder)
        vocab_size = checkpoint.text_config.get("vocab_size")
        if not isinstance(vocab_size, int):
            raise ConfigError(f"{folder}/config.json has no vocab_size to make a synthetic tokenizer for")
        return cls.synthetic_bytes(vocab_size)

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Read `folder/tokenizer.json`, and the tokens that other files of the folder add to it.

        Raises ConfigError if it is missing or broken.
        """
        path = folder / "tokenizer.json"
        if not path.exists():
            raise ConfigError(_missing_reason(folder))
        backend = _read_backend(path)
        add_listed_tokens(backend, folder)
        return cls(backend)

    @classmethod
    def synthetic_bytes(cls, vocab_size: int) -> Tokenizer:
        """Return a byte-level tokenizer for a model without a tokenizer.

        Id n is byte n up to 255; larger ids are texts like " t300". Encoding gives one token per byte, so prompt
        lengths are easy to predict, and every id decodes to some text. Raises ConfigError for a vocabulary of fewer
        than 256 ids.
        """
        if vocab_size < NUM_BYTES:
            raise ConfigError(f"a synthetic tokenizer needs a vocabulary of at least {NUM_BYTES}; got {vocab_size}")
        vocab = dict(_ALPHABET) | {f"Ġt{token_id}": token_id for token_id in range(NUM_BYTES, vocab_size)}
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        return cls(backend, is_synthetic=True)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of `text`.

        `add_special_tokens` adds the tokens of the tokenizer's post-processor, such as a BOS token.
        """
        # `encode` would hold the GIL throughout (tokenizers 0.23: seconds per megabyte) and compute character offsets,
        # which are not used here.
        encodings = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        token_ids: list[int] = encodings[0].ids
        return token_ids

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int, int]:
        """Return the token ids of two texts with the special tokens of a pair, and two positions in them.

        The first position is that of the first token of type 1. It is 0 if the tokenizer gives all tokens one type. The
        second one is the number of tokens before the second text.
        """
        [encoding] = self._backend.encode_batch_fast([(first, second)], add_special_tokens=True)
        types: list[int] = encoding.type_ids
        parts: list[int | None] = encoding.sequence_ids
        return encoding.ids, types.index(1) if 1 in types else 0, parts.index(1) if 1 in parts else len(parts)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`. Ids beyond the vocabulary (padding rows of an embedding) have no text."""
        text: str
        if skip_special_tokens:  # the library does not skip a special token whose text its normalizer changes
            token_ids = [token_id for token_id in token_ids if token_id not in self.special_ids]
        # `decode` holds the GIL, `decode_batch` does not; for few tokens it costs twice as much.
        if len(token_ids) > MIN_BATCH_DECODE_TOKENS:
            [text] = self._backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        else:
            text = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def serialize(self) -> str:
        """Return the whole tokenizer as the text of a tokenizer.json."""
        text: str = self._backend.to_str()
        return text

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its text in the vocabulary, or None if there is no such token."""
        result: int | None = self._backend.token_to_id(token)
        return result

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token within a text. The bytes of all tokens, joined and decoded, are the text.

        A decoder may drop the space at the beginning of a text. `decode` returns the text of a first token.
        """
        result = self._token_bytes.get(token_id)
        if result is None:
            result = self._token_bytes[token_id] = self._find_bytes(token_id)
        return result

    def _find_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if not self.is_byte_level:
            return self._bytes_after_a_letter(token)
        try:
            return bytes([_ALPHABET[char] for char in token])
        except KeyError:  # an added token with a character outside the alphabet is taken as plain text
            return token.encode()

    def _bytes_after_a_letter(self, token: str) -> bytes:
        """Return the bytes of a token that does not begin the text. A byte token stands for one byte."""
        byte = _BYTE_TOKEN.fullmatch(token)
        if byte is not None and "ByteFallback" in self._decoder_steps:
            return bytes([int(byte[1], 16)])
        decoder = self._backend.decoder
        if decoder is None:
            return token.encode()
        text: str = decoder.decode([_LETTER, token])
        return text.removeprefix(_LETTER).encode()


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    """Read a tokenizer.json.

    Raises ConfigError if the library cannot read it, or would panic when it encodes a text.
    """
    try:
        _check_prefix(path)
        backend = tokenizers.Tokenizer.from_file(str(path))
        backend.encode("a")  # a template may name a token that it does not list
        backend.decode([])  # a decoder may strip more characters than there are
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # bare Exception for every parse error; a panic of Rust is no Exception
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return backend


def _check_prefix(path: Path) -> None:
    """Raise ValueError if a merge lacks the prefix of continued words. The library would abort the process."""
    content = path.read_bytes()
    if _PREFIX.search(content) is None:
        return
    model = json.loads(content)["model"]
    prefix = model["continuing_subword_prefix"]
    for merge in model.get("merges", ()):
        second = (merge.split(" ") if isinstance(merge, str) else merge)[-1]
        if not second.startswith(prefix):
            raise ValueError(f"the merge {merge!r} lacks continuing_subword_prefix, {prefix!r}")


def _missing_reason(folder: Path) -> str:
    """Return why a folder without tokenizer.json has no tokenizer, and how the user can get it."""
    fault = f"{folder} has no tokenizer.json"
    others = [name for name in OTHER_LAYOUTS if (folder / name).exists()]
    if not others:
        return f"{fault}; name a folder or hub id that has one with --tokenizer"
    return (
        f"{fault}, and {' and '.join(others)} cannot be used instead: name a folder or hub id that has one by "
        "--tokenizer, or write it with AutoTokenizer.from_pretrained(...).save_pretrained(...) of transformers"
    )


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[str]:
    """Return the types of the steps that convert tokens to text, in the order of the steps."""
    if backend.decoder is None:
        return []
    decoder_state = json.loads(backend.decoder.__getstate__())
    decoder_steps = decoder_state["decoders"] if decoder_state["type"] == "Sequence" else [decoder_state]
    return [step["type"] for step in decoder_steps]


def add_listed_tokens(backend: tokenizers.Tokenizer, folder: Path) -> None:
    """Add the tokens of a folder's tokenizer_config.json, added_tokens.json and special_tokens_map.json.

    A token that is listed with an id keeps its listed flags. A named special token without an id in any file stays
    text, since the model has no row for it. Raises ConfigError if a file cannot be read, or gives a token another id
    than the tokenizer does.
    """
    special = named_special_tokens(folder)
    listed = _listed_tokens(folder, {_token_text(value) for value in special}, _added_texts(backend))
    backend.add_tokens([token for _, token, _ in listed])
    for token_id, token, source in listed:
        if (found := backend.token_to_id(token.content)) != token_id:
            raise ConfigError(
                f"{source} gives token {token.content!r} the id {token_id}, but after tokenizer.json it gets {found}; "
                "list the token in tokenizer.json, or name another tokenizer by --tokenizer"
            )
    known = _added_texts(backend)
    named = [_to_added_token(value) for value in special if _token_text(value) not in known]
    backend.add_special_tokens([token for token in named if backend.token_to_id(token.content) is not None])


def _added_texts(backend: tokenizers.Tokenizer) -> set[str]:
    return {token.content for token in backend.get_added_tokens_decoder().values()}


def _listed_tokens(folder: Path, special: set[str], known: set[str]) -> list[tuple[int, AddedToken, Path]]:
    """Return the tokens that are listed with ids, sorted by id, and the file of each token.

    An entry of tokenizer_config.json replaces a known token. An entry of added_tokens.json does not.
    """
    path = folder / "tokenizer_config.json"
    listed = Fields(read_json(path) if path.exists() else {}, path.name).optional("added_tokens_decoder")
    if listed is not None:
        tokens = [
            (int(token_id), _to_added_token(value), path) for token_id, value in listed.items() if value["content"]
        ]
        return sorted(tokens, key=lambda token: token[0])
    path = folder / "added_tokens.json"
    ids = read_json(path) if path.exists() else {}
    wrong = next((text for text, token_id in ids.items() if type(token_id) is not int), None)
    if wrong is not None:
        raise ConfigError(f"{path}: the id of {wrong!r} must be an integer, not {ids[wrong]!r}")
    return [
        (token_id, AddedToken(text, normalized=text not in special, special=text in special), path)
        for text, token_id in sorted(ids.items(), key=lambda item: item[1])
        if text not in known
    ]


def _token_text(value: str | dict[str, Any]) -> str:
    return value if isinstance(value, str) else str(value["content"])


def _to_added_token(value: str | dict[str, Any]) -> AddedToken:
    """Return a token as a file describes it."""
    if isinstance(value, str):
        return AddedToken(value, normalized=False)
    return AddedToken(_token_text(value), **{name: bool(value[name]) for name in _FLAGS if name in value})
