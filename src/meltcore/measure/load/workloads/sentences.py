"""Generates sentences of random words in the script of a language, and reads texts with right answers from a file.

The sentences mean nothing. A server does the same work for them as for real sentences with the same number of tokens.
Random letters make more tokens than real words, so results state the number of tokens or characters.
"""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from meltcore.common.errors import ConfigError
from meltcore.measure.load.config import IntRange, LoadConfig, parse_range, published_workload, workload_fields
from meltcore.measure.load.workloads.workload import MakeResponse, Prompt, Workload

DEFAULT_SCRIPT = "Latn"
DEFAULT_WORDS = "8-40"
TEXT_OPTIONS = ("words", "script", "file")  # of a workload that has texts

_ENGLISH_TEXT = (
    "a about after all also and any are as at back because before between book boy bread bring by call came can "
    "carry child city clean close cold come country cut day did do door down each early earth eat end evening every "
    "eye face family far farmer father feet few field find fire first fish five food for forest friend from garden "
    "gave girl give go good great green grow had hand hard has have he head hear her here high him his home horse "
    "hot how if in into is it just keep kind know land large last late learn leave letter life light like "
    "little live long look made make man many market may me milk moon more morning mother mountain move much music "
    "must my name near never new next night no not now of off old on once one only open or other our out over paper "
    "people place plant play read red rice river road room round run said same sat saw school sea second see seed "
    "seven she ship shop short should show side sing sister sit sky sleep slow small snow so some song soon sound "
    "south speak spring stand star stay still stone stop story street strong summer sun table take talk tall teach "
    "tell ten than that the their them then there these they thing think this three through time to today together "
    "told too took town train travel tree turn two under until up us use very village visit voice wait walk wall "
    "want warm was watch water way we week well went were west what when where which while white who why wide wife "
    "will wind window winter with woman wood word work world would write year yellow yes yet you young your"
)
_ENGLISH_WORDS = _ENGLISH_TEXT.split()

# First and last code point of a script's block in Unicode; its letters and vowel signs are taken from there.
_BLOCKS = {
    "Deva": (0x0900, 0x097F), "Beng": (0x0980, 0x09FF), "Guru": (0x0A00, 0x0A7F), "Gujr": (0x0A80, 0x0AFF),
    "Orya": (0x0B00, 0x0B7F), "Taml": (0x0B80, 0x0BFF), "Telu": (0x0C00, 0x0C7F), "Knda": (0x0C80, 0x0CFF),
    "Mlym": (0x0D00, 0x0D7F), "Olck": (0x1C50, 0x1C7F), "Mtei": (0xABC0, 0xABFF), "Arab": (0x0620, 0x064A),
}  # fmt: skip
SCRIPTS = (DEFAULT_SCRIPT, *_BLOCKS)
_MAX_SYLLABLES = 4


def script_of(language: str) -> str:
    """Return the script in a FLORES code such as `kan_Knda`, or Latin for any other name of a language."""
    _, separator, script = language.partition("_")
    return script if separator and script in SCRIPTS else DEFAULT_SCRIPT


def check_script(script: str, location: str) -> str:
    """Return `script`. Raises ConfigError, which names `location`, if no words can be made in this script."""
    if script not in SCRIPTS:
        raise ConfigError(f"{location}: script {script!r} is not one of {', '.join(SCRIPTS)}")
    return script


def make_sentence(rng: random.Random, num_words: int, script: str = DEFAULT_SCRIPT) -> str:
    """Return a sentence of `num_words` words, with a period or a danda at its end."""
    if script == DEFAULT_SCRIPT:
        return " ".join(rng.choices(_ENGLISH_WORDS, k=num_words)).capitalize() + "."
    letters, vowel_signs = _letters(script)
    words = []
    for _ in range(num_words):
        syllables = (rng.choice(letters) + rng.choice(vowel_signs) for _ in range(rng.randint(1, _MAX_SYLLABLES)))
        words.append("".join(syllables))
    return " ".join(words) + ("." if script in ("Arab", "Olck", "Mtei", "Taml", "Telu", "Knda", "Mlym") else "।")


