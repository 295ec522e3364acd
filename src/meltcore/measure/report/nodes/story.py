"""Builds perf stories: a changed setting, its gain, and the evidence for the gain.

A tuning finds a setting with one start each, which proves nothing; a comparison of fresh starts confirms it, or does
not. The two form one story if the comparison changed the command line by the arguments that the tuning tried.
"""

from __future__ import annotations

from collections.abc import Sequence

from meltcore.measure.documents.card import Story
from meltcore.measure.documents.comparison import ComparisonResult
from meltcore.measure.documents.tuning import Tuning, TuningPoint, gain, repeats_default
from meltcore.measure.documents.values.formatting import format_change, format_load_settings, format_number
from meltcore.measure.documents.verdicts import Verdict
from meltcore.measure.report.comparisons.comparison import changed_arguments, comparison_headline

_STORY_STATES: dict[str, Verdict] = {"IMPROVEMENT": "CONFIRMED", "REGRESSION": "CONTRADICTED"}
# Below it a gain of one start each is no story: two starts of one setting may differ as much.
_LEAST_ONE_START_GAIN = 0.05
_SAME_LOAD = ("workload", "concurrency", "max_tokens", "seed")


def build_stories(tunings: Sequence[Tuning], comparisons: Sequence[ComparisonResult]) -> list[Story]:
    """Return one story per comparison that changed the command, then one per tuning without a comparison."""
    comparison_stories = [
        _comparison_story(index, comparison, tunings)
        for index, comparison in enumerate(comparisons)
        if changed_arguments(comparison.old_command, comparison.new_command) != ([], [])
    ]
    compared_tunings = {story.tuning for story in comparison_stories}
    tuning_stories = [
        _tuning_story(index, tuning) for index, tuning in enumerate(tunings) if index not in compared_tunings
    ]
    return comparison_stories + [story for story in tuning_stories if story is not None]


def _comparison_story(index: int, comparison: ComparisonResult, tunings: Sequence[Tuning]) -> Story:
    removed, added = changed_arguments(comparison.old_command, comparison.new_command)
    story = Story(
        change=_describe_change(removed, added),
        workload=format_load_settings(comparison.load),
        state=_STORY_STATES.get(comparison.verdict, "NOT CONFIRMED") if not comparison.doubts else "NOT CONFIRMED",
        compared=f"{comparison.verdict}: {comparison_headline(comparison)}",
        comparison=index,
    )
    for tuning_index, tuning in enumerate(tunings):
        point = next((candidate for candidate in tuning.points if candidate.args and candidate.args == added), None)
        if point is not None and not removed:
            story.tuning = tuning_index
            story.tuned = _describe_tuning(tuning, point)
            if any(tuning.load.get(name) != comparison.load.get(name) for name in _SAME_LOAD):
                story.tuned += f" It was tuned on another load: {format_load_settings(tuning.load) or 'not told'}."
            break
    return story


def _tuning_story(index: int, tuning: Tuning) -> Story | None:
    """Return the story of a tuning without a comparison, or None if no setting gains more than a repeated start may.

    The story is about the tuning's knee, else about its fastest setting.
    """
    successful_points = [
        point
        for point in tuning.points
        if point.ok and point.args and point.output_tokens_per_s and not repeats_default(tuning, point)
    ]
    if not successful_points or tuning.default is None:
        return None
    fastest = max(successful_points, key=lambda point: point.output_tokens_per_s or 0.0)
    knee = fastest if tuning.knee is None else tuning.points[tuning.knee]
    point = fastest if repeats_default(tuning, knee) else knee
    if (gain(point, tuning.default) or 0.0) < _LEAST_ONE_START_GAIN:
        return None
    return Story(
        change=_describe_change([], point.args),
        workload=format_load_settings(tuning.load),
        state="NOT CONFIRMED",
        tuned=_describe_tuning(tuning, point),
        compared="No comparison of fresh starts changed just this.",
        tuning=index,
    )


def _describe_tuning(tuning: Tuning, point: TuningPoint) -> str:
    default = tuning.default
    rate = format_number(point.output_tokens_per_s)
    line = f"tune {tuning.kind}, one start each: {point.label} gave {rate} output tok/s"
    relative_gain = gain(point, default)
    if default is None or relative_gain is None:
        return f"{line}."
    return (
        f"{line}, {format_change(relative_gain)} over the default settings "
        f"({format_number(default.output_tokens_per_s)})."
    )


def _describe_change(removed: Sequence[str], added: Sequence[str]) -> str:
    if not removed:
        return f"with {' '.join(added)}"
    return f"{' '.join(added)} in place of {' '.join(removed)}" if added else f"without {' '.join(removed)}"
