import pytest

from meltcore.measure.documents.schema import Distribution, LevelResult
from meltcore.measure.documents.values.definitions import DEFINITIONS, define, definitions_text
from meltcore.measure.documents.values.formatting import (
    format_duration,
    format_number,
    format_percent,
    format_percentile,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0, "0"), (0.0123, "0.01"), (3.456, "3.46"), (45.67, "45.7"), (1234.5, "1,234"), (1e6, "1,000,000")],
)
def test_numbers_keep_the_digits_that_matter(value: float | None, text: str) -> None:
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("share", "text"), [(None, "–"), (1.0, "100 %"), (0.995, "99.50 %"), (0.999999, "99.99 %"), (0.0, "0 %")]
)
def test_share_is_100_percent_only_where_nothing_is_missing(share: float | None, text: str) -> None:
    assert format_percent(share) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.42, "0.4 s"), (12.3, "12 s"), (59.7, "1 min 0 s"), (245, "4 min 5 s"), (7380, "2 h 3 min")]
)
def test_durations_read_as_people_say_them(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_too_few_samples_are_not_the_same_as_none() -> None:
    assert format_percentile(Distribution(n=50, p50=1.5), "p99") == "n too small"
    assert format_percentile(Distribution(), "p99") == "–"
    assert format_percentile(Distribution(n=50, p50=1.5), "p50") == "1.50"


def test_every_definition_is_of_a_field_that_results_have() -> None:
    fields = set(LevelResult.__struct_fields__)
    assert {item.key for item in DEFINITIONS} <= fields


def test_help_quotes_the_definition() -> None:
    assert define("ttft_ms").text in " ".join(definitions_text("ttft_ms").split())
    assert all(f"  {item.name} (" in definitions_text() for item in DEFINITIONS)
    assert max(map(len, definitions_text(width=60).splitlines())) <= 60
