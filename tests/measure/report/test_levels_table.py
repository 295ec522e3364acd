import io

from rich.console import Console

from meltcore.measure.documents.schema import ClientLoad, Distribution, LevelResult
from meltcore.measure.report.load.levels import levels_tables
from meltcore.measure.report.page.console import print_table


def wide_level(**changes: object) -> LevelResult:
    """The widest numbers of an ordinary demo."""
    fields: dict[str, object] = {
        "concurrency": 10_000,
        "requests": 10_000,
        "succeeded": 10_000,
        "failed": 0,
        "peak_in_flight": 10_000,
        "accuracy": 0.9951,
        "duration_s": 60.0,
        "output_tokens_per_s": 12_345.0,
        "total_tokens_per_s": 1.0,
        "prompt_tokens": 1,
        "output_tokens": 1,
        "ttft_ms": Distribution(n=10_000, p50=32_123.0, p99=58_123.0),
        "itl_ms": Distribution(n=500, p50=123.0),
        "client": ClientLoad(cpu_utilization=0.5),
    }
    return LevelResult(**(fields | changes))  # type: ignore[arg-type]


def printed(levels: list[LevelResult], width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    [table] = levels_tables(levels)
    print_table(table, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_table_fits_80_columns_without_cutting_a_number() -> None:
    text = printed([wide_level(), wide_level(concurrency=10)])
    assert "…" not in text
    for number in ("10,000", "99.51 %", "12,345", "32,123", "58,123", "123", "n<", "OK"):
        assert number in text


def test_goodput_and_accuracy_show_on_80_columns() -> None:
    text = printed([wide_level(slo={"ttft": 2000.0}, goodput_per_s=1234.0)])
    head, _, row = text.partition("10,000")
    assert "good" in head
    assert "1,234" in row
    assert "right" in head
    assert "goodput" not in head
    assert "…" not in text
    assert "good" not in printed([wide_level()])


def test_failures_and_verdicts_show() -> None:
    text = printed([wide_level(failed=7, verdict="CLIENT_BOUND")], width=100)
    assert " 7 " in text
    assert "CLIENT_BOUND" in text


def test_open_loop_is_told_by_its_rate() -> None:
    text = printed([wide_level(load_kind="open", rate_per_s=12.5, concurrency=0)])
    assert "req/s" in text
    assert "12.5" in text


def test_percentile_that_a_sample_cannot_carry_is_explained_where_one_is_left_out() -> None:
    words = "n<: too few requests for that percentile"
    assert words in printed([wide_level()])
    assert words not in printed([wide_level(itl_ms=Distribution(n=10_000, p50=1.0, p99=2.0))])
