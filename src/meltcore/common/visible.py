"""Tells whether a text shows anything. Texts that show nothing are not sent to a model."""

from __future__ import annotations

import unicodedata

# Fillers of Hangul and Khmer, the empty pattern of Braille, the place of an object that a copy of a page leaves, and an
# empty note, which Unicode counts as letters and symbols
_BLANK = frozenset("\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0\ufffc\U0001d159")
# Controls, formats such as joiners and the byte order mark, what is no character or none yet, surrogates, marks without
# a letter, and separators
_INVISIBLE_CATEGORIES = frozenset(["Cc", "Cf", "Cn", "Cs", "Mc", "Me", "Mn", "Zl", "Zp", "Zs"])


def is_visible(text: str) -> bool:
    """Return whether a text has a visible character. Combining marks alone are not visible."""
    return any(
        unicodedata.category(character) not in _INVISIBLE_CATEGORIES and character not in _BLANK for character in text
    )
