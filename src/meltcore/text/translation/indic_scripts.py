"""Normalizes, splits, transliterates and rejoins text in the scripts of India, as indic-nlp-library-itt 0.1.1 does.

The Unicode blocks of scripts that descend from Brahmi have the same order, so that one offset is the same sound in all
of them. Faults of the library are reproduced, because the published models are used with its output. ODDITIES names
these faults.
"""

from __future__ import annotations

from functools import cache
from typing import Literal, NamedTuple

import regex

from meltcore.text.translation.perso_arabic import normalize_perso_arabic

# "itt": indic-nlp-library-itt 0.1.1, which IndicTransToolkit uses; "original": indic-nlp-library 0.92, which it comes
# from, without the oddities "literal-nukta" and "ascii-visarga".
Normalizer = Literal["itt", "original"]

_VIRAMA, _DANDA, _DOUBLE_DANDA = "\u094d", "\u0964", "\u0965"
# The first code point of the block of each text code. English and Perso-Arabic languages have none.
_BLOCKS = {
    "hi": 0x0900, "mr": 0x0900, "kK": 0x0900, "ne": 0x0900, "bn": 0x0980, "as": 0x0980, "pa": 0x0A00, "gu": 0x0A80,
    "or": 0x0B00, "ta": 0x0B80, "te": 0x0C00, "kn": 0x0C80, "ml": 0x0D00,
}  # fmt: skip
_LAST_SHARED_OFFSET = 0x6F

# Characters that all scripts replace, in this order. The first ones are invisible.
_COMMON_REPLACEMENTS = (
    ("\ufeff", ""), ("\ufffe", ""), ("\u2060", ""), ("\u00ad", ""), ("\u200b", " "), ("\u00a0", " "), ("\u200c", ""),
    ("\u200d", ""),
)  # fmt: skip
_QUOTES_AND_DASHES = (
    ("\ufeff", ""), ("„", '"'), ("“", '"'), ("”", '"'), ("–", "-"), ("—", " - "), ("´", "'"), ("‘", "'"), ("‚", "'"),
    ("’", "'"), ("''", '"'), ("…", "..."),
)  # fmt: skip


class _Script(NamedTuple):
    """The replacements of a script. `first` is applied first, then the common replacements, and `then` at last.

    `nuktas` maps letters with a dot to the letters without a dot that form them together with a nukta. Letters and
    replacements are offsets in the block.
    """

    first: tuple[tuple[str, str], ...] = ()
    then: tuple[tuple[str, str], ...] = ()
    nuktas: tuple[tuple[int, int], ...] = ()


def _dandas(block: int, *, pipe: bool) -> tuple[tuple[str, str], ...]:
    """Return replacements that turn a block's reserved dandas, and the pipe character, into the shared dandas."""
    dandas = ((chr(block + 0x64), _DANDA), (chr(block + 0x65), _DOUBLE_DANDA))
    return (*dandas, ("|", _DANDA)) if pipe else dandas


