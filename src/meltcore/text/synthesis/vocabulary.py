"""Turns text into the characters that IndicF5 reads, and characters into ids, as F5-TTS does."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from meltcore.common.errors import ConfigError, RequestError
from meltcore.models.checkpoints.checkpoint import Checkpoint
from meltcore.models.configs.config_fields import Fields

# Of the published vocabulary
_PUBLISHED_SIZE = 2545
_FILES = ("vocab.txt", "checkpoints/vocab.txt")
_UNKNOWN = 0  # the id of the space too
_REPLACED_CHARACTERS = str.maketrans({";": ",", "“": '"', "”": '"', "‘": "'", "’": "'"})
_CHINESE = re.compile("[\u3100-\u9fff]")
# A run of ASCII that the published segmentation may keep together, and what it keeps together within one.
_ASCII_RUNS = re.compile(r"[a-zA-Z0-9+#&._%-]+")
_WORDS = re.compile(r"([a-zA-Z0-9]+(?:\.\d+)?%?)")
_NO_SPACE_AFTER = " :'\""


def characters(text: str) -> list[str]:
    """Return the characters of a text that the model reads. Some quotation marks are replaced.

    A word of ASCII gets a space before it, unless it follows a space, colon or quotation mark. F5-TTS cuts text with
    jieba; without Chinese text and without the words AT&T and C++ of jieba's dictionary, only this rule remains. Raises
    RequestError for Chinese characters, which the model reads as pinyin.
    """
    found: list[str] = []
    text = text.translate(_REPLACED_CHARACTERS)
    if match := _CHINESE.search(text):
        raise RequestError(f"the text has {match[0]!r}: Chinese characters are not supported", param="input")
    end = 0
    for run in _ASCII_RUNS.finditer(text):
        found += text[end : run.start()]
        for word in filter(None, _WORDS.split(run[0])):
            if len(word) > 1 and found and found[-1] not in _NO_SPACE_AFTER:
                found.append(" ")
            found += word
        end = run.end()
    return found + list(text[end:])


class Vocabulary:
    """The ids of characters. A character outside the vocabulary is read as a space."""

    def __init__(self, ids: Mapping[str, int] | None, size: int) -> None:
        """Store the ids, which are from 0 to size - 1.

        Without `ids`, characters get arbitrary ids, for random weights.
        """
        self._ids, self.size = ids, size

    @property
    def is_synthetic(self) -> bool:
        """Whether characters have no meaning to the model."""
        return self._ids is None

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, from 1 on: 0 is the model's filler. Raises RequestError as `characters`."""
        if self._ids is None:
            return [ord(character) % self.size + 1 for character in characters(text)]
        return [self._ids.get(character, _UNKNOWN) + 1 for character in characters(text)]


def load_vocabulary(checkpoint: Checkpoint, *, is_dummy: bool) -> Vocabulary:
    """Read vocab.txt, which has one character or syllable per line. The line number, from 0, is the id.

    Raises ConfigError if the file is missing or unreadable, or if it does not begin with a space.
    """
    path = _find_file(checkpoint)
    if path is None:
        if is_dummy:
            return Vocabulary(None, _PUBLISHED_SIZE)
        raise ConfigError(f"{checkpoint.folder} has no vocabulary: {' or '.join(_FILES)}")
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    ids = {line: number for number, line in enumerate(lines)}
    if ids.get(" ") != _UNKNOWN:
        raise ConfigError(f"{path}: its first line must be a space; it is {lines[0][:20]!r}")
    if len(ids) != len(lines):
        raise ConfigError(f"{path} has {len(lines)} lines, of which {len(lines) - len(ids)} repeat another")
    return Vocabulary(ids, len(ids))


def _find_file(checkpoint: Checkpoint) -> Path | None:
    named = Fields(checkpoint.config).optional("vocab_path")
    for name in (named, *_FILES):
        if name is not None and (checkpoint.folder / name).is_file():
            return checkpoint.folder / name
    return None
