"""Metrics of a level, from handmade records."""

import itertools
import random
from array import array

import pytest

from meltcore.measure.documents.schema import LevelResult
from meltcore.measure.load.config import Level
from meltcore.measure.load.record import RequestRecord
from meltcore.measure.load.run.client_monitor import ClientUsage
from meltcore.measure.load.run.summary import LevelMeasurement, TextArrivals, summarize

CALM = ClientUsage(duration_s=5.0, cpu_s=0.5, lags_s=[0.001] * 500)


def answer(
    index: int = 0, *, start: float = 10.0, queue: float = 0.0, times: list[float], tokens: list[int]
) -> RequestRecord:
    """A complete answer whose events arrive at `times` and raise the server's count to `tokens`."""
    return RequestRecord(
        index=index,
        intended_s=start,
        sent_s=start + queue,
        first_text_s=times[0],
        ended_s=times[-1],
        status=200,
        prompt_tokens=7,
        output_tokens=tokens[-1],
        finish_reason="length",
        event_times=array("d", times).tobytes(),
        event_tokens=array("I", tokens).tobytes(),
    )


def level(records: list[RequestRecord], *, concurrency: int = 2, graded: bool = False, **other: object) -> LevelResult:
    fields = {"client_usages": [CALM], "slo_ms": {}, **other}
    planned = Level(concurrency=concurrency, rate=None, num_requests=len(records))
    return summarize(LevelMeasurement(level=planned, records=records, released_s=10.0, is_graded=graded, **fields))  # type: ignore[arg-type]


def test_latencies_count_from_the_intended_start() -> None:
    result = level([answer(queue=0.5, times=[11.0, 11.1, 11.2], tokens=[1, 2, 3])])
    assert result.ttft_ms.mean == pytest.approx(1000)
    assert result.e2e_ms.mean == pytest.approx(1200)
    assert result.queue_delay_ms.mean == pytest.approx(500)
    assert result.tpot_ms.mean == pytest.approx(100)
    assert result.itl_ms.mean == pytest.approx(100)


def test_gap_is_divided_among_the_tokens_of_its_event() -> None:
    record = answer(times=[11.0, 11.4, 11.5], tokens=[1, 5, 6])
    assert TextArrivals.from_records([record]).itl_ms == pytest.approx([100, 100, 100, 100, 100])
    result = level([record])
    assert result.itl_unit == "token"
    assert result.events_per_token == pytest.approx(0.5)


def test_without_token_counts_itl_is_per_event() -> None:
    record = answer(times=[11.0, 11.4, 11.5], tokens=[1, 5, 6])
    record.event_tokens = b""
    result = level([record, answer(times=[11.0, 11.1], tokens=[1, 2])])
    assert result.itl_unit == "event"
    assert result.itl_ms.n == 3


def test_throughput_covers_the_whole_level_and_failures_stay_in_the_denominators() -> None:
    right = answer(times=[11.0, 12.0], tokens=[1, 4])
    right.correct = True
    failed = RequestRecord(index=1, intended_s=10.0, sent_s=10.0, ended_s=14.0, failure="http 429", detail="full")
    result = level([right, failed], graded=True, slo_ms={"ttft": 2000.0})
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


def test_percentiles_of_small_samples_are_none() -> None:
    result = level([answer(index, times=[11.0, 11.1], tokens=[1, 2]) for index in range(64)])
    assert result.ttft_ms.p90 is not None
    assert result.ttft_ms.p95 is None


def test_end_tokens_without_text_count_in_the_timeline() -> None:
    record = answer(times=[11.0, 11.5], tokens=[1, 2])
    record.output_tokens = 3
    first, second = level([record]).timeline  # 1.5 s: a bucket of 1 s and one of 0.5 s
    assert first.output_tokens_per_s * 1.0 + second.output_tokens_per_s * 0.5 == pytest.approx(3)


def test_events_read_together_are_one_arrival() -> None:
    record = answer(times=[11.0, 11.0, 11.1, 11.1, 11.1, 11.1, 11.2], tokens=[1, 2, 3, 4, 5, 6, 10])
    result = level([record])
    assert TextArrivals.from_records([record]).itl_ms == pytest.approx([25] * 8), "no gap reads 0 ms"
    assert (result.event_gap_ms.n, result.event_gap_ms.mean) == (2, pytest.approx(100))
    assert result.tokens_per_event == pytest.approx(10 / 3)
    assert result.events_per_token == pytest.approx(7 / 10)


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_arrivals_of_many_answers_are_those_of_each(seed: int, counted: bool) -> None:
    """No gap reaches from one answer into the next, whether that one began earlier, later or at the same time."""
    draw = random.Random(seed)
    records = []
    for index in range(20):
        count = draw.choice([1, 1, 2, 9])
        times = sorted(draw.choice([11.0, 11.1, 11.2, 11.5]) for _ in range(count))
        tokens = list(itertools.accumulate(draw.randint(0, 3) for _ in range(count)))
        records.append(answer(index, times=times, tokens=tokens))
    together = TextArrivals.from_records(records, use_token_counts=counted)
    each = [TextArrivals.from_records([record], use_token_counts=counted) for record in records]
    assert together.num_arrivals == sum(one.num_arrivals for one in each)
    for name in ("times_s", "gaps_ms", "tokens_per_gap", "itl_ms"):
        assert getattr(together, name).tolist() == [value for one in each for value in getattr(one, name).tolist()]


