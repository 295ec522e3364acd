"""Normalizes Urdu, and Kashmiri and Sindhi in Arabic letters, as urduhack's functions in indic-nlp-library-itt do."""

from __future__ import annotations

import unicodedata
from functools import cache

import regex

_PUNCTUATION = "\u060c\u061b\u061f\u066a\u066b\u06d4"
_DIACRITICS = "\u064b\u064d-\u0650\u0670"
# The letters, digits and signs of Urdu as a character class
_URDU = (
    r"\u0600-\u0603\u060c-\u0615\u061b\u061f\u0621-\u0624\u0626-\u0628\u062a-\u063a\u0641\u0642\u0644-\u0646\u0648"
    r"\u064b-\u0654\u0656-\u0658\u066a-\u066c\u0670\u0679\u067e\u0686\u0688\u0691\u0698\u06a9\u06af\u06ba\u06be"
    r"\u06c1-\u06c3\u06cc\u06d2-\u06d4\u06f0-\u06f9"
)
_HAMZA = "\u0621"
# Arabic letters that Urdu writes with others
_LETTERS = {"\u0643": "\u06a9", "\u0647": "\u06c1", "\u0629": "\u06c3", "\u0649": "\u06cc", "\u064a": "\u06cc"}
_TATWEEL = "\u0640"
# Letters whose presentation forms become the letter itself, and the forms that do not (oddity "kept-forms")
_PLAIN_LETTERS = (
    "\u0621-\u0624\u0626-\u0628\u062a-\u063a\u0641\u0642\u0644-\u0646\u0648\u0679\u067e\u0686\u0688\u0691\u0698\u06a9\u06af"
    "\u06ba\u06be\u06c1\u06cc\u06d2"
)
_KEPT_FORMS = frozenset("\ufb57\ufb8a\ufe84\ufe86\ufe89\ufe8a\ufe99\ufea5\ufec1\ufec2\ufec6\ufece")
_LAM_ALEF = "\u0644\u0627"
# Forms of an Arabic letter that become another letter than the one they are forms of
_OTHER_FORMS = {
    "\ufedb": "\u06a9", "\ufeeb": "\u06be", "\ufeec": "\u06be", "\ufee9": "\u06c1", "\ufeea": "\u06c1",
    "\ufef0": "\u06cc", "\ufef1": "\u06cc", "\ufef2": "\u06cc", "\ufef3": "\u06d2", "\ufef4": "\u06d2",
}  # fmt: skip
_PAIRS = (("\u0627\u0653", "\u0622"), ("\u0627\u0654", "\u0623"), ("\u06d2\u0654", "\u06d3"))

_IGNORE_CASE = regex.IGNORECASE  # its only effect: the Kelvin sign and the long s count as letters a to z
_MARK = rf"{_PUNCTUATION}!-/:-@\[\]-`{{-~"  # ASCII without the backslash, as in indic_scripts
_SPACE = regex.compile(r"\s+")
_DIACRITIC = regex.compile(f"[{_DIACRITICS}]")
_BOUNDARIES = tuple(
    regex.compile(pattern, _IGNORE_CASE)
    for pattern in (
        rf"(?<=[{_URDU}])(?=[0-9])",
        rf"(?<=[0-9])(?!{_HAMZA})(?=[{_URDU}])",
        rf"(?<=[{_URDU}])(?=[{_MARK}])",
        rf"(?<=[{_MARK}])(?=[^{_MARK}0-9 \n])",
        rf"(?<=[{_URDU}])(?=[a-zA-Z])",
        rf"(?<=[a-zA-Z])(?=[{_URDU}])",
    )
)


@cache
def _letter_table() -> dict[int, str]:
    """Return the replacement of each character. Other forms of letters, and Arabic letters, become Urdu's letters."""
    plain = regex.compile(f"[{_PLAIN_LETTERS}]")
    table = {ord(letter): other for letter, other in {**_LETTERS, **_OTHER_FORMS, _TATWEEL: ""}.items()}
    table |= {0x0660 + digit: chr(0x06F0 + digit) for digit in range(10)}
    for form in map(chr, [*range(0xFB50, 0xFE00), *range(0xFE70, 0xFF00)]):
        letter = unicodedata.normalize("NFKC", form)
        is_form = bool(plain.fullmatch(letter)) or letter == _LAM_ALEF
        if letter != form and is_form and form not in _KEPT_FORMS and ord(form) not in table:
            table[ord(form)] = letter
    return table


def normalize_perso_arabic(text: str) -> str:
    """Return `text` with Urdu's letters and without short vowels.

    Spaces separate Urdu text from punctuation marks, digits and Latin words.
    """
    text = _DIACRITIC.sub("", _SPACE.sub(" ", text).strip())
    text = text.translate(_letter_table())
    for pair, letter in _PAIRS:
        text = text.replace(pair, letter)
    for boundary in _BOUNDARIES:
        text = boundary.sub(" ", text)
    return text