_SCRIPTS = {
    0x0900: _Script(
        then=(("|", _DANDA),),
        nuktas=(
            (0x29, 0x28), (0x31, 0x30), (0x34, 0x33), (0x58, 0x15), (0x59, 0x16), (0x5A, 0x17), (0x5B, 0x1C),
            (0x5C, 0x21), (0x5D, 0x22), (0x5E, 0x2B), (0x5F, 0x2F),
        ),
    ),
    0x0980: _Script(
        then=(*_dandas(0x0980, pipe=True), ("\u09f7", _DANDA), ("\u09c7\u09be", "\u09cb"), ("\u09c7\u09d7", "\u09cc")),
        nuktas=((0x5C, 0x21), (0x5D, 0x22), (0x5F, 0x2F)),
    ),
    0x0A00: _Script(
        # Vowels that are written as a bearer and a sign (Unicode standard, table 12-16)
        first=(
            ("\u0a05\u0a3e", "\u0a06"), ("\u0a72\u0a3f", "\u0a07"), ("\u0a72\u0a40", "\u0a08"),
            ("\u0a73\u0a41", "\u0a09"), ("\u0a73\u0a42", "\u0a0a"), ("\u0a72\u0a47", "\u0a0f"),
            ("\u0a05\u0a48", "\u0a10"), ("\u0a73\u0a4b", "\u0a13"), ("\u0a05\u0a4c", "\u0a14"),
        ),
        then=_dandas(0x0A00, pipe=True),
        nuktas=((0x33, 0x32), (0x36, 0x38), (0x59, 0x16), (0x5A, 0x17), (0x5B, 0x1C), (0x5E, 0x2B)),
    ),
    0x0A80: _Script(then=_dandas(0x0A80, pipe=False)),
    0x0B00: _Script(
        then=(
            *_dandas(0x0B00, pipe=False), ("\u0b7c", _DANDA), ("\u0b35", "\u0b2c"), ("\u0b47\u0b56", "\u0b58"),
            ("\u0b47\u0b3e", "\u0b4b"), ("\u0b47\u0b57", "\u0b4c"),
        ),
        nuktas=((0x5C, 0x21), (0x5D, 0x22)),
    ),
    0x0B80: _Script(
        then=(
            *_dandas(0x0B80, pipe=False), ("\u0b92\u0bd7", "\u0b94"), ("\u0bc6\u0bbe", "\u0bca"),
            ("\u0bc7\u0bbe", "\u0bcb"), ("\u0bc6\u0bd7", "\u0bcc"),
        ),
    ),
    0x0C00: _Script(then=(*_dandas(0x0C00, pipe=False), ("\u0c46\u0c56", "\u0c48"))),
    0x0C80: _Script(
        then=(
            *_dandas(0x0C80, pipe=False), ("\u0cbf\u0cd5", "\u0cc0"), ("\u0cc6\u0cd5", "\u0cc7"),
            ("\u0cc6\u0cd6", "\u0cc8"), ("\u0cc6\u0cc2", "\u0cca"), ("\u0cca\u0cd5", "\u0ccb"),
        ),
    ),
    0x0D00: _Script(
        # Consonant, virama and joiner became letters of their own (chillus) in Unicode 5.1.
        first=tuple(
            (f"{consonant}\u0d4d\u200d", chr(0x0D7A + i))
            for i, consonant in enumerate("\u0d23\u0d28\u0d30\u0d32\u0d33\u0d15")
        ),
        then=(
            *_dandas(0x0D00, pipe=False), ("\u0d46\u0d3e", "\u0d4a"), ("\u0d47\u0d3e", "\u0d4b"),
            ("\u0d46\u0d57", "\u0d4c"), ("\u0d57", "\u0d4c"),
        ),
    ),
}  # fmt: skip
# Independent vowels that become others right after the nuktas' place in the order: only Odia has any.
_ODIA_VOWELS = (("\u0b05\u0b3e", "\u0b06"), ("\u0b0f\u0b57", "\u0b10"), ("\u0b13\u0b57", "\u0b14"))
_CANDRA_A, _VOWEL_E = "\u0972", "\u090f"


@cache
def _replacements(text_code: str, normalizer: Normalizer) -> tuple[tuple[str, str], ...]:
    """Return all replacements of a language, in the order of their application."""
    block = _BLOCKS[text_code]
    script = _SCRIPTS[block]
    # Oddity "literal-nukta": the six characters \u093C, not the character with that code point
    nukta = f"\\u{block + 0x3C:04X}" if normalizer == "itt" else chr(block + 0x3C)
    nuktas = tuple((chr(block + dotted), chr(block + plain) + nukta) for dotted, plain in script.nuktas)
    candra = ((_CANDRA_A, _VOWEL_E),) if block == _BLOCKS["hi"] else ()
    vowels = _ODIA_VOWELS if block == _BLOCKS["or"] else ()
    return (*script.first, *_COMMON_REPLACEMENTS, *_QUOTES_AND_DASHES, *candra, *vowels, *nuktas, *script.then)


@cache
def _visarga_pattern(text_code: str, normalizer: Normalizer) -> regex.Pattern[str]:
    """Return a pattern of the colons that become a visarga, which are colons after a letter of the script.

    By the oddity "ascii-visarga", these are instead colons after an ASCII character from 0 to a backslash, after a u,
    or after a letter that occurs in the written code points of the block's bounds.
    """
    block = _BLOCKS[text_code]
    if normalizer == "original":
        return regex.compile(f"([{chr(block)}-{chr(block + 0x7F)}]):")
    letters = "".join(sorted(set("u" + f"{block:x}{block + 0x7F:x}") - set("0123456789")))
    return regex.compile(rf"([0-\\{letters}]):")


def normalize(text: str, text_code: str, normalizer: Normalizer = "itt") -> str:
    """Return `text` with one spelling for each letter of a script. `text_code` is the `text_code` of a Language."""
    if text_code == "ur":
        for old, new in _QUOTES_AND_DASHES:
            text = text.replace(old, new)
        return normalize_perso_arabic(text)
    for old, new in _replacements(text_code, normalizer):
        text = text.replace(old, new)
    visarga = chr(_BLOCKS[text_code] + 0x03)
    replacement = rf"\\1{visarga}" if normalizer == "itt" else rf"\1{visarga}"
    return str(_visarga_pattern(text_code, normalizer).sub(replacement, text))


