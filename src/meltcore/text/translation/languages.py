"""Finds the languages of IndicTrans2 by name, their checkpoints' directions, and texts in a wrong script."""

from __future__ import annotations

from functools import cache
from typing import Literal, get_args

import regex

from meltcore.common.errors import RequestError
from meltcore.text.languages import LANGUAGES, Language

# Every tag of the published vocabularies. Those without a language above are outside the model card.
TAGS = frozenset(language.code for language in LANGUAGES) | {
    "awa_Deva", "bho_Deva", "gon_Deva", "hne_Deva", "kha_Latn", "lus_Latn", "mag_Deva", "unr_Deva",
}  # fmt: skip
# What a published checkpoint translates; its name has it.
Direction = Literal["en-indic", "indic-en", "indic-indic"]
_DIRECTION = regex.compile(rf"(?<![a-z])({'|'.join(get_args(Direction))})(?![a-z])")
_MAX_SHOWN_CHARS = 60


def find_language(name: str, param: str) -> Language:
    """Return the language that `name` means: a FLORES code, an English name or an ISO 639 code, in any case.

    A script may follow (`ks-Deva`, `Sindhi (Arabic)`). It is required for Kashmiri, Manipuri and Sindhi, which have two
    scripts. Raises RequestError for an unknown name and for a missing script; the error names the request's field
    `param`.
    """
    found = _languages_by_name().get(_name_key(name), ())
    if len(found) == 1:
        return found[0]
    shown = repr(name[:_MAX_SHOWN_CHARS])
    if found:
        codes = " or ".join(language.code for language in found)
        raise RequestError(f"{param} {shown} is written in {len(found)} scripts: name {codes}", param=param)
    codes = ", ".join(language.code for language in LANGUAGES)
    raise RequestError(f"{param} {shown} is not a language of IndicTrans2; its languages are {codes}", param=param)


def needed_direction(source: Language, target: Language) -> Direction:
    """Return the direction of checkpoints that translate from `source` to `target`."""
    if source.code == "eng_Latn":
        return "en-indic"
    return "indic-en" if target.code == "eng_Latn" else "indic-indic"


def find_direction(checkpoint: str) -> Direction | None:
    """Return the direction in the last part of a checkpoint's name or path. Returns None if it names no direction.

    Fairseq's checkpoints are published in a folder `fairseq_model` within the folder that has the name.
    """
    path = checkpoint.rstrip("/").lower().removesuffix("/fairseq_model")
    found = _DIRECTION.search(path.rpartition("/")[2])
    return next((each for each in get_args(Direction) if found and found.group(1) == each), None)


def check_script(text: str, language: Language, param: str) -> None:
    """Raise RequestError if `text` has letters of other scripts and no letter of the language's own script.

    Latin letters do not count, since names and loanwords in Latin letters are common in all languages. So a text with
    only Latin letters passes, and so does a text without letters.
    """
    own, other = _script_patterns(language.script)
    letter = other.search(text)
    if letter and not own.search(text):
        raise RequestError(
            f"{param} is {language.code}, which is written in {language.script}; the text has letters like "
            f"{letter.group()!r} (U+{ord(letter.group()):04X}), and none of that script",
            param=param,
        )


@cache
def _script_patterns(script: str) -> tuple[regex.Pattern[str], regex.Pattern[str]]:
    """Return two patterns: a letter of `script`, and a letter that is neither of `script` nor Latin."""
    own = rf"\p{{Script={script}}}"
    return regex.compile(own), regex.compile(rf"[\p{{L}}--{own}--\p{{Script=Latin}}]", regex.V1)


def _name_key(name: str) -> str:
    return " ".join(regex.findall(r"\w+", name.replace("_", " ").casefold()))


@cache
def _languages_by_name() -> dict[str, tuple[Language, ...]]:
    """Return the languages by the key of each name. A name has several languages if they differ in script."""
    table: dict[str, tuple[Language, ...]] = {}
    for language in LANGUAGES:
        script = language.code.partition("_")[2]
        for name in language.names:
            for key in (_name_key(name), _name_key(f"{name} {script}"), _name_key(f"{name} {language.script}")):
                table[key] = (*(other for other in table.get(key, ()) if other != language), language)
    return table
