"""Generates sentences of a small English grammar with their translation into an artificial language.

The artificial language puts the verb last, adjectives and numerals after their noun, and a reported or causal clause
first. Nouns have one of three classes and take endings for number and case; adjectives, articles and verbs agree with
the noun. Words are written in Gujarati letters, so that the texts pass through the usual steps of Indian scripts. The
words mean nothing in Gujarati. Times such as 12:30 are copied.

A keyed hash of subject, verb and object decides whether a clause with an object is held out. One combination in five is
held out, and no training text contains it. The hash has no seed, so the split is the same on every machine.
"""

from __future__ import annotations

import hashlib
import random
from functools import cache
from typing import Literal, NamedTuple

from meltcore.measure.problems.sums import Split

SOURCE_LANGUAGE, TARGET_LANGUAGE = "eng_Latn", "guj_Gujr"
Tense = Literal["present", "past", "future"]

_HASH_KEY = b"meltcore phrases"
_HELD_OUT_ONE_IN = 5
_PEOPLE = {
    "king": "kings", "queen": "queens", "farmer": "farmers", "teacher": "teachers", "doctor": "doctors",
    "child": "children", "woman": "women", "man": "men", "baker": "bakers", "sailor": "sailors", "dog": "dogs",
    "cat": "cats", "horse": "horses", "bird": "birds", "wolf": "wolves", "fox": "foxes", "cook": "cooks",
    "guard": "guards", "tailor": "tailors", "painter": "painters",
}  # fmt: skip
_THINGS = {
    "book": "books", "letter": "letters", "stone": "stones", "lamp": "lamps", "boat": "boats", "wagon": "wagons",
    "apple": "apples", "knife": "knives", "box": "boxes", "bell": "bells", "rope": "ropes", "tree": "trees",
    "chair": "chairs", "coat": "coats", "drum": "drums", "key": "keys", "wheel": "wheels", "basket": "baskets",
    "mirror": "mirrors", "ladder": "ladders",
}  # fmt: skip
_NOUNS = _PEOPLE | _THINGS
_ADJECTIVES = (
    "old", "young", "small", "big", "red", "green", "white", "happy", "strong", "quiet", "heavy", "clean", "brave",
    "strange",
)  # fmt: skip
_NUMERALS = ("two", "three", "four", "five", "six", "seven", "eight", "nine")
# Third person singular and past of each verb
_TRANSITIVE = {
    "see": ("sees", "saw"), "find": ("finds", "found"), "carry": ("carries", "carried"), "hide": ("hides", "hid"),
    "watch": ("watches", "watched"), "buy": ("buys", "bought"), "lose": ("loses", "lost"), "like": ("likes", "liked"),
    "follow": ("follows", "followed"), "clean": ("cleans", "cleaned"),
}  # fmt: skip
_DITRANSITIVE = {
    "give": ("gives", "gave"), "show": ("shows", "showed"), "send": ("sends", "sent"), "sell": ("sells", "sold"),
}  # fmt: skip
_INTRANSITIVE = {
    "sleep": ("sleeps", "slept"), "sing": ("sings", "sang"), "wait": ("waits", "waited"), "run": ("runs", "ran"),
    "dance": ("dances", "danced"),
}  # fmt: skip
_REPORTING = {"say": ("says", "said"), "know": ("knows", "knew"), "hope": ("hopes", "hoped")}
_VERBS = _TRANSITIVE | _DITRANSITIVE | _INTRANSITIVE | _REPORTING
_PLACES = ("near", "behind", "under")

# The made-up language. Endings are by class, then number.
_CONSONANTS, _VOWELS = "કખગચજટડતદનપબમરલવસહ", ("", "ા", "િ", "ુ", "ે", "ો")
_PLURALS = ("ઓ", "વા", "ઈન")
_ACCUSATIVE, _DATIVE, _LOCATIVE = ("ને", "તુ", "મિ"), ("લે", "કુ", "રો"), ("પર", "સે", "ખા")
_ADJECTIVE_ENDINGS = (("", "યા"), ("ની", "નો"), ("દુ", "દે"))
_ARTICLES = (("જા", "જો"), ("બી", "બુ"), ("હે", "હૌ"))
_VERB_ENDINGS = (("મ", "મા"), ("સ", "સી"), ("ર", "રુ"))
_TENSES: dict[Tense, str] = {"present": "", "past": "તે", "future": "ગો"}
_NOT, _QUESTION, _THAT, _BECAUSE, _AND, _BUT, _AT = "ના", "શુ", "એવ", "કાર", "અને", "પણ", "વાગે"


