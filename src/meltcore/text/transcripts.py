"""Builds transcripts of whole files: words with times, subtitles, and the names of a transcriber's languages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from meltcore.common.errors import RequestError
from meltcore.protocol.transcription import Word
from meltcore.text.languages import code_among

SubtitleFormat = Literal["srt", "vtt"]
# A segment ends where a pause is this long, or the segment itself, as subtitles are read.
_PAUSE_S, _SEGMENT_S = 0.6, 6.0


class SpokenWord(NamedTuple):
    """A word, its times in seconds from the beginning of the file, and its token ids in the language.

    `logprob` is the log-probability of all its tokens together. `no_token_logprob` is the log-probability that none of
    its frames has a token.
    """

    text: str
    start_s: float
    end_s: float
    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0
    no_token_logprob: float = 0.0


class Transcription(NamedTuple):
    """The words of a whole file, its duration in seconds, and the model's name of its language."""

    words: list[SpokenWord]
    duration_s: float
    language: str

    @property
    def text(self) -> str:
        """All words, joined by spaces."""
        return join_words(self.words)

    def segments(self) -> list[list[SpokenWord]]:
        """Return the words in segments.

        A segment ends at a pause, or before it is too long to be read as a subtitle.
        """
        segments: list[list[SpokenWord]] = []
        for word in self.words:
            segment = segments[-1] if segments else []
            is_new = not segment or word.start_s - segment[-1].end_s >= _PAUSE_S
            if is_new or word.end_s - segment[0].start_s > _SEGMENT_S:
                segments.append([])
            segments[-1].append(word)
        return segments

    def subtitles(self, format_name: SubtitleFormat) -> str:
        """Return the segments as the content of a subtitle file."""
        is_vtt = format_name == "vtt"
        mark = "." if is_vtt else ","
        blocks = ["WEBVTT\n"] if is_vtt else []
        for number, segment in enumerate(self.segments(), 1):
            times = f"{_format_clock(segment[0].start_s, mark)} --> {_format_clock(segment[-1].end_s, mark)}"
            text = join_words(segment)
            blocks.append(f"{times}\n{text}\n" if is_vtt else f"{number}\n{times}\n{text}\n")
        return "\n".join(blocks)


def place_words(start_s: float, words: Iterable[Word]) -> list[SpokenWord]:
    """Return the words of a clip that begins at `start_s`, with their times in the file."""
    return [
        SpokenWord(
            word.text,
            round(start_s + word.start_s, 3),
            round(start_s + word.end_s, 3),
            word.token_ids,
            word.logprob,
            word.no_token_logprob,
        )
        for word in words
    ]


def model_language(name: str | None, languages: Sequence[str]) -> str:
    """Return the model's code of a language. `name` is a code, an English name or a FLORES code, in any case.

    Raises RequestError (400) for a language that the model does not have. Raises it also if `name` is None, since the
    model does not detect languages.
    """
    known = ", ".join(languages)
    if name is None:
        raise RequestError(f"language is required: the model does not detect it; it has {known}", param="language")
    code = code_among(name, languages)
    if code is None:
        raise RequestError(f"language {name[:60]!r} is not one of the model's: {known}", param="language")
    return code


def join_words(words: Iterable[SpokenWord]) -> str:
    """Return the words with spaces between them."""
    return " ".join(word.text for word in words)


def _format_clock(seconds: float, mark: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, milliseconds = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{milliseconds // 1000:02}{mark}{milliseconds % 1000:03}"
