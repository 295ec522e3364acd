"""Text to token ids and back, through the `tokenizers` library and a checkpoint's tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from meltcore.errors import ConfigError

BYTE_COUNT = 256
LONG_TOKENS = 1024


def byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in a byte-level vocabulary, mapped to the byte.

    GPT-2's table: printable Latin-1 bytes stand for themselves, the other 68 take the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [byte for byte in range(BYTE_COUNT) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(BYTE_COUNT + n): byte for n, byte in enumerate(shifted)}


_ALPHABET = byte_alphabet()


class Tokenizer:
    """A checkpoint's tokenizer. `synthetic` marks the made-up one of a dummy model that has none."""

    def __init__(self, raw: tokenizers.Tokenizer, *, synthetic: bool = False) -> None:
        self._raw = raw
        self.synthetic = synthetic
        raw.no_truncation()  # a tokenizer.json may ask for it; a prompt is never cut here, only refused
        raw.no_padding()
        self.vocab_size: int = raw.get_vocab_size(with_added_tokens=True)
        added = raw.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.is_byte_level = _is_byte_level(raw)
        self._pieces: dict[int, bytes] = {}

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Read `folder/tokenizer.json`. Raises ConfigError where it is missing or broken."""
        path = folder / "tokenizer.json"
        if not path.exists():
            raise ConfigError(f"{folder} has no tokenizer.json")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises bare Exception for every parse error
            raise ConfigError(f"{path} cannot be read: {error}") from error

    @classmethod
    def synthetic_bytes(cls, vocab_size: int) -> Tokenizer:
        """A byte-level tokenizer for a model that has none: id n is byte n up to 255, the rest are words like " t300".

        Encoding gives one token a byte, so lengths of prompts are easy to predict; every id decodes to some text.
        """
        if vocab_size < BYTE_COUNT:
            raise ConfigError(f"a synthetic tokenizer needs a vocabulary of at least {BYTE_COUNT}; got {vocab_size}")
        vocab = dict(_ALPHABET) | {f"Ġt{token_id}": token_id for token_id in range(BYTE_COUNT, vocab_size)}
        raw = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        raw.decoder = decoders.ByteLevel()
        return cls(raw, synthetic=True)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`; `add_special_tokens` adds what the tokenizer's post-processor adds (a BOS, say)."""
        # Not `encode`: it holds the GIL for as long as it takes (tokenizers 0.23, seconds for a megabyte), and it
        # computes character offsets that nobody here reads.
        encoded = self._raw.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoded[0].ids
        return ids

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`. Ids beyond the vocabulary (padding rows of an embedding) have no text."""
        text: str
        # `decode` holds Python's lock, `decode_batch` does not; of a few tokens it costs twice as much.
        if len(token_ids) > LONG_TOKENS:
            [text] = self._raw.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        else:
            text = self._raw.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_id(self, token: str) -> int | None:
        """The id of a token by its text in the vocabulary; None where there is none."""
        found: int | None = self._raw.token_to_id(token)
        return found

    def piece(self, token_id: int) -> bytes:
        """The bytes one token stands for, alone. Joined and decoded they give the text of a byte-level vocabulary."""
        found = self._pieces.get(token_id)
        if found is None:
            found = self._pieces[token_id] = self._find_piece(token_id)
        return found

    def _find_piece(self, token_id: int) -> bytes:
        token = self._raw.id_to_token(token_id)
        if token is None:
            return b""
        if not self.is_byte_level:
            return self.decode([token_id], skip_special_tokens=False).encode()
        try:
            return bytes([_ALPHABET[char] for char in token])
        except KeyError:  # an added token with a character outside the alphabet is taken as plain text
            return token.encode()


def _is_byte_level(raw: tokenizers.Tokenizer) -> bool:
    if raw.decoder is None:
        return False
    state = json.loads(raw.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    return [step["type"] for step in steps] == ["ByteLevel"]