@cache
def _letters(script: str) -> tuple[list[str], list[str]]:
    """Return the letters and the vowel signs of a script. One sign is "", because a letter may have no vowel sign."""
    first, last = _BLOCKS[script]
    characters = [chr(code) for code in range(first, last + 1)]
    # A letter with a decomposition (those with a nukta) becomes two characters as soon as a server normalizes text.
    names = {each: unicodedata.name(each, "") for each in characters if not unicodedata.decomposition(each)}
    signs = [each for each, name in names.items() if " VOWEL SIGN " in name]
    letters = [each for each, name in names.items() if " LETTER " in name and unicodedata.category(each) == "Lo"]
    if signs:  # then a consonant is named with its inherent vowel, such as KA, and an independent vowel takes no sign
        letters = [each for each in letters if names[each].endswith("A") and names[each].split()[-1] not in ("A", "AA")]
    return letters, ["", *signs]


class _Line(NamedTuple):
    """One text of a file, and its right answer if there is one."""

    text: str
    answer: str | None


class Texts:
    """A source of texts: lines of `file`, each optionally with an answer after a tab, or sentences of random words."""

    def __init__(self, spec: str, fields: dict[str, str], language: str) -> None:
        self._words: IntRange = parse_range(fields.get("words", DEFAULT_WORDS), f"workload {spec}: words")
        self._script = check_script(fields.get("script", script_of(language)), f"workload {spec}")
        self._lines = _read_lines(Path(fields["file"])) if "file" in fields else []
        conflicting_names = [name for name in ("words", "script") if self._lines and name in fields]
        if conflicting_names:
            raise ConfigError(
                f"workload {spec}: {conflicting_names[0]} is for made sentences, and file gives the texts"
            )

    @property
    def are_graded(self) -> bool:
        """Return whether every text has an answer."""
        return bool(self._lines) and all(line.answer is not None for line in self._lines)

    def line(self, index: int, rng: random.Random) -> _Line:
        """Return text `index` of the run. Random sentences are drawn from `rng`."""
        if self._lines:
            return self._lines[index % len(self._lines)]
        return _Line(make_sentence(rng, rng.randint(*self._words), self._script), None)


def text_workload(
    config: LoadConfig,
    request: Callable[[str], Prompt],
    reader: MakeResponse,
    *,
    names: tuple[str, ...] = (),
    language: str = "",
) -> Workload:
    """Return a workload whose requests have one text each. Its answers are not graded.

    Raises ConfigError for a malformed description or an unreadable file.

    Args:
        config: The run's configuration, with the workload's description.
        request: Makes the request of a text.
        reader: Makes the readers of the answers.
        names: Further options that the description may have, beside TEXT_OPTIONS.
        language: FLORES code of the texts. An empty code gives Latin letters.
    """
    texts = Texts(config.workload, workload_fields(config.workload, (*names, *TEXT_OPTIONS)), language)

    def prompt(index: int) -> Prompt:
        return request(texts.line(index, random.Random(f"{config.seed}/{index}")).text)  # noqa: S311 - must repeat

    return Workload(published_workload(config.workload), prompt, False, reader)


def _read_lines(path: Path) -> list[_Line]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"texts {path}: cannot be read ({error})") from error
    parts = [line.rstrip("\r").partition("\t") for line in lines if line.strip()]
    if not parts:
        raise ConfigError(f"texts {path}: the file has no texts")
    return [_Line(text, answer if separator else None) for text, separator, answer in parts]


def make_grader(answers: list[str | None]) -> Callable[[str], bool] | None:
    """Return a function that grades an answer: its texts must equal `answers`, apart from spaces at the ends.

    Returns None if an answer is unknown.
    """
    if any(answer is None for answer in answers):
        return None
    expected = [str(answer).strip() for answer in answers]
    return lambda text: [line.strip() for line in text.split("\n")] == expected
