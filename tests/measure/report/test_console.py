"""Tables of numbers on a console of 80 columns: none is cut."""

from __future__ import annotations

import io

import msgspec
from rich.console import Console
from sample_documents import comparison, precisions

from meltcore.measure.documents.tuning import AnswerComparison
from meltcore.measure.report.comparisons.comparison import comparison_page
from meltcore.measure.report.comparisons.tuning import tuning_page
from meltcore.measure.report.page.console import print_page


def test_comparison_of_five_digits_fits() -> None:
    found = comparison()
    row = msgspec.structs.replace(found.primary, load="concurrency 1000", old=22836.0, new=27140.0, change=0.188)
    console = Console(file=io.StringIO(), width=80)
    print_page(comparison_page(msgspec.structs.replace(found, rows=[row])), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "22,836" in text
    assert "27,140" in text
    assert "…" not in text


def test_all_columns_of_precisions_fit() -> None:
    found = precisions()
    answers = AnswerComparison(
        asked=200, correct=199, failed=1, identical=187, logprob_diff_mean=1.5e-06, logprob_diff_max=0.00027
    )
    points = [
        msgspec.structs.replace(point, output_tokens_per_s=22426.0, ttft_ms=413.0, itl_ms=10.0, answers=answers)
        for point in found.points
        if point.ok
    ]
    console = Console(file=io.StringIO(), width=80)
    print_page(tuning_page(msgspec.structs.replace(found, points=points)), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "199/200" in text
    assert "…" not in text