# Every ASCII punctuation mark but the backslash (oddity "backslash-in-words"), dandas, marks of Meetei Mayek, Ol Chiki
_ASCII_MARKS = r"!-/:-@\[\]-`{-~"
_INDIC_MARK = regex.compile(rf"([{_ASCII_MARKS}\u0964\u0965\uaaf1\uaaf0\uabeb-\uabef\u1c7e\u1c7f])")
_PERSO_ARABIC_MARK = regex.compile(rf"([{_ASCII_MARKS}\u0609\u060a\u060c\u061e\u066a-\u066d\u06d4])")
_SPACES = regex.compile(" +")
_NUMBERS_APART = regex.compile(r"(?:[0-9]+ [,.:/] )+[0-9]+")


def split_words(text: str, text_code: str) -> str:
    """Return `text` with one space around every punctuation mark, except marks within numbers and dates."""
    pattern = _PERSO_ARABIC_MARK if text_code == "ur" else _INDIC_MARK
    text = _SPACES.sub(" ", pattern.sub(r" \1 ", text.replace("\t", " "))).strip(" ")
    if text_code == "ur":
        return text
    return str(_NUMBERS_APART.sub(lambda match: match.group().replace(" ", ""), text))


_SPACES_AROUND = regex.compile(r" ([-/\\]) ")
_SPACE_BEFORE = regex.compile(r" ([!%)\]},.:;>?\u0964\u0965])")
_SPACE_AFTER = regex.compile(r"([#$(\[{<@]) ")


def join_words(text: str) -> str:
    """Undo `split_words`: attach punctuation marks to the words to which they belong.

    Quotation marks open and close in turn. Text like @RA or @LA becomes a quotation mark (oddity "quote-markers").
    """
    text = _join_numbers(text)
    text = _SPACES_AROUND.sub(r"\1", text)
    text = _SPACE_BEFORE.sub(r"\1", text)
    text = _SPACE_AFTER.sub(r"\1", text)
    for quote in "'\"`":
        parts = text.split(quote)
        text = parts[0] + "".join(f"@{'RL'[i % 2]}A{part}" for i, part in enumerate(parts[1:]))
        for marker in ("@RA ", " @LA", "@RA", "@LA"):
            text = text.replace(marker, quote)
    return text


def _join_numbers(text: str) -> str:
    """Remove the spaces in numbers and dates, except in a number at the start of the text (oddity "first-number")."""
    parts, end = [], 0
    for match in _NUMBERS_APART.finditer(text):
        if match.start() > end:
            parts += [text[end : match.start()], match.group().replace(" ", "")]
            end = match.end()
    return "".join([*parts, text[end:]])


def transliterate(text: str, from_code: str, to_code: str) -> str:
    """Return `text` with the letters of one language's script replaced by the letters of another language's script.

    Text in a script outside the Brahmi family stays as it is. So does all text if either language has such a script.
    """
    table = _transliteration_table(from_code, to_code)
    return text.translate(table) if table else text


def transliterate_to_devanagari(text: str, text_code: str) -> str:
    """Return words as a model reads them: in Devanagari, without the spaces around a virama that stands alone."""
    return transliterate(text, text_code, "hi").replace(f" {_VIRAMA} ", _VIRAMA)


@cache
def _transliteration_table(from_code: str, to_code: str) -> dict[int, int]:
    if from_code not in _BLOCKS or to_code not in _BLOCKS:
        return {}
    source, target = _BLOCKS[from_code], _BLOCKS[to_code]
    offsets = (offset for offset in range(_LAST_SHARED_OFFSET + 1) if chr(source + offset) not in "\u0964\u0965")
    return {source + offset: target + (_tamil_offset(offset) if to_code == "ta" else offset) for offset in offsets}


def _tamil_offset(offset: int) -> int:
    """Return the offset of the letter with which Tamil writes a sound. Tamil has one stop and one nasal per row."""
    row, column = divmod(offset - 0x15, 5)
    if 0x15 <= offset <= 0x28 and offset != 0x1C and column in (1, 2, 3):
        return 0x15 + 5 * row
    if offset in (0x2B, 0x2C, 0x2D):
        return 0x2A
    return 0x37 if offset == 0x36 else offset
