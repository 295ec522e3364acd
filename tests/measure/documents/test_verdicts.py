"""The words with which documents judge: each has a meaning, and the worst of several is found."""

from typing import get_args

import pytest

from meltcore.measure.documents.verdicts import MEANINGS, CheckVerdict, Verdict, worst_verdict

# Words that judge the same thing, from the worst on.
FAMILIES = (
    ("SERVER_DIED", "PARTIAL", "FAILED", "NO_TEXT", "CLIENT_BOUND", "OK"),
    ("REGRESSION", "UNDERPOWERED", "NO EVIDENCE", "IMPROVEMENT"),
    ("DEGRADED", "UNKNOWN", "HEALTHY"),
    ("FAIL", "UNKNOWN", "INVALID", "INCOMPLETE", "NOT RUN", "WARN", "PASS", "RECORDED", "NOT_APPLICABLE"),
    ("FAIL", "NOT MEASURED", "PASS"),
)


def test_every_word_has_a_meaning() -> None:
    assert set(MEANINGS) == {*get_args(Verdict), *get_args(CheckVerdict)}
    checks = set(get_args(CheckVerdict))
    assert {word: each.check for word, each in MEANINGS.items() if word in checks} == {word: word for word in checks}
    assert {each.check for each in MEANINGS.values()} == checks


def test_only_what_passes_ends_a_command_with_zero() -> None:
    green = {word for word, each in MEANINGS.items() if each.style == "good"}
    assert green <= {word for word, each in MEANINGS.items() if each.exit_code == 0}
    red = {word for word, each in MEANINGS.items() if each.style == "bad"}
    assert red == {word for word, each in MEANINGS.items() if each.check == "FAIL"}
    assert all(MEANINGS[word].exit_code in (1, 2) for word in red)


@pytest.mark.parametrize("words", FAMILIES)
def test_worst_of_several_is_found_in_any_order(words: tuple[str, ...]) -> None:
    for index, word in enumerate(words):
        assert worst_verdict([*words[index:]][::-1], "UNKNOWN") == worst_verdict(words[index:], "UNKNOWN") == word


def test_without_words_the_given_one_stands() -> None:
    assert worst_verdict([], "PARTIAL") == "PARTIAL"
    assert worst_verdict(["OK"], "PARTIAL") == "OK"
