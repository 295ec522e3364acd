"""Perf stories: which setting was changed, what it gave, and what speaks for that.

A tuning finds a setting with one start each, which proves nothing; a comparison of fresh starts confirms it, or does
not. The two belong together where the comparison changed the command line by the words that the tuning tried.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from difflib import SequenceMatcher

from meltcore.report.judge_output import headline
from meltcore.report.tune_rows import setting_of
from meltcore.results.card import Story, StoryState
from meltcore.results.judgement import Judgement
from meltcore.results.tuning import Tuning, TuningPoint, gain
from meltcore.results.wording import change, load_words, number

_STATES: dict[str, StoryState] = {"IMPROVEMENT": "CONFIRMED", "REGRESSION": "CONTRADICTED"}
_SAME_LOAD = ("workload", "concurrency", "max_tokens", "seed")


def stories(tunings: Sequence[Tuning], comparisons: Sequence[Judgement]) -> list[Story]:
    """One of every comparison that changed the command, then one of every tuning that no comparison looked at."""
    told = [
        _judged(place, found, tunings)
        for place, found in enumerate(comparisons)
        if changed_words(found.old_command, found.new_command) != ([], [])
    ]
    looked_at = {story.tuning for story in told}
    alone = [_tuned(place, found) for place, found in enumerate(tunings) if place not in looked_at]
    return told + [story for story in alone if story is not None]


def changed_words(old: str, new: str) -> tuple[list[str], list[str]]:
    """The words of the old command that the new one lacks, and the other way round, in their order."""
    before, after = shlex.split(old), shlex.split(new)
    gone: list[str] = []
    came: list[str] = []
    for kind, first, last, begin, end in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if kind != "equal":
            gone += before[first:last]
            came += after[begin:end]
    return gone, came


def _judged(place: int, found: Judgement, tunings: Sequence[Tuning]) -> Story:
    gone, came = changed_words(found.old_command, found.new_command)
    story = Story(
        change=_in_words(gone, came),
        workload=load_words(found.load),
        state=_STATES.get(found.verdict, "NOT CONFIRMED") if not found.doubts else "NOT CONFIRMED",
        judged=f"{found.verdict}: {headline(found)}",
        comparison=place,
    )
    for at, tuning in enumerate(tunings):
        point = next((each for each in tuning.points if each.words and each.words == came), None)
        if point is not None and not gone:
            story.tuning = at
            story.tuned = _one_start(tuning, point)
            if any(tuning.load.get(name) != found.load.get(name) for name in _SAME_LOAD):
                story.tuned += f" It was tuned on another load: {load_words(tuning.load) or 'not told'}."
            break
    return story


def _tuned(place: int, found: Tuning) -> Story | None:
    """Of a tuning alone: its knee where it has one, or else its fastest setting. None where nothing was gained."""
    ran = [point for point in found.points if point.ok and point.words and point.output_tokens_per_s]
    if not ran or found.shipped is None:
        return None
    fastest = max(ran, key=lambda point: point.output_tokens_per_s or 0.0)
    point = fastest if found.knee is None else found.points[found.knee]
    if (gain(point, found.shipped) or 0.0) <= 0:
        return None
    return Story(
        change=_in_words([], point.words),
        workload=load_words(found.load),
        state="NOT CONFIRMED",
        tuned=_one_start(found, point),
        judged="No comparison of fresh starts changed just this.",
        tuning=place,
    )


def _one_start(tuning: Tuning, point: TuningPoint) -> str:
    shipped = tuning.shipped
    rate = (
        f"tune {tuning.kind}, one start each: {setting_of(point)} gave {number(point.output_tokens_per_s)} output tok/s"
    )
    gained = gain(point, shipped)
    if shipped is None or gained is None:
        return f"{rate}."
    return f"{rate}, {change(gained)} on the server as it is shipped ({number(shipped.output_tokens_per_s)})."


def _in_words(gone: Sequence[str], came: Sequence[str]) -> str:
    if not gone:
        return f"with {' '.join(came)}"
    return f"{' '.join(came)} in place of {' '.join(gone)}" if came else f"without {' '.join(gone)}"
