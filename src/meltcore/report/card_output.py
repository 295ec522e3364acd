"""A report card on the console: a line a part, the perf stories, and the verdict last."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from meltcore.results.card import MADE_BY, Card, PartVerdict

_COLOURS: dict[PartVerdict, str] = {
    "PASS": "green",
    "WARN": "yellow",
    "FAIL": "bold red",
    "UNKNOWN": "bold magenta",
    "RECORDED": "dim",
}


def print_card(found: Card, console: Console) -> None:
    """Every part with its verdict and why it is no pass, then what is missing."""
    for doubt in found.doubts:
        console.print(f"[red]not of one machine[/]: {escape(doubt)}", highlight=False)
    for part in found.parts:
        console.print(
            f"[{_COLOURS[part.verdict]}]{part.verdict:<8}[/]  {part.kind:<11}  {escape(part.line)}", highlight=False
        )
        for reason in part.reasons:
            console.print(f"          - {escape(reason)}", highlight=False)
    for kind in found.missing:
        console.print(f"MISSING   {kind:<11}  {MADE_BY[kind]}", style="dim", highlight=False)
    for story in found.stories:
        console.print(f"\n{story.state}: {escape(story.change)}", highlight=False)
        for line in (story.tuned, story.judged):
            if line:
                console.print(f"  {escape(line)}", highlight=False)
    console.print(f"\n[{_COLOURS[found.verdict]}]{found.verdict}[/]  {escape(found.why)}", highlight=False)
