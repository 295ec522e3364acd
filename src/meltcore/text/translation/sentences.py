"""Splits text into the sentences that a model translates one by one, and puts translations in their places."""

from __future__ import annotations

from functools import cache

import regex

from meltcore.text.languages import Language
from meltcore.text.translation.indic_scripts import transliterate

_CLOSING = r"[\"'”’»)\]}]*"
# Danda, double danda, and the full stops and question marks of Arabic letters, Ol Chiki and Meetei Mayek always end a
# sentence; a mark that other uses have too does where a space follows.
_SENTENCE_END = regex.compile(rf"[।॥۔؟᱾᱿꯫]+[।॥۔؟᱾᱿꯫.!?]*{_CLOSING}|[.!?…]+{_CLOSING}(?=\s|$)")
_LINE_BREAKS = regex.compile(r"\s*[\r\n]\s*|^\s+|\s+$")
_LAST_WORD = regex.compile(r"[\w\p{M}.-]*$")
_LOWERCASE_NEXT = regex.compile(r"\s*[\"'“‘(\[]*\p{Ll}")
_MAX_WORD_CHARS = 40  # of an abbreviation
# Titles and units of Indian languages, in Devanagari, whose period ends no sentence
_INDIC_ABBREVIATIONS = frozenset(["डॉ", "श्री", "श्रीमती", "प्रो", "रु", "रू", "स्व", "कु", "चि", "सौ", "कि", "मी"])


def split_sentences(text: str, language: Language) -> tuple[list[str], list[str]]:
    """Return the sentences of a text, and what is before, between and after them: one string more than sentences.

    Joined in turn they are the text. A line break ends a sentence. A period does not after an abbreviation, an initial
    or a list number, nor any mark before a small letter. Empty text has no sentence.
    """
    sentences: list[str] = []
    separators: list[str] = []
    end = 0
    for line, before in _lines(text):
        start = 0
        for stop in [*_ends(line, language), len(line)]:
            sentence = line[start:stop]
            stripped = sentence.strip()
            if not stripped:
                continue
            lead = len(sentence) - len(sentence.lstrip())
            sentences.append(stripped)
            begin = before + start + lead
            separators.append(text[end:begin])
            end = begin + len(stripped)
            start = stop
    return sentences, [*separators, text[end:]]


def join_sentences(translations: list[str], separators: list[str]) -> str:
    """Return translations with the separators of `split_sentences`, and a space where two sentences had none."""
    before = [separators[0], *(separator or " " for separator in separators[1:-1])]
    if not translations:
        return separators[0]
    return "".join(part for pair in zip(before, translations, strict=True) for part in pair) + separators[-1]


def _lines(text: str) -> list[tuple[str, int]]:
    """Return the lines with text and where each begins."""
    lines, start = [], 0
    for match in _LINE_BREAKS.finditer(text):
        lines.append((text[start : match.start()], start))
        start = match.end()
    lines.append((text[start:], start))
    return [(line, begin) for line, begin in lines if line]


def _ends(line: str, language: Language) -> list[int]:
    """Return where sentences of a line end."""
    ends, start = [], 0
    for match in _SENTENCE_END.finditer(line):
        if match.group() == ".":
            word = _LAST_WORD.search(line[max(start, match.start() - _MAX_WORD_CHARS) : match.start()])
            before = word.group() if word else ""
            is_first = not line[start : match.start()].removesuffix(before).strip()
            if _keeps_sentence(before, is_first, language):
                continue
        if match.group()[0] in ".!?…" and _LOWERCASE_NEXT.match(line, match.end()):
            continue
        ends.append(match.end())
        start = match.end()
    return ends


def _keeps_sentence(word: str, is_first: bool, language: Language) -> bool:
    """Return whether a period after `word` belongs to it. is_first: the sentence begins with the word."""
    if is_first and word.isdecimal():
        return True  # of a list
    if len(word) == 1:
        return word.isalpha()  # an initial
    if language.text_code == "en":
        return word in _english_abbreviations() or regex.fullmatch(r"(?:\p{L}\.)+\p{L}", word) is not None
    return transliterate(word, language.text_code, "hi") in _INDIC_ABBREVIATIONS


@cache
def _english_abbreviations() -> frozenset[str]:
    """Return Moses' abbreviations, after which a sentence goes on as a rule. Imported here: it takes 0.2 s."""
    from sacremoses.corpus import NonbreakingPrefixes

    return frozenset(NonbreakingPrefixes().words("en"))
