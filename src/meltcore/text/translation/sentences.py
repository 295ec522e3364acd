"""Splits text into the sentences that a model translates one by one, and joins the translations again."""

from __future__ import annotations

import regex

from meltcore.common.visible import is_visible
from meltcore.text.languages import Language
from meltcore.text.translation.abbreviations import (
    ARABIC_INITIALS_AND_WORDS,
    ARABIC_TITLES,
    is_abbreviation,
    may_be_arabic_initial,
    plain_arabic,
)
from meltcore.text.translation.indic_sentences import indic_sentence_ends

_CLOSING_QUOTES = r"[\"'”’»)\]}]*"
# The full stop and question mark of Arabic letters always end a sentence, as dandas do; a mark that other uses have too
# does where a space follows.
_SENTENCE_END = regex.compile(rf"[।॥۔؟]+[।॥۔؟.!?]*{_CLOSING_QUOTES}|[.!?…]+{_CLOSING_QUOTES}(?=\s|$)")
_PERIODS = (".", "۔")
_LINE_BREAKS = regex.compile(r"\s*[\r\n]\s*|^\s+|\s+$")
_LAST_WORD = regex.compile(r"[\w\p{M}.-][\w\p{M}.'’-]*$")
_LOWERCASE_NEXT = regex.compile(r"\s*[\"'“‘(\[]*\p{Ll}")
_NUMBER_NEXT = regex.compile(r"\s+(?:Nos?\.\s*)?\p{N}")  # also "Ref. No. 12"
_NEXT_ALONE = regex.compile(r"\s*([\p{L}\p{M}]+)[.۔]")
_MAX_WORD_CHARS = 40  # of an abbreviation


def split_sentences(text: str, language: Language) -> tuple[list[str], list[str]]:
    """Return the sentences of a text, and the strings before, between and after them: one more string than sentences.

    Strings and sentences in turn, joined, are the text. A line break ends a sentence, and so does a period, also
    Urdu's. A period after an abbreviation, an initial or a list number does not end a sentence. In English and in
    Arabic letters, no mark ends a sentence before a small letter. Text without a visible character has no sentence.
    """
    sentences: list[str] = []
    separators: list[str] = []
    end = 0
    for line, before in _nonempty_lines(text):
        start = 0
        for stop in [*_sentence_ends(line, language), len(line)]:
            sentence = line[start:stop]
            stripped = sentence.strip()
            if not is_visible(stripped):
                continue
            lead = len(sentence) - len(sentence.lstrip())
            sentences.append(stripped)
            begin = before + start + lead
            separators.append(text[end:begin])
            end = begin + len(stripped)
            start = stop
    return sentences, [*separators, text[end:]]


def join_sentences(translations: list[str], separators: list[str]) -> str:
    """Return translations joined by the separators of `split_sentences`.

    Two sentences without a separator get a space between them.
    """
    before = [separators[0], *(separator or " " for separator in separators[1:-1])]
    if not translations:
        return separators[0]
    return "".join(part for pair in zip(before, translations, strict=True) for part in pair) + separators[-1]


def _nonempty_lines(text: str) -> list[tuple[str, int]]:
    """Return the lines that have text, each with the position of its start."""
    lines, start = [], 0
    for match in _LINE_BREAKS.finditer(text):
        lines.append((text[start : match.start()], start))
        start = match.end()
    lines.append((text[start:], start))
    return [(line, begin) for line, begin in lines if line]


def _sentence_ends(line: str, language: Language) -> list[int]:
    """Return the positions at which sentences of a line end."""
    if language.script not in ("Latin", "Arabic"):
        return indic_sentence_ends(line, language.text_code)
    ends, start, initial_end = [], 0, -1  # initial_end: of the initial or abbreviation just before
    for match in _SENTENCE_END.finditer(line):
        if match.group() in _PERIODS and _is_continued(line, match, start, initial_end, language):
            initial_end = match.end()
            continue
        if match.group()[0] in ".!?…" and _LOWERCASE_NEXT.match(line, match.end()):
            continue
        ends.append(match.end())
        start = match.end()
    return ends


def _is_continued(line: str, match: regex.Match[str], start: int, initial_end: int, language: Language) -> bool:
    """Return whether the sentence from `start` continues after this period.

    It continues if the period ends an abbreviation or a list number.
    """
    found = _LAST_WORD.search(line[max(start, match.start() - _MAX_WORD_CHARS) : match.start()])
    written = found.group() if found else ""
    word = plain_arabic(written)
    if word.isdecimal() and not line[start : match.start()].removesuffix(written).strip():
        return True  # a number of a list
    if word in ARABIC_INITIALS_AND_WORDS:
        is_behind = initial_end > start and line[initial_end : match.start()].strip() == written
        following = _NEXT_ALONE.match(line, match.end())
        return is_behind or (following is not None and may_be_arabic_initial(plain_arabic(following.group(1))))
    if word in ARABIC_TITLES and match.group() == ".":  # a whole word, which Urdu's own full stop does end
        return True
    is_before_number = _NUMBER_NEXT.match(line, match.end()) is not None
    is_known = is_abbreviation(word, language.text_code, is_before_number=is_before_number)
    return is_known or regex.fullmatch(r"(?:\p{L}\.)+\p{L}", word) is not None