def test_timeline_itl_leaves_out_tokens_after_the_last_text() -> None:
    record = answer(times=[10.1, 10.2, 10.3], tokens=[1, 2, 3])
    record.output_tokens = 20
    result = level([record])
    assert result.timeline[0].itl_ms == pytest.approx(100)
    assert result.itl_ms.mean == pytest.approx(100)


def test_answers_without_text_count_their_tokens_and_meet_no_limit() -> None:
    textless = RequestRecord(index=1, intended_s=10.0, sent_s=10.0, ended_s=12.0, status=200, output_tokens=9)
    result = level([answer(times=[11.0, 12.0], tokens=[1, 2]), textless], slo_ms={"e2e": 9000.0})
    assert (result.verdict, result.output_tokens, result.ttft_ms.n, result.e2e_ms.n) == ("NO_TEXT", 11, 1, 2)
    assert result.goodput_per_s == pytest.approx(1 / 2)
    assert sum(point.output_tokens_per_s for point in result.timeline) == pytest.approx(11)
    alone = level([textless])
    assert (alone.verdict, alone.ttft_ms.n, alone.itl_ms.n, alone.tokens_per_event) == ("NO_TEXT", 0, 0, None)


def test_fewer_tokens_than_events_with_text_are_marked() -> None:
    """A server may split a token's text, so this is no failure."""
    split = answer(times=[11.0, 11.1, 11.2], tokens=[1, 1, 2])
    exact = answer(1, times=[11.0, 11.1], tokens=[1, 2])
    result = level([exact, split])
    assert (result.verdict, result.failed) == ("OK", 0)
    [reason] = result.reasons
    assert "1 of 2 answers report fewer tokens than events with text (the first: 2 tokens, 3 events)" in reason
    assert level([exact]).reasons == []


def test_level_too_short_to_measure_the_client_says_so() -> None:
    records = [answer(times=[10.1, 10.2], tokens=[1, 2])]
    short = level(records, client_usages=[ClientUsage(duration_s=0.35, cpu_s=0.34, lags_s=[0.001] * 30)])
    assert short.client is not None
    assert (short.client.cpu_utilization, short.client.loop_lag_p99_ms, short.verdict) == (None, None, "OK")
    both = level(records, client_usages=[ClientUsage(duration_s=0.35, cpu_s=0.34, lags_s=[]), CALM]).client
    assert both is not None
    assert (both.cpu_utilization, both.loop_lag_p99_ms) == (0.1, pytest.approx(1.0))


LATE = ClientUsage(duration_s=5.0, cpu_s=0.5, lags_s=[0.001] * 400 + [0.2] * 20)
SELDOM = ClientUsage(duration_s=4.0, cpu_s=0.5, lags_s=[0.06] * 57)  # so late that it has few ticks
BUSY = ClientUsage(duration_s=5.0, cpu_s=4.9, lags_s=[])


@pytest.mark.parametrize(("watch", "word"), [(LATE, "event loop"), (SELDOM, "event loop"), (BUSY, "98% of a core")])
def test_late_or_busy_client_makes_the_level_client_bound(watch: ClientUsage, word: str) -> None:
    records = [answer(index, times=[11.0, 11.01], tokens=[1, 2]) for index in range(20)]
    result = level(records, client_usages=[CALM, watch])
    assert result.verdict == "CLIENT_BOUND"
    assert word in result.reasons[0]


def test_lag_far_below_the_latencies_is_ok() -> None:
    slow = ClientUsage(duration_s=5.0, cpu_s=0.5, lags_s=[0.05] * 400)
    records = [answer(index, times=[12.0, 14.0], tokens=[1, 2]) for index in range(20)]
    assert level(records, client_usages=[slow]).verdict == "OK"


def test_dead_server_is_the_worst_verdict_and_its_time_is_reported() -> None:
    failed = RequestRecord(index=0, intended_s=10.0, sent_s=10.0, ended_s=14.0, failure="connection reset")
    result = level([failed], server_died_s=12.5, interrupted=True, client_usages=[BUSY])
    assert result.verdict == "SERVER_DIED"
    assert any("died 2.5 s after" in reason for reason in result.reasons)
