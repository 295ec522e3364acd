"""Converts between text and the ids of IndicTrans2: SentencePiece pieces that are looked up in the model's dictionary.

Layout of a checkpoint: model.SRC and model.TGT (SentencePiece models), dict.SRC.json and dict.TGT.json (ids by piece).
In fairseq's layout they are vocab/model.SRC and .TGT, and final_bin/dict.SRC.txt and .TGT.txt. The ids of SentencePiece
itself are not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol
from zlib import crc32

from meltcore.common.errors import ConfigError, RequestError
from meltcore.models.checkpoints.fairseq_config import DICTIONARY_FOLDER, TOKENIZER_FOLDER, read_dictionary
from meltcore.models.configs.json_file import read_json
from meltcore.text.languages import Language
from meltcore.text.translation.languages import TAGS

BOS_ID, PAD_ID, EOS_ID, UNK_ID = range(4)
FILES = ("model.SRC", "model.TGT", "dict.SRC.json", "dict.TGT.json")
FAIRSEQ_FILES = (
    *(f"{TOKENIZER_FOLDER}/{name}" for name in FILES[:2]),
    *(f"{DICTIONARY_FOLDER}/dict.{side}.txt" for side in ("SRC", "TGT")),
)
_SPECIAL_TOKENS = {"<s>": BOS_ID, "<pad>": PAD_ID, "</s>": EOS_ID, "<unk>": UNK_ID}
_WORD_START = "\u2581"


class TranslationTokenizer(Protocol):
    """Converts sentences to the ids of the encoder, and the ids of the decoder to sentences."""

    tags: frozenset[str]  # FLORES codes of the languages that it knows

    def encode(self, sentence: str, source: Language, target: Language) -> list[int]:
        """Return the ids of a preprocessed sentence: both language tags, its pieces, the end token."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of a translation, without special tokens."""
        ...


def check_tags(tags: frozenset[str], source: Language, target: Language) -> None:
    """Raise RequestError (400) if a language has no tag in `tags`."""
    for param, language in (("src_lang", source), ("tgt_lang", target)):
        if language.code not in tags:
            known = ", ".join(sorted(tags))
            raise RequestError(f"{param} {language.code} is not in this model's vocabulary: {known}", param=param)


class SentencePieceTokenizer:
    """The tokenizer of a published checkpoint."""

    def __init__(self, folder: Path, source_vocab_size: int, target_vocab_size: int) -> None:
        """Read the four files in `folder`. The vocabulary sizes must be the sizes of the model's embeddings.

        Raises ConfigError for a missing or invalid file, and for an id beyond the model's vocabulary.
        """
        files = FAIRSEQ_FILES if (folder / DICTIONARY_FOLDER).is_dir() else FILES
        missing = [name for name in files if not (folder / name).is_file()]
        if missing:
            raise ConfigError(f"{folder} lacks {', '.join(missing)}: files of the published tokenizer")
        source_model, target_model, source_dictionary, target_dictionary = (folder / name for name in files)
        self._source_ids = _read_dictionary(source_dictionary, source_vocab_size)
        target_ids = _read_dictionary(target_dictionary, target_vocab_size)
        self._target_pieces = {token_id: piece for piece, token_id in target_ids.items()}
        self._model = _load_model(source_model)
        _load_model(target_model)  # decoding joins pieces and does not need it; a broken file is an error still
        self.tags = TAGS & self._source_ids.keys()
        if not self.tags:
            raise ConfigError(f"{source_dictionary} has no language tag such as eng_Latn")

    def encode(self, sentence: str, source: Language, target: Language) -> list[int]:
        """Return the ids of a preprocessed sentence: both language tags, its pieces, the end token.

        A piece outside the dictionary is the unknown token. Raises RequestError for a language without a tag.
        """
        check_tags(self.tags, source, target)
        pieces = self._model.encode(sentence, out_type=str)
        ids = [self._source_ids.get(piece, UNK_ID) for piece in pieces]
        return [self._source_ids[source.code], self._source_ids[target.code], *ids, EOS_ID]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of a translation. Special tokens, and ids outside the dictionary, have no text."""
        pieces = (self._target_pieces.get(token_id, "") for token_id in token_ids if token_id > UNK_ID)
        return "".join(pieces).replace(_WORD_START, " ").strip()


class SyntheticTokenizer:
    """Makes ids for dummy weights, which have no tokenizer: one id per piece of at most 3 characters of a word.

    So a token has about 2.5 characters of any script, as in real vocabularies. The decoded texts mean nothing.
    """

    _FIRST_PIECE_ID = UNK_ID + 1 + len(TAGS)
    _PIECE_CHARS = 3

    def __init__(self, source_vocab_size: int) -> None:
        """Store the vocabulary size. Raises ConfigError if it leaves no id beside the ids of the language tags."""
        needed = self._FIRST_PIECE_ID + 1
        if source_vocab_size < needed:
            raise ConfigError(f"a synthetic tokenizer needs encoder_vocab_size {needed}; got {source_vocab_size}")
        self.tags = TAGS
        self._num_pieces = source_vocab_size - self._FIRST_PIECE_ID
        self._tag_ids = {tag: UNK_ID + 1 + i for i, tag in enumerate(sorted(TAGS))}

    def encode(self, sentence: str, source: Language, target: Language) -> list[int]:
        """Return the ids of a sentence: both language tags, its pieces, the end token."""
        size = self._PIECE_CHARS
        pieces = [word[start : start + size] for word in sentence.split() for start in range(0, len(word), size)]
        text_ids = [self._FIRST_PIECE_ID + crc32(piece.encode()) % self._num_pieces for piece in pieces]
        return [self._tag_ids[source.code], self._tag_ids[target.code], *text_ids, EOS_ID]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return a text with one word per id, like "t300 t7"."""
        return " ".join(f"t{token_id}" for token_id in token_ids if token_id > UNK_ID)


def _read_dictionary(path: Path, vocab_size: int) -> dict[str, int]:
    """Read the ids by piece. Raises ConfigError for an invalid file and for ids that the model does not have."""
    dictionary = read_json(path) if path.suffix == ".json" else read_dictionary(path)
    for piece, token_id in dictionary.items():
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise ConfigError(
                f"{path}: {piece!r} has the id {token_id!r}; the model has ids from 0 to {vocab_size - 1}"
            )
    for piece, expected_id in _SPECIAL_TOKENS.items():
        if dictionary.get(piece) != expected_id:
            raise ConfigError(f"{path}: {piece} must have the id {expected_id}; it has {dictionary.get(piece)}")
    return dictionary


def _load_model(path: Path) -> Any:
    """Load a SentencePiece model. Raises ConfigError for an invalid file."""
    from sentencepiece import SentencePieceProcessor

    try:
        model = SentencePieceProcessor(model_file=str(path))
        model.IdToPiece(list(range(model.vocab_size())))  # a piece may be no UTF-8 text
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is not a SentencePiece model: {str(error).splitlines()[0]}") from error
    return model
