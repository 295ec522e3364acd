"""Cuts a text into chunks that are spoken one by one, and computes the length of each, as IndicF5 does."""

from __future__ import annotations

import re
from typing import NamedTuple

from meltcore.common.errors import RequestError
from meltcore.common.visible import is_visible
from meltcore.text.synthesis.vocabulary import Vocabulary

# A chunk and its reference together: what the model was trained on.
MAX_SPEECH_S = 25.0
MAX_REFERENCE_S = 15.0
MAX_TEXT = 10_000
_MAX_REFERENCE_TEXT = 1000
# Slower references make chunks of a few letters.
_MIN_LETTERS_PER_S = 1.0
# Where the published code cuts, if a space follows; a danda, which ends sentences of India's languages, is added.
_PART_END = re.compile(r"(?<=[;:,.!?।॥۔])\s+")
_SPACES = re.compile(r"\s+")
_SURROGATES = re.compile("[\ud800-\udfff]")


class ReferenceText(NamedTuple):
    """The text of a reference with the ending that the model expects, its ids, and the reference's frames and rate.

    `frames` is the number of frames in `seconds`, without the frame that a centered transform adds.
    """

    text: str
    token_ids: list[int]
    frames: int
    seconds: float

    @classmethod
    def read(cls, text: str, vocabulary: Vocabulary, *, frames: int, seconds: float) -> ReferenceText:
        """Complete the reference's text. Raises RequestError if a reference of this length cannot contain the text."""
        text = _SPACES.sub(" ", text).strip()
        if not is_visible(text) or len(text) > _MAX_REFERENCE_TEXT:
            raise RequestError(
                f"reference_text must have 1 to {_MAX_REFERENCE_TEXT} characters, those spoken in the reference; "
                f"it has {len(text)}",
                param="reference_text",
            )
        _check_characters(text, "reference_text")
        # A period after any other mark too, and a second space, as in training.
        text = f"{text.removesuffix('.')}.  "
        token_ids = vocabulary.encode(text)
        if len(token_ids) > frames or len(text) < _MIN_LETTERS_PER_S * seconds:
            raise RequestError(
                f"reference_text has {len(text)} characters for {seconds:.1f} s of speech; "
                f"it must be the words of the reference, {_MIN_LETTERS_PER_S * seconds:.0f} to {frames} characters",
                param="reference_text",
            )
        return cls(text, token_ids, frames, seconds)


class TextChunk(NamedTuple):
    """A part of a text: its ids after the reference's ids, and the frames of reference and speech together."""

    text: str
    token_ids: list[int]
    frames: int


def plan_chunks(
    text: str, reference: ReferenceText, vocabulary: Vocabulary, *, speed: float, max_speech_s: float = MAX_SPEECH_S
) -> list[TextChunk]:
    """Return the chunks of a text. A chunk is spoken at the rate of the reference, in bytes of UTF-8 per second.

    A `speed` of 2 is twice as fast. A chunk and the reference together last at most `max_speech_s`. Raises RequestError
    for empty text, for text that is too long, and for Chinese.
    """
    if len(text) > MAX_TEXT:
        raise RequestError(f"the text has {len(text):,} characters; the limit is {MAX_TEXT:,}", param="input")
    if not is_visible(text := text.strip()):
        raise RequestError("the text is empty: it has no visible character", param="input")
    _check_characters(text, "input")
    frames_per_s = reference.frames / reference.seconds
    reference_bytes = len(reference.text.encode())
    # The published rule measures the reference's text before it gets its second space.
    bytes_per_s = (reference_bytes - 1) / reference.seconds
    max_bytes = int(bytes_per_s * (max_speech_s - reference.seconds) * speed)
    # A frame holds a character; one may become two, with a space before it.
    max_characters = (int(max_speech_s * frames_per_s) - len(reference.token_ids) - 2) // 2
    chunks = []
    for part in split_text(text, max(1, min(max_bytes, max_characters))):
        token_ids = reference.token_ids + vocabulary.encode(part)
        spoken = int(reference.frames / reference_bytes * len(part.encode()) / speed)
        # At least one frame more than the characters and the reference's spectrogram, which has one frame more.
        frames = max(reference.frames + spoken, len(token_ids) + 1, reference.frames + 2)
        chunks.append(TextChunk(part, token_ids, frames))
    return chunks


def _check_characters(text: str, param: str) -> None:
    if _SURROGATES.search(text):
        raise RequestError(f"{param} has half of a surrogate pair, which is no character", param=param)


def split_text(text: str, max_bytes: int) -> list[str]:
    """Join the parts between punctuation marks to chunks of at most `max_bytes` of UTF-8, or of one character.

    A part that is too long is cut between words, and a word that is too long is cut between characters.
    """
    chunks: list[str] = []
    current_chunk = ""
    for part in (piece for whole in _PART_END.split(text) for piece in _fitting_pieces(whole, max_bytes)):
        if current_chunk and len(current_chunk.encode()) + len(part.encode()) > max_bytes:
            chunks.append(current_chunk.strip())
            current_chunk = ""
        current_chunk += f"{part} "
    # Nothing is spoken of a part without a visible character.
    return [chunk for chunk in [*chunks, current_chunk.strip()] if is_visible(chunk)]


def _fitting_pieces(part: str, max_bytes: int) -> list[str]:
    """Return a part in pieces of at most `max_bytes`. A single character may be longer."""
    if len(part.encode()) <= max_bytes:
        return [part] if part else []
    pieces: list[str] = []
    for word in _SPACES.split(part):
        for piece in _split_letters(word, max_bytes):
            if pieces and len(f"{pieces[-1]} {piece}".encode()) <= max_bytes:
                pieces[-1] += f" {piece}"
            else:
                pieces.append(piece)
    return pieces


def _split_letters(word: str, max_bytes: int) -> list[str]:
    pieces: list[str] = []
    size = max_bytes
    for character in word:
        if size + len(character.encode()) > max_bytes:
            pieces.append("")
            size = 0
        pieces[-1] += character
        size += len(character.encode())
    return pieces
