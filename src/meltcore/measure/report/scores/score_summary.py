"""The summary of a GPU score: totals, ratios to references, and the expectations of its sustained window."""

from __future__ import annotations

from meltcore.measure.documents.score import Score
from meltcore.measure.documents.values.score_references import ratio_line
from meltcore.measure.documents.values.score_summary import expectations, totals, totals_line
from meltcore.measure.documents.verdicts import style_of
from meltcore.measure.report.page.page import Block, Checks, Section, Text


def summary_sections(score: Score) -> list[Block]:
    """Build a section with the totals and the three expectations; no section if no device completed a window."""
    sums = totals(score)
    if not sums.output_tokens:
        return []
    lines = [Text(line, "lead") for line in (totals_line(sums), *map(ratio_line, score.references))]
    return [Section("Summary", [*lines, *expectation_blocks(score)])]


def expectation_blocks(score: Score) -> list[Block]:
    """Build one line per expectation with its verdict, and the rules in small print."""
    results = expectations(score)
    checks = [
        (
            style_of(expectation.verdict),
            expectation.verdict,
            expectation.name,
            f"expected {expectation.expected}: seen {expectation.seen}".replace("seen not measured", "not measured"),
        )
        for expectation in results
    ]
    rules = "; ".join(f"{expectation.name}: {expectation.rule}" for expectation in results)
    return [Checks(checks, console=True), Text(f"Rules: {rules}.", "small")]