class Phrase(NamedTuple):
    """A sentence and its translation.

    `source` and `target` are texts. `source_words` and `target_words` are the words that a model reads and writes.
    """

    source: str
    target: str
    source_words: list[str]
    target_words: list[str]


class _Noun(NamedTuple):
    """A noun phrase in both languages. `target_noun` has no case ending. `target_rest` are the words after the noun."""

    noun: str
    is_plural: bool
    source: list[str]
    target_noun: str
    target_rest: list[str]

    def target(self, case: tuple[str, str, str] | None) -> list[str]:
        return [self.target_noun + (case[noun_class(self.noun)] if case else ""), *self.target_rest]


class _Clause(NamedTuple):
    source: list[str]
    target: list[str]


@cache
def is_held_out(subject: str, verb: str, thing: str) -> bool:
    """Return whether a combination of subject, verb and object appears in held-out sentences only."""
    return _digest(f"{subject} {verb} {thing}") % _HELD_OUT_ONE_IN == 0


@cache
def noun_class(noun: str) -> int:
    """Return the class of a noun: 0, 1 or 2."""
    return _digest(f"class of {noun}") % 3


def generate_phrases(split: Split, *, num_phrases: int, seed: int) -> list[Phrase]:
    """Return sentences. Held-out sentences have a combination of subject, verb and object that no training text has."""
    rng = random.Random(f"{split}/phrases/{seed}")  # noqa: S311 - must repeat for a seed
    return [phrase(rng, split) for _ in range(num_phrases)]


def phrase(rng: random.Random, split: Split) -> Phrase:
    """Return one sentence: a clause, a question, or two clauses that are joined, reported or causal."""
    kind = rng.choices(("one", "question", "and", "but", "that", "because"), (0.3, 0.15, 0.12, 0.12, 0.16, 0.15))[0]
    times: list[str] = []
    first = _clause(rng, split, times, is_question=kind == "question", needs_held_out=split == "heldout")
    if kind in ("one", "question"):
        source, target = first
    elif kind == "that":
        subject, tense = _noun_phrase(rng, _PEOPLE), _tense(rng)
        verb = rng.choice(list(_REPORTING))
        source = [*subject.source, _english_verb(verb, tense, subject.is_plural), "that", *first.source]
        target = [*first.target, _THAT, ",", *subject.target(None), _target_verb(verb, tense, subject)]
    else:
        second = _clause(rng, split, times)
        source = [*first.source, *([","] if kind == "but" else []), kind, *second.source]
        if kind == "because":
            target = [_BECAUSE, *second.target, ",", *first.target]
        else:
            target = [*first.target, ",", _AND if kind == "and" else _BUT, *second.target]
    end_mark = "?" if kind == "question" else "."
    return _make_phrase([*source, end_mark], [*target, end_mark], times)


def _make_phrase(source: list[str], target: list[str], times: list[str]) -> Phrase:
    """Return the Phrase of words. A model reads a placeholder for each time, numbered in the order of the source."""
    source = [source[0].capitalize(), *source[1:]]
    placeholder_numbers = {time: i + 1 for i, time in enumerate(word for word in source if word in times)}

    def words(texts: list[str]) -> list[str]:
        return [
            part
            for text in texts
            for part in (["<", f"ID{placeholder_numbers[text]}", ">"] if text in placeholder_numbers else [text])
        ]

    return Phrase(_text(source), _text(target), words(source), words(target))


def _text(words: list[str]) -> str:
    return "".join(word if word in ".,?" else f" {word}" for word in words).strip()


def _clause(
    rng: random.Random, split: Split, times: list[str], *, is_question: bool = False, needs_held_out: bool = False
) -> _Clause:
    """Return a clause. With `needs_held_out`, its combination is in no training text.

    If the clause has a time, append it to `times`.
    """
    tense, is_negative = _tense(rng), rng.random() < 0.2
    verb, subject, thing = _combination(rng, split, needs_held_out=needs_held_out)
    source, target = [], []
    if verb in _DITRANSITIVE:
        receiver = _noun_phrase(rng, _PEOPLE)
        target += receiver.target(_DATIVE)
    if thing is not None:
        source += thing.source
        target += thing.target(_ACCUSATIVE)
    if verb in _DITRANSITIVE:
        source += ["to", *receiver.source]
    if rng.random() < 0.2:
        place, place_noun = rng.choice(_PLACES), _noun_phrase(rng, _NOUNS)
        source += [place, *place_noun.source]
        target = [*place_noun.target(_LOCATIVE), _stem(place), *target]
    if rng.random() < 0.2:
        time = f"{rng.randint(10, 23)}:{rng.randint(0, 59):02d}"
        if time not in times:
            times.append(time)
            source += ["at", time]
            target = [time, _AT, *target]
    auxiliaries = {"past": "did", "future": "will", "present": "do" if subject.is_plural else "does"}
    if is_question:
        source_verb_words = [auxiliaries[tense], *subject.source, *(["not"] if is_negative else []), verb]
    elif is_negative:
        source_verb_words = [*subject.source, auxiliaries[tense], "not", verb]
    else:
        source_verb_words = [*subject.source, *_english_verb(verb, tense, subject.is_plural).split()]
    target_verb_words = [*([_NOT] if is_negative else []), _target_verb(verb, tense, subject)]
    return _Clause(
        source_verb_words + source,
        [*([_QUESTION] if is_question else []), *subject.target(None), *target, *target_verb_words],
    )


