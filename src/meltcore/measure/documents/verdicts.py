"""Defines the verdicts of all documents: their words, colors, exit codes, and meanings as evidence of a card.

Result files store the words as text, so a word never changes its spelling.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple, TypeVar

# Of badges, tags and boxes of a page. "faint" and "warning" color the text of a table cell alone.
Style = Literal["good", "bad", "unsure", "plain", "faint", "warning", ""]
STYLE_COLORS: dict[Style, str] = {
    "good": "green",
    "bad": "bold red",
    "unsure": "bold yellow",
    "plain": "dim",
    "faint": "dim",
    "warning": "red",
    "": "bold",
}

# Of a check, and of what is made of checks: gates, certificates, evidence, cards, the nodes of a cluster.
CheckVerdict = Literal[
    "PASS", "WARN", "FAIL", "UNKNOWN", "INVALID", "INCOMPLETE", "NOT RUN", "NOT MEASURED", "RECORDED", "NOT_APPLICABLE"
]  # fmt: skip
# Of a measurement: of a run and its levels, a comparison, a GPU's health, a submission, a perf story.
Verdict = Literal[
    "OK", "CLIENT_BOUND", "NO_TEXT", "SERVER_DIED", "PARTIAL", "FAILED",
    "REGRESSION", "IMPROVEMENT", "NO EVIDENCE", "UNDERPOWERED",
    "HEALTHY", "DEGRADED", "UNKNOWN",
    "ACCEPTED", "REFUSED", "NOT CHECKED",
    "CONFIRMED", "NOT CONFIRMED", "CONTRADICTED",
]  # fmt: skip
_AnyVerdict = TypeVar("_AnyVerdict", Verdict, CheckVerdict)

SCORED: tuple[Verdict, ...] = ("OK", "CLIENT_BOUND")  # what such a level or run measured counts
CUT_SHORT: tuple[Verdict, ...] = ("PARTIAL", "SERVER_DIED")  # such a level or run did not reach its end


class VerdictMeaning(NamedTuple):
    """The meaning of a verdict: its style on a page, a command's exit code, and the verdict of a card's evidence."""

    style: Style
    exit_code: int
    check: CheckVerdict


# Words that judge the same thing follow each other from the worst on. 130 is an interrupt, as in shells; of a
# certificate, 0 to 3 are what Nagios and compatible monitors expect. 2 is also every command's "could not run".
MEANINGS: dict[str, VerdictMeaning] = {
    "SERVER_DIED": VerdictMeaning("bad", 1, "FAIL"),
    "PARTIAL": VerdictMeaning("unsure", 130, "UNKNOWN"),
    "FAILED": VerdictMeaning("bad", 1, "FAIL"),
    # The server counted tokens of answers that had no text, so what it generated was not seen.
    "NO_TEXT": VerdictMeaning("unsure", 0, "WARN"),
    "CLIENT_BOUND": VerdictMeaning("unsure", 0, "WARN"),
    "OK": VerdictMeaning("good", 0, "PASS"),
    "REGRESSION": VerdictMeaning("bad", 1, "FAIL"),
    "UNDERPOWERED": VerdictMeaning("unsure", 3, "UNKNOWN"),  # no pass and no failure of the new side
    "NO EVIDENCE": VerdictMeaning("", 0, "PASS"),
    "IMPROVEMENT": VerdictMeaning("good", 0, "PASS"),
    "REFUSED": VerdictMeaning("bad", 1, "FAIL"),
    "NOT CHECKED": VerdictMeaning("unsure", 0, "NOT RUN"),  # collected without rules
    "ACCEPTED": VerdictMeaning("good", 0, "PASS"),
    "CONTRADICTED": VerdictMeaning("bad", 1, "FAIL"),
    "NOT CONFIRMED": VerdictMeaning("unsure", 3, "UNKNOWN"),
    "CONFIRMED": VerdictMeaning("good", 0, "PASS"),
    "DEGRADED": VerdictMeaning("bad", 1, "FAIL"),
    "FAIL": VerdictMeaning("bad", 2, "FAIL"),
    "UNKNOWN": VerdictMeaning("unsure", 3, "UNKNOWN"),
    "INVALID": VerdictMeaning("unsure", 3, "INVALID"),  # another program used the GPU during the measurement
    "INCOMPLETE": VerdictMeaning("unsure", 4, "INCOMPLETE"),  # nothing found is wrong, and required evidence is missing
    "NOT RUN": VerdictMeaning("unsure", 3, "NOT RUN"),
    "NOT MEASURED": VerdictMeaning("unsure", 3, "NOT MEASURED"),
    "WARN": VerdictMeaning("unsure", 1, "WARN"),
    "PASS": VerdictMeaning("good", 0, "PASS"),
    "HEALTHY": VerdictMeaning("good", 0, "PASS"),
    # Neutral words count only where nothing else is present. RECORDED: a usable number or record by which nothing is
    # judged. NOT_APPLICABLE: this machine lacks the feature.
    "RECORDED": VerdictMeaning("plain", 3, "RECORDED"),
    "NOT_APPLICABLE": VerdictMeaning("plain", 3, "NOT_APPLICABLE"),
}
SEVERITY = list(MEANINGS)


def worst_verdict(verdicts: Iterable[_AnyVerdict], default: _AnyVerdict) -> _AnyVerdict:
    """Return the worst of `verdicts`, or `default` without verdicts."""
    return min(verdicts, key=SEVERITY.index, default=default)


def style_of(word: str) -> Style:
    """Return the style of a verdict. An unknown word gets the style of a fault."""
    return MEANINGS[word].style if word in MEANINGS else "bad"
