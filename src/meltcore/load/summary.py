"""From records to a LevelResult. The metrics are defined in results/definitions.py and computed here, nowhere else."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from meltcore.load.config import Level
from meltcore.load.record import Record
from meltcore.load.selfcheck import ClientWatch, client_limits
from meltcore.load.spans import InFlight, means, timeline
from meltcore.results.percentiles import distribution
from meltcore.results.schema import ClientLoad, LevelResult, Steady, TimelinePoint, Verdict

MS = 1000.0


@dataclass(frozen=True, kw_only=True)
class LevelRun:
    """Everything known of one level once it is over."""

    level: Level
    records: list[Record]
    released_s: float
    watches: list[ClientWatch]
    server_died_s: float | None = None
    interrupted: bool = False
    server_peak_in_flight: int | None = None
    workload: str = ""
    judged: bool = False
    streamed: bool = True
    warmup_requests: int = 0
    slo_ms: dict[str, float]


def summarise(run: LevelRun) -> LevelResult:
    """The numbers of a level. Latencies are of whole answers only; failures stay in every denominator."""
    whole = [record for record in run.records if record.failure is None]
    ended_s = max((record.ended_s for record in run.records), default=run.released_s)
    duration_s = ended_s - run.released_s
    sent = [record for record in run.records if record.sent_s]
    in_flight = InFlight(_column(sent, "sent_s"), _column(sent, "ended_s"))
    prompt_tokens = sum(record.prompt_tokens for record in whole)
    output_tokens = sum(record.output_tokens for record in whole)
    chunks = sum(len(record.times_s) for record in whole)
    tokens = _TokenTimes.of(whole)
    result = LevelResult(
        concurrency=run.level.concurrency,
        load_kind="closed" if run.level.rate is None else "open",
        rate_per_s=run.level.rate,
        workload=run.workload,
        warmup_requests=run.warmup_requests,
        requests=len(run.records),
        succeeded=len(whole),
        failed=len(run.records) - len(whole),
        failures=_failures(run.records),
        peak_in_flight=in_flight.peak,
        server_peak_in_flight=run.server_peak_in_flight,
        accuracy=_accuracy(run),
        duration_s=duration_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        output_tokens_per_s=_rate(output_tokens, duration_s),
        total_tokens_per_s=_rate(prompt_tokens + output_tokens, duration_s),
        chunk_to_token_ratio=chunks / output_tokens if output_tokens else None,
        steady=_steady(run, in_flight, tokens),
        timeline=_timeline(run, whole, in_flight, tokens, ended_s),
        released_s=run.released_s,
        client=_client(run.watches),
    )
    _add_latencies(result, whole, run.streamed)
    if run.slo_ms:
        result.slo = dict(run.slo_ms)
        result.goodput_per_s = _rate(sum(_meets(record, run.slo_ms) for record in whole), duration_s)
    result.verdict, result.reasons = _verdict(run, result)
    return result


# --- one request's numbers


def ttft_ms(record: Record) -> float:
    return (record.first_text_s - record.intended_s) * MS


def e2e_ms(record: Record) -> float:
    return (record.ended_s - record.intended_s) * MS


def tpot_ms(record: Record) -> float | None:
    """None for an answer of one token: it has no second one to wait for."""
    if record.output_tokens < 2:
        return None
    return (e2e_ms(record) - ttft_ms(record)) / (record.output_tokens - 1)


def itl_ms(record: Record) -> np.ndarray:
    """Gaps between chunks that carried text: [tokens after the first chunk] where the server counted tokens, each gap
    shared evenly among those it brought; else [chunks - 1]."""
    gaps = np.diff(record.times_s) * MS
    counts = record.tokens_so_far
    if counts is None:
        return gaps
    brought = np.maximum(np.diff(counts.astype(np.int64)), 1)
    return np.repeat(gaps / brought, brought)


def _meets(record: Record, slo_ms: dict[str, float]) -> bool:
    gaps = itl_ms(record)
    seen = {
        "ttft": ttft_ms(record),
        "tpot": tpot_ms(record),
        "itl": float(gaps.mean()) if len(gaps) else None,
        "e2e": e2e_ms(record),
    }
    return all((value := seen[name]) is None or value <= limit for name, limit in slo_ms.items())


# --- a level's numbers


@dataclass(frozen=True)
class _TokenTimes:
    """When output tokens arrived: `times_s` of chunks, `weights` tokens in each. Sums to the server's own count."""

    times_s: np.ndarray
    weights: np.ndarray

    @classmethod
    def of(cls, records: list[Record]) -> _TokenTimes:
        times = [record.times_s for record in records]
        weights = [_chunk_weights(record) for record in records]
        if not times:
            return cls(np.zeros(0), np.zeros(0))
        return cls(np.concatenate(times), np.concatenate(weights))

    def between(self, start_s: float, end_s: float) -> float:
        return float(self.weights[(self.times_s >= start_s) & (self.times_s < end_s)].sum())


