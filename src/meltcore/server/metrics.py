"""What the server counts, and its Prometheus text. METRICS.md maps every name to vLLM's.

Counting is plain arithmetic on attributes, for it happens at every token; prometheus_client only writes the text.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from meltcore.engine.messages import EngineStats, RequestTimes
from meltcore.server.generation import Choice, Outcome

PREFIX = "meltcore:"
_TOKEN_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_REQUEST_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0)


class Histogram:
    """Counts of values by upper bound (Prometheus' cumulative `le` buckets, made so when read). Values in seconds."""

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:
        self.name = name
        self.help = help
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value_s: float, times: int = 1) -> None:
        self._counts[bisect.bisect_left(self._bounds, value_s)] += times
        self._sum += value_s * times

    def family(self, model: str) -> Metric:
        total = 0
        buckets = []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        family = HistogramMetricFamily(PREFIX + self.name, self.help, labels=["model_name"])
        family.add_metric([model], buckets, self._sum)
        return family


class Metrics(Collector):
    """All counts of one server. `model` labels them once it is known."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.engine = EngineStats()
        self.accepted = 0
        self.in_flight = 0
        self.in_flight_peak = 0
        self.outcomes: dict[Outcome, int] = {"finished": 0, "aborted": 0, "failed": 0}
        self.rejected: dict[str, int] = {}
        self.success = {"stop": 0, "length": 0}
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.log_lines_dropped = 0
        self.time_to_first_token = Histogram(
            "time_to_first_token_seconds", "Arrival to the step that made the first token", _REQUEST_BOUNDS_S
        )
        self.inter_token_latency = Histogram(
            "inter_token_latency_seconds", "Time between the steps that made two tokens of a request", _TOKEN_BOUNDS_S
        )
        self.end_to_end = Histogram(
            "e2e_request_latency_seconds", "Arrival to the last token, of finished requests", _REQUEST_BOUNDS_S
        )
        self.queue_time = Histogram(
            "request_queue_time_seconds", "Arrival to first being scheduled, of finished requests", _REQUEST_BOUNDS_S
        )
        self.prefill_time = Histogram(
            "request_prefill_time_seconds", "First scheduled to first token, of finished requests", _REQUEST_BOUNDS_S
        )
        self.decode_time = Histogram(
            "request_decode_time_seconds", "First token to last, of finished requests", _REQUEST_BOUNDS_S
        )
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def note_in_flight(self, count: int) -> None:
        self.in_flight = count
        self.in_flight_peak = max(self.in_flight_peak, count)

    def count_outcome(self, outcome: Outcome) -> None:
        self.outcomes[outcome] += 1

    def reject(self, reason: str) -> None:
        self.rejected[reason] = self.rejected.get(reason, 0) + 1

    def finish(self, choice: Choice, times: RequestTimes | None, now_s: float) -> None:
        """Count one whole answer. The engine's own times are there only where the engine ended it."""
        self.success[choice.finish_reason or "stop"] += 1
        self.prompt_tokens += choice.prompt_tokens
        self.end_to_end.observe(now_s - choice.generation.arrived_s)
        if choice.first_token_s is not None:
            self.decode_time.observe(now_s - choice.first_token_s)
        if times is not None:
            self.queue_time.observe(times.scheduled_s - times.arrived_s)
            self.prefill_time.observe(times.first_token_s - times.scheduled_s)

    def text(self) -> bytes:
        """The Prometheus exposition text."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        for histogram in (
            self.time_to_first_token,
            self.inter_token_latency,
            self.end_to_end,
            self.queue_time,
            self.prefill_time,
            self.decode_time,
        ):
            yield histogram.family(self.model)

    def _gauges(self) -> Iterator[Metric]:
        engine = self.engine
        usage = engine.pages_used / engine.pages_total if engine.pages_total else 0.0
        for name, help, value in (
            ("num_requests_running", "Requests in the engine's batch after its last step", engine.running),
            ("num_requests_waiting", "Requests waiting for a place in the batch after the last step", engine.waiting),
            ("kv_cache_usage_perc", "Share of KV pages in use, 0 to 1", usage),
            ("requests_in_flight", "Requests accepted and not ended", self.in_flight),
            ("requests_in_flight_peak", "The most requests in flight at once since the start", self.in_flight_peak),
        ):
            family = GaugeMetricFamily(PREFIX + name, help, labels=["model_name"])
            family.add_metric([self.model], value)
            yield family

    def _counters(self) -> Iterator[Metric]:
        engine = self.engine
        for name, help, value in (
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", engine.prefix_queried_tokens_total),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache", engine.prefix_hit_tokens_total),
            ("num_preemptions", "Requests put back to waiting for lack of pages", engine.preemptions_total),
            ("engine_steps", "Steps the engine has run", engine.steps_total),
            ("engine_step_seconds", "Time the engine's steps took", engine.step_s_total),
            ("prompt_tokens", "Prompt tokens of finished requests", self.prompt_tokens),
            ("generation_tokens", "Tokens generated", self.generation_tokens),
            ("requests_accepted", "Requests given to the engine", self.accepted),
            ("requests_finished", "Requests answered whole", self.outcomes["finished"]),
            ("requests_aborted", "Requests ended by the client or by a limit", self.outcomes["aborted"]),
            ("requests_failed", "Requests ended by an engine error", self.outcomes["failed"]),
            ("log_lines_dropped", "Log lines given up because nobody read them", self.log_lines_dropped),
            ("front_cpu_seconds", "CPU time of the HTTP front process", time.process_time()),
        ):
            family = CounterMetricFamily(PREFIX + name, help, labels=["model_name"])
            family.add_metric([self.model], value)
            yield family
        yield self._labelled("request_success", "Requests answered whole", "finished_reason", self.success)
        yield self._labelled("requests_rejected", "Requests refused before the engine", "reason", self.rejected)

    def _labelled(self, name: str, help: str, label: str, counts: dict[str, int]) -> Metric:
        family = CounterMetricFamily(PREFIX + name, help, labels=["model_name", label])
        for value, count in counts.items():
            family.add_metric([self.model, value], count)
        return family
