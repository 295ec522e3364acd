"""Computes the metrics of a level from its records. definitions.py defines the metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from meltcore.measure.documents.schema import ClientLoad, LevelResult, SteadyWindow, TaskLoad, TimelinePoint
from meltcore.measure.documents.values.percentiles import distribution
from meltcore.measure.documents.verdicts import Verdict
from meltcore.measure.load.config import Level
from meltcore.measure.load.record import RequestRecord
from meltcore.measure.load.run.client_monitor import ClientUsage, client_bound_reasons
from meltcore.measure.load.run.surroundings import Surroundings, cautions
from meltcore.measure.load.run.timeline import MS_PER_S, InFlight, TextArrivals, TokenTimes, bucket_means, timeline
from meltcore.measure.load.tasks.task import MeasuredTask, default_task


@dataclass(frozen=True, kw_only=True)
class LevelMeasurement:
    """Holds all measurements of one level."""

    level: Level
    records: list[RequestRecord]
    released_s: float
    client_usages: list[ClientUsage]
    server_died_s: float | None = None
    surroundings: Surroundings | None = None
    interrupted: bool = False
    server_peak_in_flight: int | None = None
    workload_name: str = ""
    is_graded: bool = False
    is_streamed: bool = True
    fallback_count_source: Literal["tokenizer", "events"] = "events"  # where the server sent no usage
    num_warmups: int = 0
    task: MeasuredTask = field(default_factory=default_task)
    slo_ms: dict[str, float]


def summarize(measurement: LevelMeasurement) -> LevelResult:
    """Return the metrics of a level from its measurements.

    Latencies, queue delay and tokens per event come from complete answers only. Failed requests lower the rates, which
    are relative to the whole duration, and the accuracy, which is relative to all requests.
    """
    complete_records = [record for record in measurement.records if record.failure is None]
    records_with_text = [record for record in complete_records if record.first_text_s]
    ended_s = max((record.ended_s for record in measurement.records), default=measurement.released_s)
    duration_s = ended_s - measurement.released_s
    sent_records = [record for record in measurement.records if record.sent_s]
    in_flight = InFlight(_field_values(sent_records, "sent_s"), _field_values(sent_records, "ended_s"))
    prompt_tokens = sum(record.prompt_tokens for record in complete_records)
    output_tokens = sum(record.output_tokens for record in complete_records)
    task = measurement.task
    has_token_counts = all(record.cumulative_tokens is not None for record in records_with_text)
    works = None if task.work_of is None else list(map(task.work_of, complete_records))
    token_times = (
        TokenTimes.from_records(complete_records)
        if works is None
        else TokenTimes(_field_values(complete_records, "ended_s"), np.array(works, dtype=np.float64))
    )
    result = LevelResult(
        concurrency=measurement.level.concurrency,
        load_kind="closed" if measurement.level.rate is None else "open",
        rate_per_s=measurement.level.rate,
        workload=measurement.workload_name,
        warmup_requests=measurement.num_warmups,
        requests=len(measurement.records),
        succeeded=len(complete_records),
        failed=len(measurement.records) - len(complete_records),
        failures=_count_failures(measurement.records),
        peak_in_flight=in_flight.peak,
        server_peak_in_flight=measurement.server_peak_in_flight,
        accuracy=_accuracy(measurement),
        duration_s=duration_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        output_tokens_per_s=_per_second(output_tokens, duration_s),
        total_tokens_per_s=_per_second(prompt_tokens + output_tokens, duration_s),
        events_per_token=_ratio(sum(len(record.times_s) for record in complete_records), output_tokens),
        token_count_source="server-reported"
        if all(record.saw_usage for record in complete_records)
        else measurement.fallback_count_source,
        steady=_steady_rate(measurement, in_flight, token_times),
        timeline=timeline(in_flight, token_times, measurement.released_s, ended_s) if measurement.records else [],
        task=None if works is None else _task_load(task, complete_records, sum(works), duration_s),
        released_s=measurement.released_s,
        send_s=measurement.level.duration_s,
        client=_client_load(measurement.client_usages),
        e2e_ms=distribution([e2e_ms(record) for record in complete_records]),
        queue_delay_ms=distribution([(record.sent_s - record.intended_s) * MS_PER_S for record in complete_records]),
    )
    if result.task is not None:
        _report_as_work(result)
    elif measurement.is_streamed and records_with_text:  # else no first token was seen, nor any other
        arrivals = TextArrivals.from_records(records_with_text, use_token_counts=has_token_counts)
        _add_latencies(result, records_with_text, arrivals)
        result.itl_unit = "token" if has_token_counts else "event"
        _add_latency_timeline(result.timeline, records_with_text, arrivals, measurement.released_s, ended_s)
    if measurement.slo_ms:
        _add_goodput(result, measurement.slo_ms, complete_records)
    result.cautions = cautions(measurement.surroundings, duration_s=duration_s, num_answers=len(complete_records))
    result.verdict, result.reasons = _verdict(measurement, result)
    return result


# --- metrics of one request


def ttft_ms(record: RequestRecord) -> float:
    """Return the time in ms to the first token of an answer with text, or to the first audio of speech."""
    return (record.first_text_s - record.intended_s) * MS_PER_S


def e2e_ms(record: RequestRecord) -> float:
    """Return the end-to-end latency of a request in ms."""
    return (record.ended_s - record.intended_s) * MS_PER_S


def tpot_ms(record: RequestRecord) -> float | None:
    """Return the time in ms per output token after the first token, or None for an answer of one token."""
    if record.output_tokens < 2:
        return None
    return (e2e_ms(record) - ttft_ms(record)) / (record.output_tokens - 1)


def _meets_slo(record: RequestRecord, slo_ms: dict[str, float], *, counts_work: bool) -> bool:
    if counts_work:
        # What else is measured of such a task is the latency to the first part of an answer.
        return all((e2e_ms if name == "e2e" else ttft_ms)(record) <= limit for name, limit in slo_ms.items())
    if not record.first_text_s:  # an answer without text meets no limit
        return False
    itl_ms = TextArrivals.from_records([record]).itl_ms
    latencies_ms = {
        "ttft": ttft_ms(record),
        "tpot": tpot_ms(record),
        "itl": float(itl_ms.mean()) if len(itl_ms) else None,
        "e2e": e2e_ms(record),
    }
    return all((value := latencies_ms[name]) is None or value <= limit for name, limit in slo_ms.items())


# --- metrics of a level


def _field_values(records: list[RequestRecord], name: str) -> np.ndarray:
    return np.array([getattr(record, name) for record in records], dtype=np.float64)


def _per_second(count: float, duration_s: float) -> float:
    return count / duration_s if duration_s > 0 else 0.0


def _ratio(numerator: int, denominator: int) -> float | None:
    return numerator / denominator if denominator else None


def _accuracy(measurement: LevelMeasurement) -> float | None:
    if not measurement.is_graded or not measurement.records:
        return None
    return sum(record.correct is True for record in measurement.records) / len(measurement.records)


def _count_failures(records: list[RequestRecord]) -> dict[str, int]:
    """Return the number of failures per reason, most frequent first.

    Each reason includes the detail of its first failure: "http 429: the queue is full".
    """
    counts = Counter(record.failure for record in records if record.failure is not None)
    first_details: dict[str | None, str | None] = {}
    for record in records:
        first_details.setdefault(record.failure, record.detail)
    return {
        f"{reason}: {first_details[reason]}" if first_details[reason] else reason: count
        for reason, count in counts.most_common()
    }


def _steady_rate(measurement: LevelMeasurement, in_flight: InFlight, token_times: TokenTimes) -> SteadyWindow | None:
    window = in_flight.steady_window(measurement.level.concurrency) if measurement.level.rate is None else None
    if window is None:
        return None
    start_s, end_s = window
    tokens_per_s = token_times.count_between(start_s, end_s) / (end_s - start_s)
    return SteadyWindow(
        start_s=start_s - measurement.released_s, end_s=end_s - measurement.released_s, output_tokens_per_s=tokens_per_s
    )


def _task_load(task: MeasuredTask, complete_records: list[RequestRecord], work: float, duration_s: float) -> TaskLoad:
    """Return the metrics of a task from its complete answers. The time at which an answer's work counts is its end."""
    return TaskLoad(
        task=task.name,
        work=work,
        work_per_s=_per_second(work, duration_s),
        empty_answers=sum(not record.first_text_s for record in complete_records),
        **task.details(complete_records, duration_s),
    )


