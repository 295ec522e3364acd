"""Lists the languages that speech and translation models share, under all their names. It needs no package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from meltcore.common.errors import RequestError


class Language(NamedTuple):
    """A language in one script.

    Args:
        code: FLORES code, which is also the language's tag in the model's input.
        text_code: The code that selects the language's text processing. It may be another language's code (ODDITIES).
        script: Unicode's name of the script.
        names: English names without the script, and ISO 639 codes.
    """

    code: str
    text_code: str
    script: str
    names: tuple[str, ...]


# The 22 scheduled languages of India, three of them in two scripts, and English: those of the model card.
LANGUAGES: tuple[Language, ...] = (
    Language("asm_Beng", "as", "Bengali", ("Assamese", "as", "asm")),
    Language("ben_Beng", "bn", "Bengali", ("Bengali", "Bangla", "bn", "ben")),
    Language("brx_Deva", "hi", "Devanagari", ("Bodo", "brx")),
    Language("doi_Deva", "hi", "Devanagari", ("Dogri", "doi", "dgo")),
    Language("eng_Latn", "en", "Latin", ("English", "en", "eng")),
    Language("gom_Deva", "kK", "Devanagari", ("Konkani", "kok", "gom", "knn")),
    Language("guj_Gujr", "gu", "Gujarati", ("Gujarati", "gu", "guj")),
    Language("hin_Deva", "hi", "Devanagari", ("Hindi", "hi", "hin")),
    Language("kan_Knda", "kn", "Kannada", ("Kannada", "kn", "kan")),
    Language("kas_Arab", "ur", "Arabic", ("Kashmiri", "ks", "kas")),
    Language("kas_Deva", "hi", "Devanagari", ("Kashmiri", "ks", "kas")),
    Language("mai_Deva", "hi", "Devanagari", ("Maithili", "mai")),
    Language("mal_Mlym", "ml", "Malayalam", ("Malayalam", "ml", "mal")),
    Language("mar_Deva", "mr", "Devanagari", ("Marathi", "mr", "mar")),
    Language("mni_Beng", "bn", "Bengali", ("Manipuri", "Meitei", "mni")),
    Language("mni_Mtei", "hi", "Meetei_Mayek", ("Manipuri", "Meitei", "mni")),
    Language("npi_Deva", "ne", "Devanagari", ("Nepali", "ne", "nep", "npi")),
    Language("ory_Orya", "or", "Oriya", ("Odia", "Oriya", "or", "ori", "ory")),
    Language("pan_Guru", "pa", "Gurmukhi", ("Punjabi", "Panjabi", "pa", "pan")),
    Language("san_Deva", "hi", "Devanagari", ("Sanskrit", "sa", "san")),
    Language("sat_Olck", "or", "Ol_Chiki", ("Santali", "sat")),
    Language("snd_Arab", "ur", "Arabic", ("Sindhi", "sd", "snd")),
    Language("snd_Deva", "hi", "Devanagari", ("Sindhi", "sd", "snd")),
    Language("tam_Taml", "ta", "Tamil", ("Tamil", "ta", "tam")),
    Language("tel_Telu", "te", "Telugu", ("Telugu", "te", "tel")),
    Language("urd_Arab", "ur", "Arabic", ("Urdu", "ur", "urd")),
)
# Languages that a language model is asked for by name, beyond those above: dwani.ai's clients know one.
_OTHER_LANGUAGES = (("deu_Latn", ("German", "de", "deu", "ger")),)
_ALL_LANGUAGES = (*((each.code, each.names) for each in LANGUAGES), *_OTHER_LANGUAGES)
CODES = [code for code, _ in _ALL_LANGUAGES]


def english_name(language: str, param: str) -> str:
    """Return the English name of a language. `language` is a code or a name, in any case.

    Raises RequestError (400) for an unknown language; the error names the request's field `param`.
    """
    if named := _named(language):
        return named[0][1][0]
    raise RequestError(f"{param} {language[:60]!r} is not a known language; known are {', '.join(CODES)}", param=param)


def code_among(name: str, languages: Sequence[str]) -> str | None:
    """Return the member of `languages` for a code or English name, in any case. Returns None if there is none."""
    same = [member for member in languages if member.casefold() == name.strip().casefold()]
    meant = [member for code, names in _named(name) for member in languages if member in (code, *names)]
    return next(iter(same + meant), None)


def _named(name: str) -> list[tuple[str, tuple[str, ...]]]:
    """Return the codes and names of the languages that `name` means: one for each script of the language."""
    folded = name.strip().casefold()
    return [(code, names) for code, names in _ALL_LANGUAGES if folded in map(str.casefold, (code, *names))]