def _chunk_weights(record: Record) -> np.ndarray:
    """[chunks] output tokens per chunk: as the server counted them, else spread evenly.

    Tokens after the last text (an end token has none) count with the last chunk.
    """
    counts = record.tokens_so_far
    chunks = len(record.times_s)
    if counts is None:
        return np.full(chunks, record.output_tokens / chunks)
    weights = np.diff(counts.astype(np.float64), prepend=0.0)
    weights[-1] += record.output_tokens - counts[-1]
    return weights


def _column(records: list[Record], name: str) -> np.ndarray:
    return np.array([getattr(record, name) for record in records], dtype=np.float64)


def _rate(amount: float, duration_s: float) -> float:
    return amount / duration_s if duration_s > 0 else 0.0


def _accuracy(run: LevelRun) -> float | None:
    if not run.judged or not run.records:
        return None
    return sum(record.correct is True for record in run.records) / len(run.records)


def _failures(records: list[Record]) -> dict[str, int]:
    """Counts by reason, most frequent first, each with the first detail seen: "http 429: the queue is full"."""
    counts = Counter(record.failure for record in records if record.failure is not None)
    first: dict[str | None, str | None] = {}
    for record in records:
        first.setdefault(record.failure, record.detail)
    return {f"{reason}: {first[reason]}" if first[reason] else reason: count for reason, count in counts.most_common()}


def _steady(run: LevelRun, in_flight: InFlight, tokens: _TokenTimes) -> Steady | None:
    if run.level.rate is not None:
        return None
    window = in_flight.steady_window(run.level.concurrency)
    if window is None:
        return None
    start_s, end_s = window
    rate = tokens.between(start_s, end_s) / (end_s - start_s)
    return Steady(start_s=start_s - run.released_s, end_s=end_s - run.released_s, output_tokens_per_s=rate)


def _timeline(
    run: LevelRun, whole: list[Record], in_flight: InFlight, tokens: _TokenTimes, ended_s: float
) -> list[TimelinePoint]:
    if not run.records:
        return []
    points = timeline(in_flight, tokens.times_s, tokens.weights, run.released_s, ended_s)
    if not run.streamed or not whole:
        return points
    firsts = np.array([ttft_ms(record) for record in whole])
    ttfts = means(_column(whole, "first_text_s"), firsts, np.ones(len(whole)), run.released_s, ended_s)
    counted = all(record.tokens_so_far is not None for record in whole)
    gaps = np.concatenate([np.diff(record.times_s) * MS for record in whole])
    brought = [_chunk_weights(record)[1:] if counted else np.ones(len(record.times_s) - 1) for record in whole]
    at_s = np.concatenate([record.times_s[1:] for record in whole])
    itls = means(at_s, gaps, np.concatenate(brought), run.released_s, ended_s)
    for point, ttft, itl in zip(points, ttfts, itls, strict=True):
        point.ttft_ms, point.itl_ms = ttft, itl
    return points


def _client(watches: list[ClientWatch]) -> ClientLoad:
    lags = [watch.lag_p99_ms for watch in watches if watch.lag_p99_ms is not None]
    return ClientLoad(
        cpu_share=max((watch.cpu_share for watch in watches), default=0.0),
        loop_lag_p99_ms=max(lags, default=None),
        processes=len(watches),
    )


def _add_latencies(result: LevelResult, whole: list[Record], streamed: bool) -> None:
    result.e2e_ms = distribution([e2e_ms(record) for record in whole])
    result.queue_delay_ms = distribution([(record.sent_s - record.intended_s) * MS for record in whole])
    if not streamed:  # nobody saw the first token come, nor any other
        return
    result.ttft_ms = distribution([ttft_ms(record) for record in whole])
    result.tpot_ms = distribution([value for record in whole if (value := tpot_ms(record)) is not None])
    counted = bool(whole) and all(record.tokens_so_far is not None for record in whole)
    result.itl_unit = "token" if counted else "chunk"
    gaps = [itl_ms(record) if counted else np.diff(record.times_s) * MS for record in whole]
    result.itl_ms = distribution(np.concatenate(gaps) if gaps else np.zeros(0))


def _verdict(run: LevelRun, result: LevelResult) -> tuple[Verdict, list[str]]:
    """The gravest word that fits, and every reason there is to distrust the numbers."""
    reasons = []
    verdict: Verdict = "OK"
    shortest = [value for value in (result.itl_ms.p50, result.ttft_ms.p50) if value is not None]
    client = client_limits(run.watches, min(shortest, default=None))
    if client:
        verdict = "CLIENT_BOUND"
        reasons += client
    if result.failed:
        verdict = "FAILED"
        worst = next(iter(result.failures))
        reasons.append(
            f"{result.failed} of {result.requests} requests failed ({worst}); latencies are of the other "
            f"{result.succeeded}"
        )
    if run.interrupted:
        verdict = "PARTIAL"
        reasons.append(f"interrupted after {result.duration_s:.1f} s: {run.level.requests} requests were planned")
    if run.server_died_s is not None:
        verdict = "SERVER_DIED"
        reasons.append(
            f"the server died {run.server_died_s - run.released_s:.1f} s after the release: connections were refused "
            f"or dropped, and /health did not answer"
        )
    return verdict, reasons
