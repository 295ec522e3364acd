"""The numbers of a level, from records made by hand."""

from array import array

import pytest

from meltcore.load.config import Level
from meltcore.load.record import Record
from meltcore.load.selfcheck import ClientWatch
from meltcore.load.summary import LevelRun, itl_ms, summarise
from meltcore.results.schema import LevelResult

CALM = ClientWatch(watched_s=5.0, cpu_s=0.5, lags_s=[0.001] * 500)


def answer(index: int = 0, *, start: float = 10.0, queue: float = 0.0, times: list[float], tokens: list[int]) -> Record:
    """A whole answer whose text chunks come at `times` and bring the server's count to `tokens`."""
    return Record(
        index=index,
        intended_s=start,
        sent_s=start + queue,
        first_text_s=times[0],
        ended_s=times[-1],
        status=200,
        prompt_tokens=7,
        output_tokens=tokens[-1],
        finish_reason="length",
        chunk_times=array("d", times).tobytes(),
        chunk_tokens=array("I", tokens).tobytes(),
    )


def level(records: list[Record], *, concurrency: int = 2, judged: bool = False, **other: object) -> LevelResult:
    fields = {"watches": [CALM], "slo_ms": {}, **other}
    planned = Level(concurrency=concurrency, rate=None, requests=len(records))
    return summarise(LevelRun(level=planned, records=records, released_s=10.0, judged=judged, **fields))  # type: ignore[arg-type]


def test_latencies_count_from_the_intended_start() -> None:
    result = level([answer(queue=0.5, times=[11.0, 11.1, 11.2], tokens=[1, 2, 3])])
    assert result.ttft_ms.mean == pytest.approx(1000)
    assert result.e2e_ms.mean == pytest.approx(1200)
    assert result.queue_delay_ms.mean == pytest.approx(500)
    assert result.tpot_ms.mean == pytest.approx(100)
    assert result.itl_ms.mean == pytest.approx(100)


def test_a_gap_is_shared_among_the_tokens_it_brought() -> None:
    record = answer(times=[11.0, 11.4, 11.5], tokens=[1, 5, 6])
    assert itl_ms(record) == pytest.approx([100, 100, 100, 100, 100])
    result = level([record])
    assert result.itl_unit == "token"
    assert result.chunk_to_token_ratio == pytest.approx(0.5)


def test_without_token_counts_gaps_are_per_chunk_and_labelled() -> None:
    record = answer(times=[11.0, 11.4, 11.5], tokens=[1, 5, 6])
    record.chunk_tokens = b""
    result = level([record, answer(times=[11.0, 11.1], tokens=[1, 2])])
    assert result.itl_unit == "chunk"
    assert result.itl_ms.n == 3


def test_throughput_is_over_the_whole_level_and_failures_stay_in_the_denominators() -> None:
    right = answer(times=[11.0, 12.0], tokens=[1, 4])
    right.correct = True
    failed = Record(index=1, intended_s=10.0, sent_s=10.0, ended_s=14.0, failure="http 429", detail="full")
    result = level([right, failed], judged=True, slo_ms={"ttft": 2000.0})
    assert (result.requests, result.succeeded, result.failed) == (2, 1, 1)
    assert result.duration_s == pytest.approx(4)
    assert result.output_tokens_per_s == pytest.approx(1)
    assert result.total_tokens_per_s == pytest.approx(11 / 4)
    assert result.accuracy == 0.5
    assert result.goodput_per_s == pytest.approx(1 / 4)
    assert result.failures == {"http 429: full": 1}
    assert result.verdict == "FAILED"


@pytest.mark.parametrize(
    ("slo", "good"),
    [({"ttft": 1001.0}, 1), ({"ttft": 999.0}, 0), ({"tpot": 101.0, "ttft": 1001.0}, 1), ({"itl": 99.0}, 0)],
)
def test_goodput_counts_requests_that_meet_every_limit(slo: dict[str, float], good: int) -> None:
    result = level([answer(times=[11.0, 11.1, 11.2], tokens=[1, 2, 3])], slo_ms=slo)
    assert result.goodput_per_s == pytest.approx(good / 1.2)


def test_percentiles_stay_unsaid_for_small_samples() -> None:
    result = level([answer(index, times=[11.0, 11.1], tokens=[1, 2]) for index in range(64)])
    assert result.ttft_ms.p90 is not None
    assert result.ttft_ms.p95 is None


def test_end_tokens_without_text_still_count_in_the_time_line() -> None:
    record = answer(times=[11.0, 11.5], tokens=[1, 2])
    record.output_tokens = 3
    first, second = level([record]).timeline  # 1.5 s: a bucket of 1 s and one of 0.5 s
    assert first.output_tokens_per_s * 1.0 + second.output_tokens_per_s * 0.5 == pytest.approx(3)


LATE = ClientWatch(watched_s=5.0, cpu_s=0.5, lags_s=[0.001] * 400 + [0.2] * 20)
BUSY = ClientWatch(watched_s=5.0, cpu_s=4.9, lags_s=[])


@pytest.mark.parametrize(("watch", "word"), [(LATE, "event loop"), (BUSY, "98% of a core")])
def test_a_late_or_busy_client_marks_the_level(watch: ClientWatch, word: str) -> None:
    records = [answer(index, times=[11.0, 11.01], tokens=[1, 2]) for index in range(20)]
    result = level(records, watches=[CALM, watch])
    assert result.verdict == "CLIENT_BOUND"
    assert word in result.reasons[0]


def test_lag_far_below_the_latencies_does_not_mark_the_level() -> None:
    slow = ClientWatch(watched_s=5.0, cpu_s=0.5, lags_s=[0.05] * 400)
    records = [answer(index, times=[12.0, 14.0], tokens=[1, 2]) for index in range(20)]
    assert level(records, watches=[slow]).verdict == "OK"


def test_a_dead_server_outweighs_everything_and_its_time_is_told() -> None:
    failed = Record(index=0, intended_s=10.0, sent_s=10.0, ended_s=14.0, failure="connection reset")
    result = level([failed], server_died_s=12.5, interrupted=True, watches=[BUSY])
    assert result.verdict == "SERVER_DIED"
    assert any("died 2.5 s after" in reason for reason in result.reasons)
