"""Prepares sentences for IndicTrans2 and restores its outputs, as IndicTransToolkit 1.1.1's IndicProcessor does.

`preprocess` returns the text and a map of placeholders, which `postprocess` takes as an argument. Neither function
keeps state, so sentences can be translated in any order. Faults of the published code are reproduced, because the
models are used with its output. ODDITIES names these faults, and DIFFERENCES names what is done differently here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

import regex

from meltcore.common.errors import RequestError
from meltcore.text.languages import Language
from meltcore.text.translation.indic_scripts import (
    Normalizer,
    join_words,
    normalize,
    split_words,
    transliterate,
    transliterate_to_devanagari,
)

# More characters than 256 pieces of at most 16 characters have, which is the longest source of the published models
MAX_SENTENCE_CHARS = 4096

# Faults of the published code that the functions of this package reproduce. tests/text has an example of each.
ODDITIES: dict[str, str] = {
    "text-codes": "Bodo, Dogri, Maithili, Sanskrit, Kashmiri and Sindhi in Devanagari are treated as Hindi, Santali as "
    "Odia, Manipuri as Hindi (Meetei Mayek) or Bengali; Kashmiri and Sindhi in Arabic letters as Urdu",
    "digits": "the digits of Tamil and Malayalam, Telugu's zero and the Arabic digits 1 to 9 stay as they are",
    "literal-nukta": "a letter with a dot becomes the letter and the six characters \\u093C (of its block)",
    "ascii-visarga": "an ASCII letter, digit or one of :;<=>?@[\\ and a colon become \\1 and a visarga; a colon after "
    "a letter of the language stays",
    "backslash-in-words": "a backslash is no punctuation mark",
    "kept-forms": "twelve presentation forms of Arabic letters stay, such as the final form of peh",
    "first-number": "spaces stay in a number or date with which a translation begins, or that follows another",
    "quote-markers": "@RA and @LA in a translation become quotation marks",
    "merged-placeholder": "two of the damaged spellings of a placeholder are known only as one, for want of a comma",
    "odia-nukta": "ya with a nukta becomes yya before the text is in Odia letters, so that only letters that were Odia "
    "already change",
    "nested-entities": "an entity that contains another one of its kind loses it to the other's placeholder; its own "
    "number is used up",
    "long-numbers": "of a number in more than three groups, such as 1,23,45,678, the placeholder has the first three; "
    "the rest follows it as text, and in English after a space: 1,23,45, 678",
    "signs-apart": "signs become words before the model, and not all are joined again: + = * & ~ ^ _ stay apart, from "
    "English also currency signs, degrees and sections; $ @ # | < > % may join the wrong neighbor",
    "joined-sentences": "words with a period and no space between them, such as dogs.The, are an address and stay as "
    "they are; less than four letters are none",
}
DIFFERENCES: dict[str, str] = {
    "order": "placeholders are numbered by first occurrence; the published code takes the order of a set, which two "
    "processes do not share",
    "typed-placeholders": "no placeholder gets a number that the text itself has in <ID1>, [ID 1] or a like form; the "
    "published code restores both",
    "two-digits": "a placeholder that a model writes in its own letters, such as आईडी 12, is the twelfth; the "
    "published code restores the first one and leaves a 2",
    "without-language": "an unknown language is an error; the published code takes Hindi",
    "time": f"a sentence has at most {MAX_SENTENCE_CHARS} characters and takes time in proportion to its square; the "
    "published patterns take exponential time for texts like 1111... or a.////...",
}


class PreprocessedText(NamedTuple):
    """A sentence as a model reads it, without language tags, and the text for which each placeholder stands."""

    text: str
    placeholders: dict[str, str]


_PUNCTUATION: tuple[tuple[str, str], ...] = (
    (r"\r", ""), (r"\(\s*", "("), (r"\s*\)", ")"), (r"\s:\s?", ":"), (r"\s;\s?", ";"), ("[`´‘‚’]", "'"),
    ("[„“”«»]", '"'), ("[–—]", "-"), ("\xa0%", "%"), ("nº\xa0", "nº "), ("\xa0ºC", " ºC"), ("\xa0([?!;])", r"\1"),
    (",\xa0", ", "), (" {2,}", " "), (r"\) ([.!:?;,])", r")\1"), (r"(\d) %", r"\1%"), (r'"([,.]+)', r'\1"'),
    (r"(\d)\xa0(\d)", r"\1.\2"),
)  # fmt: skip
_PUNCTUATION_PATTERNS = tuple((regex.compile(pattern), new) for pattern, new in _PUNCTUATION)

# The digits 0 to 9 of a script follow its first one. Telugu lacks its zero, and of the Arabic ones only zero is there.
_FIRST_DIGITS = (0x09E6, 0x0AE6, 0x0CE6, 0x0966, 0xABF0, 0x0B66, 0x0A66, 0x1C50, 0x06F0)
_DIGITS = {first + digit: str(digit) for first in _FIRST_DIGITS for digit in range(10)}
_DIGITS |= {0x0C66 + digit: str(digit) for digit in range(1, 10)} | {0x0660: "0"}

_ONE_NUMBER = r"\d++(?:\.\d*+)?+"  # 12, 12. or 12.5
# Two numbers with a sign between, then a percent sign; or one number of two digits, which may be read as two
_PERCENT_RANGE = (
    rf"~?{_ONE_NUMBER}(?=[\s%~-])\s?%?\s?-?\s?~?{_ONE_NUMBER}\s?%"
    r"|~?(?:\d++\.\d++(?:\.\d*+)?+|\d\d++(?:\.\d*+)?+)\s?%"
)
_OTHER_NUMBERS = r"~?\d++%|\d++[-/.,:']\d++[-/.,:'+]\d++(?:\.\d+)?|\d++[-/.:'+]\d++(?:\.\d+)?"
# What the patterns match is what the published ones do, without their exponential search: a part that cannot give back
# a character is possessive, and a number begins where no digit is before.
_ENTITIES: tuple[tuple[regex.Pattern[str], str, int], ...] = (
    # pattern, characters that do not count, number of others that an entity has at least
    (regex.compile(r"[A-Za-z0-9._%+-]++@[A-Za-z0-9.-]+\.[A-Z|a-z]{2,}"), "", 0),
    (regex.compile(r"\b(?<![\w/.])(?:(?:https?|ftp)://)?(?:[\w-]++\.)+(?!\.)[\w/?#&=%.-]+(?!\.\w+)\b"), ".", 4),
    (regex.compile(rf"(?:(?<!\d)|(?=~))(?:{_PERCENT_RANGE}|{_OTHER_NUMBERS})"), " .:", 4),
    (regex.compile(r"[A-Za-z0-9]*+[#|@]\w+"), "", 0),
)
_SPACES = regex.compile(r"\s+")
_TYPED_PLACEHOLDER = regex.compile(r"[<\[]\s?[Ii][Dd]\s?([0-9]+)\s?[>\]]")

# What models make of "ID" when they write a placeholder in their own language
_ID_SPELLINGS = (
    "آی ڈی ", "ꯑꯥꯏꯗꯤ", "आईडी", "आई . डी . ", "आई . डी .", "आई. डी. ", "आई. डी.", "आय. डी. ", "आय. डी.",
    "आय . डी . ", "आय . डी .आइ . डी . ", "आइ . डी .", "आइ. डी. ", "आइ. डी.", "ऐटि", "آئی ڈی ", "ᱟᱭᱰᱤ ᱾", "आयडी",
    "ऐडि", "आइडि", "ᱟᱭᱰᱤ",
)  # fmt: skip
_LATIN_FORMS = ("<{}{}>", "< {}{} >", "[{}{}]", "[ {}{} ]", "[{} {}]", "<{}{}]", "< {}{}]", "<{}{} ]")
_INDIC_FORMS = (
    "<{}{}>", "< {}{} >", "< {} {} >", "<{} {}]", "< {} {} ]", "[{}{}]", "[{} {}]", "[ {}{} ]", "[ {} {} ]", "{} {}",
    "{}{}",
)  # fmt: skip


def preprocess(
    sentence: str,
    language: Language,
    order: Callable[[list[str]], Iterable[str]] = dict.fromkeys,
    normalizer: Normalizer = "itt",
) -> PreprocessedText:
    """Return a sentence as the model reads it: in Devanagari, with plain punctuation, placeholders and separate words.

    `order` returns the entities of one kind, each once, in the order in which they get numbers. The normalizer
    "original" repairs the oddities "literal-nukta" and "ascii-visarga". Raises RequestError for a sentence of more than
    MAX_SENTENCE_CHARS characters.
    """
    if len(sentence) > MAX_SENTENCE_CHARS:
        raise RequestError(f"a sentence has {len(sentence):,} characters, of at most {MAX_SENTENCE_CHARS:,}; split it")
    for pattern, new in _PUNCTUATION_PATTERNS:
        sentence = pattern.sub(new, sentence)
    text, placeholders = _insert_placeholders(sentence.strip().translate(_DIGITS), order)
    if language.text_code == "en":
        punctuation, tokenizer, _ = _moses_tools()
        return PreprocessedText(" ".join(tokenizer.tokenize(punctuation.normalize(text), escape=False)), placeholders)
    text = split_words(normalize(text.strip(), language.text_code, normalizer), language.text_code)
    if language.script not in ("Arabic", "Ol_Chiki", "Meetei_Mayek"):
        text = transliterate_to_devanagari(text, language.text_code)
    return PreprocessedText(text.strip(), placeholders)


def postprocess(text: str, language: Language, placeholders: dict[str, str]) -> str:
    """Return a model's output in the language's script, without placeholders, and with punctuation next to its words.

    `placeholders` is the mapping that `preprocess` returned for the source sentence.
    """
    if language.script == "Arabic":
        for mark in "؟۔،":
            text = text.replace(f" {mark}", mark)
        text = text.replace("\u066e\u06ea", "\u0620")
    if language.text_code == "or" and language.script == "Oriya":
        text = text.replace("\u0b2f\u0b3c", "\u0b5f")
    for placeholder, entity in placeholders.items():
        for spelling in _spellings(placeholder):
            text = _restore_placeholder(text, spelling, entity)
    if language.text_code == "en":
        return str(_moses_tools()[2].detokenize(text.split(" ")))
    return join_words(transliterate(text, "hi", language.text_code))


def _restore_placeholder(text: str, spelling: str, entity: str) -> str:
    """Replace a placeholder in `text` by the `entity` for which it stands.

    `spelling` is the placeholder's form in the text. If the spelling ends with a digit and another digit follows it in
    the text, it is part of another placeholder.
    """
    if spelling not in text:
        return text
    is_open = spelling[-1].isdecimal()
    return str(regex.sub(regex.escape(spelling) + (r"(?!\p{N})" if is_open else ""), lambda _: entity, text))


def _insert_placeholders(text: str, order: Callable[[list[str]], Iterable[str]]) -> tuple[str, dict[str, str]]:
    """Replace e-mail addresses, web addresses, numbers and names with # or @ by placeholders <ID1>, <ID2>..."""
    typed = {int(match.group(1)[:9]) for match in _TYPED_PLACEHOLDER.finditer(text)}
    placeholders: dict[str, str] = {}
    number = 0
    for pattern, ignored, least in _ENTITIES:
        for entity in order(pattern.findall(text)):
            if len(entity.translate(dict.fromkeys(map(ord, ignored)))) < least:
                continue
            number += 1
            while number in typed:
                number += 1
            placeholders[f"<ID{number}>"] = entity
            text = text.replace(entity, f"<ID{number}>")
    return _SPACES.sub(" ", text).replace(">/", ">").replace("]/", "]"), placeholders


def _spellings(placeholder: str) -> list[str]:
    """Return the spellings in which a model may write a placeholder like <ID1>, in the order of replacement."""
    number = placeholder[3:-1]
    latin = [form.format(word, number) for word in ("ID", "id") for form in _LATIN_FORMS]
    return latin + [form.format(word, number) for word in _ID_SPELLINGS for form in _INDIC_FORMS]


@cache
def _moses_tools() -> tuple[Any, Any, Any]:
    """Return the normalizer, tokenizer and detokenizer of English. They are imported here, which takes 0.2 s."""
    from sacremoses import MosesDetokenizer, MosesPunctNormalizer, MosesTokenizer

    return MosesPunctNormalizer(), MosesTokenizer(lang="en"), MosesDetokenizer(lang="en")