def _report_as_work(result: LevelResult) -> None:
    """Report the rates of a task's level as work instead of tokens, because such a level counts no output tokens."""
    rates: list[TimelinePoint | SteadyWindow] = [*result.timeline, *filter(None, [result.steady])]
    for rate in rates:
        rate.work_per_s, rate.output_tokens_per_s = rate.output_tokens_per_s, 0.0


def _client_load(client_usages: list[ClientUsage]) -> ClientLoad:
    cpu_utilizations = [usage.cpu_utilization for usage in client_usages if usage.cpu_utilization is not None]
    lags_p99_ms = [usage.lag_p99_ms for usage in client_usages if usage.lag_p99_ms is not None]
    return ClientLoad(
        cpu_utilization=max(cpu_utilizations, default=None),
        loop_lag_p99_ms=max(lags_p99_ms, default=None),
        processes=len(client_usages),
    )


def _add_goodput(result: LevelResult, slo_ms: dict[str, float], complete_records: list[RequestRecord]) -> None:
    num_good = sum(_meets_slo(record, slo_ms, counts_work=result.task is not None) for record in complete_records)
    result.slo = dict(slo_ms)
    result.goodput_per_s = _per_second(num_good, result.duration_s)


def _add_latencies(result: LevelResult, records_with_text: list[RequestRecord], arrivals: TextArrivals) -> None:
    result.ttft_ms = distribution([ttft_ms(record) for record in records_with_text])
    result.tpot_ms = distribution([value for record in records_with_text if (value := tpot_ms(record)) is not None])
    result.event_gap_ms = distribution(arrivals.gaps_ms)
    result.itl_ms = distribution(arrivals.itl_ms)
    result.tokens_per_event = _ratio(sum(record.output_tokens for record in records_with_text), arrivals.num_arrivals)


