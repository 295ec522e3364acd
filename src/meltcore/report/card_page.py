"""A report card as one page: the verdict, every part with its own, the perf stories, and then each part's drawings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

import msgspec
from markupsafe import Markup

from meltcore.report import certificate_page, judge_page, page, score_page, tune_page
from meltcore.report.charts import Series
from meltcore.report.gaps_output import headline as gaps_headline
from meltcore.report.gaps_page import window_bar
from meltcore.report.judge_output import taking
from meltcore.report.score_charts import Curve
from meltcore.report.template import fill
from meltcore.results.card import CARD_FILE, CARD_PAGE, MADE_BY, Card, PartVerdict, StoryState
from meltcore.results.runfolder import write_whole
from meltcore.results.schema import Fingerprint, RunResult
from meltcore.results.score import ScoredRun
from meltcore.results.wording import fingerprint_rows, moment, number

STYLES: dict[PartVerdict, str] = {
    "PASS": "good",
    "WARN": "unsure",
    "FAIL": "bad",
    "UNKNOWN": "unsure",
    "RECORDED": "plain",
}
STORY_STYLES: dict[StoryState, str] = {"CONFIRMED": "good", "NOT CONFIRMED": "unsure", "CONTRADICTED": "bad"}
_MOST_CHARTS = 2  # of a run: throughput and time to first token; its own page has the others


@dataclass(frozen=True)
class Figure:
    """`legend`: (name, colour, dashed) of each line. A wide one has the whole width of the page."""

    title: str
    picture: Markup
    legend: Sequence[tuple[str, int, bool]] = ()
    note: str = ""
    wide: bool = True


@dataclass(frozen=True)
class Panel:
    """What one document shows: a few numbers, (label, figure, small print) each, and its drawings."""

    title: str
    line: str = ""
    tiles: Sequence[tuple[str, str, str]] = ()
    figures: Sequence[Figure] = field(default_factory=list)


def save_card(folder: Path, found: Card) -> Path:
    """Write `card.json` and `card.html` into `folder`, which is made where missing; the path of the page."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / CARD_FILE, msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    write_whole(folder / CARD_PAGE, render_card(found).encode())
    return folder / CARD_PAGE


def render_card(found: Card) -> str:
    """One HTML page: style and drawings inside, no script, nothing fetched."""
    fingerprint = _fingerprint(found)
    return fill(
        "card.html",
        own_style=Markup((resources.files("meltcore.report") / "certificate.css").read_text(encoding="utf-8")),
        card=found,
        taken=moment(found.taken),
        moment=moment,
        styles=STYLES,
        story_styles=STORY_STYLES,
        made_by=MADE_BY,
        panels=[*_evidence(found), *_hardware(found), *_speed(found), *_profiles(found)],
        fingerprint=[] if fingerprint is None else fingerprint_rows(fingerprint),
        file=CARD_FILE,
    )


def _evidence(found: Card) -> list[Panel]:
    """What the perf stories stand on: the comparisons' starts and the tunings' sweeps."""
    panels = []
    for each in found.comparisons:
        note = f"A dot is one fresh start, the bar their mean; {each.primary.better} is better. {taking(each)}"
        title = f"Comparison: {each.old_name} against {each.new_name}"
        panels.append(Panel(title, figures=[Figure(each.primary.name, judge_page.strip(each), note=note)]))
    for tuning in found.tunings:
        drawn = tune_page.chart(tuning)
        if drawn is not None:
            swept = tuning.kind == "batching"
            legend = [(name, colour, False) for name, colour in tune_page.legend(tuning)]
            title = f"Output tokens per second {'against sequences at once' if swept else 'of each precision'}"
            note = "the ring marks the knee, hollow dots missed the limits" if swept else "a gain needs a comparison"
            figure = Figure(title, drawn, legend, f"One start each; {note}.")
            panels.append(Panel(f"Tuning: {tuning.kind}", figures=[figure]))
        elif tuning.facts:
            tiles = [(fact.name, fact.value, fact.source) for fact in tuning.facts]
            panels.append(Panel(f"Tuning: {tuning.kind}", line=tuning.finding, tiles=tiles))
    return panels


def _hardware(found: Card) -> list[Panel]:
    if found.certificate is None:
        return []
    drawn = certificate_page.charts(found.certificate)
    figures = [Figure(title, picture, note=small) for title, small, picture in drawn]
    return [Panel("Certificate", tiles=certificate_page.tiles(found.certificate), figures=figures)]


def _speed(found: Card) -> list[Panel]:
    panels = [_run(run) for run in found.runs]
    return panels if found.benchmark is None else [_score(found.benchmark), *panels]


def _score(run: ScoredRun) -> Panel:
    score = run.score
    rate = ("Score", number(score.output_tokens_per_s), "output tokens/s sustained")
    figures = [
        Figure(each.title, each.picture, _legend(each.legend), wide=False)
        for each in score_page.charts(score.devices)[:_MOST_CHARTS]
    ]
    return Panel("GPU score", tiles=[rate, *score_page.tiles(score)], figures=figures)


def _run(run: RunResult) -> Panel:
    what = " ".join(str(each) for each in (run.command, run.settings.get("what")) if each)
    figures = [
        Figure(each.title, each.picture, _legend(each.legend), each.note, wide=False)
        for each in page.charts(run.levels)[:_MOST_CHARTS]
    ]
    title = f"{'Load' if run.command == 'load' else 'Evaluation'}: {what}"
    return Panel(title, tiles=page.tiles(run), figures=figures)


def _legend(lines: Sequence[Curve] | Sequence[Series]) -> list[tuple[str, int, bool]]:
    return [(line.name, line.colour, line.dashed) for line in lines]


def _profiles(found: Card) -> list[Panel]:
    return [
        Panel(
            f"Where the time of GPU {report.device} went",
            line=gaps_headline(report),
            figures=[Figure(profile.source, window_bar(report))],
        )
        for profile in found.profiles
        for report in profile.reports
    ]


def _fingerprint(found: Card) -> Fingerprint | None:
    """Of the certificate or snapshot, else of what was measured last."""
    if found.certificate is not None:
        return found.certificate.snapshot.fingerprint
    if found.snapshot is not None:
        return found.snapshot.fingerprint
    told: list[Fingerprint | None] = [run.fingerprint for run in found.runs]
    told += [tuning.fingerprint for tuning in found.tunings]
    told += [comparison.fingerprint for comparison in found.comparisons]
    told += [profile.fingerprint for profile in found.profiles]
    told += [found.benchmark.fingerprint] if found.benchmark is not None else []
    known = [each for each in told if each is not None]
    return max(known, key=lambda each: each.taken, default=None)
