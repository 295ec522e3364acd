"""Lists words whose period ends no sentence: initials, titles and abbreviations of English and of Indian languages.

The lists are Moses' own, from sacremoses. Words of all Indian scripts are compared by their letters in Devanagari. The
spelling unites what each language writes in its own way: the initial M is एम, ऐम, ಎಂ, எம் and എം.
"""

from __future__ import annotations

import re
import unicodedata
from functools import cache

from meltcore.text.translation.indic_scripts import transliterate

# English letters as Indian languages spell them, where Moses' lists lack a spelling
_INITIALS = (
    "ए बी सी डी ई एफ जी एच एइच हेच आई जे के एल एम एन ओ पी क्यू आर एस टी यू इउ वी व्ही डब्ल्यू डब्लिउ एक्स वाय जेड जैड एप ओय एछ"
)
# Doctor, Mr., Mrs., Ms., professor, pandit, late, Md., rupees, kilometer, and others that the published code has
_TITLES = (
    "डॉ डा डो डः डाः डाक श्री श्रीमती श्रीमति स्रीमती श्रीयुत सुश्री प्रो प्रा प्रोफ पेरा मि मिः मिस पं तिरु अड्व ॲड ऍड अॅड एड इं "
    "स्व दि कु कुम चि सौ कै मो मोः मौ मु रु रू कि मी"
)
_BEFORE_NUMBERS = "क्र नं सं पृ अनु धा खं"  # number, page, article, section, volume
# English letters in Arabic script, and those that are words too: such a one is an initial only beside another one
_ARABIC = "اے ڈی ای ایف ایچ جے ایل ایم این او کیو آر ایس ٹی یو وی ڈبلیو ایکس وائی زیڈ ڊی ایڇ ڊبلیو ایڪس زیڊ واء"
_ARABIC_WORDS = "بی پی سی جی آئی کے آء ڪی ڪیو ٽی"  # also lady, drank, like, yes, came, of, I, some, did, three
_ARABIC_TITLES = "ڈاکٹر ڊاڪٽر پروفیسر پروف مسٹر مسٽر مسز شری شریمتی پنڈت پنڊت"
ARABIC_INITIALS_AND_WORDS = frozenset(_ARABIC_WORDS.split())
_ARABIC_INITIALS, ARABIC_TITLES = frozenset(_ARABIC.split()), frozenset(_ARABIC_TITLES.split())
# Sindhi writes ي for Urdu's ی, and ڪ for Urdu's ک. The latter two differ in the lists, as Sindhi has both letters.
_ARABIC_LETTERS = {ord("ي"): "ی", ord("ى"): "ی", ord("ك"): "ک"}
_VOWEL_SIGNS = dict.fromkeys([*range(0x64B, 0x653), *range(0x656, 0x660), 0x670])
# Beside Moses' own: titles, what names of places begin with, and words that Moses does not expect before a number
_ENGLISH_TITLES = "Smt Shri Sri Kum Pt Md Mohd Er Fr Mt Ft"
_ENGLISH_BEFORE_NUMBERS = (
    "fig figs vol vols ch sec secs eq eqs Fig Figs Vol Vols Ch Sec Secs Eq Eqs Pp art para paras Para Paras "
    "cl cls Cl Cls reg regs Reg Regs pg pgs Pg Pgs approx Approx ca dt Dt Sept Sl Ref"
)
_MOSES_LANGUAGES = ("hi", "mr", "gu", "pa", "kn", "ml", "ta", "te")
# Short e and o, letters outside the range that all scripts share, and signs to leave out
_LETTERS = str.maketrans(
    "ऎऒॆॊ\u0d7b\u0d7c\u0d7d\u0d7a\u0d7e\u09f0\u09f1", "एओेोनरलणळरव", "\u093c\u200c\u200d\u0a71\u200b"
)
# What spells the name of an English letter in several ways: the length of vowels, and m at its end
_SOUND_TABLE = str.maketrans("ऍऐऑइउिुॉँंॅ", "एएओईऊीूोममे")
_DOUBLED_CONSONANT = re.compile("(.)\u094d\\1")


@cache
def english_abbreviations() -> tuple[frozenset[str], frozenset[str]]:
    """Return the words after whose period a sentence continues: always, and before numbers only.

    The lists are imported here, since the import takes 0.2 s.
    """
    from sacremoses.corpus import NonbreakingPrefixes

    always, before_numbers = set(_ENGLISH_TITLES.split()), set(_ENGLISH_BEFORE_NUMBERS.split())
    for entry in NonbreakingPrefixes().words("en"):
        word, _, condition = entry.partition(" ")
        (before_numbers if condition else always).add(word)
    return frozenset(always), frozenset(before_numbers)


def plain_arabic(word: str) -> str:
    """Return a word without Arabic vowel signs, with Urdu's letters in place of Arabic letters that look alike."""
    return unicodedata.normalize("NFC", word).translate(_ARABIC_LETTERS | _VOWEL_SIGNS)


def may_be_arabic_initial(word: str) -> bool:
    """Return whether a plain word in Arabic letters is the name of a letter. Such a name may be a word too."""
    return len(word) == 1 or word in _ARABIC_INITIALS or word in ARABIC_INITIALS_AND_WORDS


def is_abbreviation(word: str, text_code: str, *, is_before_number: bool) -> bool:
    """Return whether a sentence continues after this word and a period. Initials of all scripts are abbreviations."""
    if len(word) == 1:
        return word.isalpha()
    if word in _ARABIC_INITIALS:
        return True
    if text_code == "en" or word.isascii():
        always, before_numbers = english_abbreviations()
        return word in always or (is_before_number and word in before_numbers)
    letters = unicodedata.normalize("NFD", transliterate(word, text_code, "hi")).translate(_LETTERS)
    if letters in _TITLES.split() or (is_before_number and letters in _BEFORE_NUMBERS.split()):
        return True
    return _sound_key(letters) in _known_words(text_code)


@cache
def _known_words(text_code: str) -> frozenset[str]:
    """Return the sound keys of known words: initials in all Indian languages, and the words of Moses' lists."""
    from sacremoses.corpus import NonbreakingPrefixes

    prefixes = NonbreakingPrefixes()
    codes = {*_MOSES_LANGUAGES, text_code, "bn" if text_code == "or" else text_code}  # Moses' list of Odia has none
    words = {(word, code) for code in codes & prefixes.available_langs.keys() for word in prefixes.words(code)}
    words |= {(word, "hi") for word in _INITIALS.split()}
    return frozenset(
        _sound_key(unicodedata.normalize("NFD", transliterate(word, code, "hi")).translate(_LETTERS))
        for word, code in words
    )


def _sound_key(letters: str) -> str:
    """Return letters in Devanagari, without the letters that languages spell differently."""
    return _DOUBLED_CONSONANT.sub(r"\1", letters.translate(_SOUND_TABLE)).removesuffix("\u094d")