def _add_latency_timeline(
    timeline_points: list[TimelinePoint],
    records_with_text: list[RequestRecord],
    arrivals: TextArrivals,
    start_s: float,
    end_s: float,
) -> None:
    first_text_s, ttfts_ms = (
        _field_values(records_with_text, "first_text_s"),
        np.array([ttft_ms(record) for record in records_with_text]),
    )
    mean_ttfts_ms = bucket_means(first_text_s, ttfts_ms, np.ones(len(records_with_text)), start_s, end_s)
    mean_itls_ms = bucket_means(arrivals.times_s, arrivals.gaps_ms, arrivals.tokens_per_gap, start_s, end_s)
    for point, mean_ttft_ms, mean_itl_ms in zip(timeline_points, mean_ttfts_ms, mean_itls_ms, strict=True):
        point.ttft_ms, point.itl_ms = mean_ttft_ms, mean_itl_ms


def _verdict(measurement: LevelMeasurement, result: LevelResult) -> tuple[Verdict, list[str]]:
    """Return the most severe verdict that applies, and every reason to doubt the measurement."""
    verdict: Verdict = "OK"
    latencies = (result.itl_ms, result.ttft_ms)
    if result.task is not None:
        latencies = (result.task.first_audio_ms, result.e2e_ms)
    median_latencies_ms = [latency.p50 for latency in latencies if latency.p50 is not None]
    reasons = client_bound_reasons(measurement.client_usages, min(median_latencies_ms, default=None))
    if reasons:
        verdict = "CLIENT_BOUND"
    reasons += _connection_notes(measurement)
    complete_records = [record for record in measurement.records if record.failure is None]
    reasons += measurement.task.notes(complete_records, result)
    if not measurement.task.may_be_empty and not all(record.first_text_s for record in complete_records):
        verdict = "NO_TEXT"
    if result.failed:
        verdict = "FAILED"
        top_failure = next(iter(result.failures))
        reasons.append(
            f"{result.failed} of {result.requests} requests failed ({top_failure}); latencies are of the other "
            f"{result.succeeded}"
        )
    if measurement.interrupted:
        verdict = "PARTIAL"
        reasons.append(f"interrupted after {result.duration_s:.1f} s: {measurement.level.size_text} were planned")
    if measurement.server_died_s is not None:
        verdict = "SERVER_DIED"
        reasons.append(
            f"the server died {measurement.server_died_s - measurement.released_s:.1f} s after the release: "
            f"connections were refused or dropped, and /health did not answer"
        )
    return verdict, reasons


def _connection_notes(measurement: LevelMeasurement) -> list[str]:
    """Return a note on requests that were sent again over a new connection."""
    num_reconnected = sum(record.reconnected for record in measurement.records)
    if not num_reconnected:
        return []
    return [
        f"{num_reconnected} of {len(measurement.records)} requests were sent again over a new connection: the server "
        f"had closed theirs after the answer before, without `Connection: close`; latencies count from the first try"
    ]