def _combination(rng: random.Random, split: Split, *, needs_held_out: bool) -> tuple[str, _Noun, _Noun | None]:
    """Draw verb, subject and object.

    With `needs_held_out` no training text has the combination. The split "train" never sets it.
    """
    while True:
        kinds = (_TRANSITIVE, _DITRANSITIVE, _INTRANSITIVE)
        verb = rng.choice(list(rng.choices(kinds, (0.6, 0.25, 0.15))[0]))
        subject = _noun_phrase(rng, _PEOPLE)
        if verb in _INTRANSITIVE:
            if not needs_held_out:
                return verb, subject, None
            continue
        thing = _noun_phrase(rng, _THINGS if verb in _DITRANSITIVE else _NOUNS)
        is_combination_held_out = is_held_out(subject.noun, verb, thing.noun)
        if is_combination_held_out == needs_held_out or (split == "heldout" and not needs_held_out):
            return verb, subject, thing


def _noun_phrase(rng: random.Random, nouns: dict[str, str]) -> _Noun:
    noun = rng.choice(list(nouns))
    numeral = rng.choice(_NUMERALS) if rng.random() < 0.2 else None
    is_plural = numeral is not None or rng.random() < 0.35
    is_definite = rng.random() < 0.7 or (is_plural and numeral is None)
    adjectives = rng.sample(_ADJECTIVES, rng.choices((0, 1, 2), (0.5, 0.38, 0.12))[0])
    kind = noun_class(noun)
    source = [*([numeral] if numeral else []), *adjectives, nouns[noun] if is_plural else noun]
    if is_definite:
        source = ["the", *source]
    elif not is_plural:
        source = ["an" if source[0][0] in "aeiou" else "a", *source]
    rest = [_stem(adjective) + _ADJECTIVE_ENDINGS[kind][is_plural] for adjective in adjectives]
    if numeral:
        rest.append(_stem(numeral))
    if is_definite:
        rest.append(_ARTICLES[kind][is_plural])
    return _Noun(noun, is_plural, source, _stem(noun) + (_PLURALS[kind] if is_plural else ""), rest)


def _tense(rng: random.Random) -> Tense:
    tenses: tuple[Tense, ...] = ("present", "past", "future")
    return rng.choice(tenses)


def _english_verb(verb: str, tense: Tense, is_plural: bool) -> str:
    if tense == "future":
        return f"will {verb}"
    third_person, past_form = _VERBS[verb]
    if tense == "past":
        return past_form
    return verb if is_plural else third_person


def _target_verb(verb: str, tense: Tense, subject: _Noun) -> str:
    return _stem(f"to {verb}") + _TENSES[tense] + _VERB_ENDINGS[noun_class(subject.noun)][subject.is_plural]


def _stem(word: str) -> str:
    return _stems()[word]


@cache
def _stems() -> dict[str, str]:
    """Return the stem of every word: two or three syllables from the word's hash. All stems differ."""
    words = (*_NOUNS, *_ADJECTIVES, *_NUMERALS, *_PLACES, *(f"to {verb}" for verb in _VERBS))
    stems: dict[str, str] = {}
    for word in words:
        number = _digest(f"stem of {word}")
        while True:
            rest, syllables = number, []
            for _ in range(2 + number % 2):
                rest, syllable_index = divmod(rest, len(_CONSONANTS) * len(_VOWELS))
                consonant, vowel = divmod(syllable_index, len(_VOWELS))
                syllables.append(_CONSONANTS[consonant] + _VOWELS[vowel])
            if "".join(syllables) not in stems.values():
                break
            number += 1
        stems[word] = "".join(syllables)
    return stems


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), key=_HASH_KEY, digest_size=6).digest())
