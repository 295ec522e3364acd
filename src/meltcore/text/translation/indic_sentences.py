"""Finds the ends of sentences of Indian languages by the rules of indic-nlp-library 0.92, as IndicTrans2's code does.

If the line has a danda and the language writes dandas, a period ends no sentence. No mark ends a sentence after a
digit. A word that is alone before a period belongs to the sentences around it, as initials and abbreviations do.

The library differs in five ways. It separates marks in a row, and closing quotation marks, from their sentence. It
knows fewer titles. It loses an initial after a word that is alone. It joins such words without a limit, while lines are
split here from 500 characters on. It cuts addresses and file names in Latin letters at their marks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import NamedTuple

import regex

from meltcore.text.translation.abbreviations import is_abbreviation

_WITH_DANDA = frozenset(["as", "bn", "hi", "ne", "or", "pa"])
_DANDAS = regex.compile(r"[।॥]")
_CLOSING_QUOTES = r"[\"'”’»)\]}]*"
_MARKS = r"?!।॥"
_MORE_MARKS = rf"{_MARKS}.\uaaf0\uaaf1\uabeb-\uabef᱾᱿"  # of Meetei Mayek and Ol Chiki, and a period
_END, _END_WITHOUT_DANDA = (regex.compile(rf"([{marks}]+){_CLOSING_QUOTES}") for marks in (_MARKS, _MORE_MARKS))
# A mark inside example.com, form?lang=hi or report.pdf. Sentences of an Indian script that touch are still two.
_MARK_INSIDE_WORD = regex.compile(r"(?<=[a-zA-Z\d/_=&%#@~+-])[.?!]+(?=[a-zA-Z\d/_=&%#@~+-])")
_LAST_WORD = regex.compile(r"[\w\p{M}][\w\p{M}\u200c\u200d'’-]*$")  # Assamese writes গ'ল
_NUMBER_NEXT = regex.compile(r"\s*\p{N}")
_MAX_WORD_CHARS = 40  # of an abbreviation
_MAX_MERGED_CHARS = 500  # about half of the tokens that a model reads


class _Stop(NamedTuple):
    """Marks the position at which a sentence may end, and the position at which the following text begins."""

    start: int
    marks: str
    end: int


def indic_sentence_ends(line: str, text_code: str) -> list[int]:
    """Return the positions at which sentences of a line end, by the rules of the Language with this `text_code`."""
    has_danda = text_code in _WITH_DANDA and _DANDAS.search(line) is not None
    found = (_END if has_danda else _END_WITHOUT_DANDA).finditer(line)
    stops = [_Stop(each.start(), each.group(1), each.end()) for each in found]
    stops = [each for each in stops if len(each.marks) > 1 or not line[each.start - 1 : each.start].isnumeric()]
    stops = [each for each in stops if not _MARK_INSIDE_WORD.match(line, each.start)]
    if has_danda:
        return [each.end for each in stops]
    ends, start, possible = [], 0, [each.end for each in stops]
    for end in [*_merge_ends(line, stops, text_code), len(line)]:
        if end - start > _MAX_MERGED_CHARS:
            inner = range(bisect_right(possible, start), bisect_left(possible, end))
            ends += [possible[index] for index in inner if line[possible[index]].isspace()]
        ends.append(end)
        start = end
    return ends


def _merge_ends(line: str, stops: list[_Stop], text_code: str) -> Iterator[int]:
    """Yield the sentence ends that remain after merging.

    Abbreviations, and words that are alone before a period, belong to the sentences around them.
    """
    start, last = 0, 0  # last: the end before this part, which stays unless the part joins
    is_open, is_closed = False, True  # whether the next part joins, and whether no word alone does
    for stop in [*stops, _Stop(len(line), "", len(line))]:
        words = line[start : stop.start].split()
        if words:
            has_period = stop.marks.startswith(".") and not line[stop.start - 1].isspace()
            is_alone = len(words) == 1 and (has_period or words[0].endswith("."))
            if last and not is_open and (is_closed or not is_alone):
                yield last
            if is_alone or stop.marks.endswith("..") or _ends_in_abbreviation(line, stop, text_code):
                is_open, is_closed = True, False
            else:
                is_open, is_closed = False, is_open
        start = last = stop.end


def _ends_in_abbreviation(line: str, stop: _Stop, text_code: str) -> bool:
    word = _LAST_WORD.search(line[max(0, stop.start - _MAX_WORD_CHARS) : stop.start])
    if stop.marks != "." or word is None:
        return False
    return is_abbreviation(word.group(), text_code, is_before_number=_NUMBER_NEXT.match(line, stop.end) is not None)
