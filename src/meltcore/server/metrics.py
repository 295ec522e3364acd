"""The whole server's counts as Prometheus text, whichever front is asked. METRICS.md maps every name to vLLM's."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from meltcore.server.counts import HISTOGRAMS, REJECTIONS, Counts

PREFIX = "meltcore:"


class Metrics(Collector):
    """Writes `counts` with the label `model`."""

    def __init__(self, model: str, counts: Counts) -> None:
        self._model = model
        self._counts = counts
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """The Prometheus exposition text."""
        self._counts.note_cpu()
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        for name, help, _ in HISTOGRAMS:
            buckets, total = self._counts.histograms[name].totals()
            histogram = HistogramMetricFamily(PREFIX + name, help, labels=["model_name"])
            histogram.add_metric([self._model], buckets, total)
            yield histogram

    def _gauges(self) -> Iterator[Metric]:
        counts, engine = self._counts, self._counts.engines()
        usage = engine.pages_used / engine.pages_total if engine.pages_total else 0.0
        peak = counts.board.most("in_flight_peak")
        for name, help, value in (
            ("num_requests_running", "Requests in the engine's batch after its last step", engine.running),
            ("num_requests_waiting", "Requests waiting for a place in the batch after the last step", engine.waiting),
            ("kv_cache_usage_perc", "Share of KV pages in use, 0 to 1", usage),
            ("state_slots", "Slots for recurrent states", engine.state_slots),
            ("state_slots_used", "Slots whose state belongs to a running request", engine.state_slots_used),
            ("state_snapshots", "Slots whose state the prefix cache keeps", engine.state_snapshots),
            ("requests_in_flight", "Requests accepted and not ended", counts.total("in_flight")),
            ("replicas", "Replicas that work", len(counts.living())),
            ("requests_in_flight_peak", "The most requests in flight at once since the start", peak),
            (
                "front_processes",
                "Front processes, each with its part of the connections",
                max(1, len(counts.board.rows) - 1),
            ),
        ):
            family = GaugeMetricFamily(PREFIX + name, help, labels=["model_name"])
            family.add_metric([self._model], value)
            yield family
        for name, help, of in (
            ("replica_requests", "Requests that a replica has open", counts.open_requests),
            ("replica_tokens", "Prompts and allowed answers of what a replica has open, in tokens", counts.open_tokens),
        ):
            family = GaugeMetricFamily(PREFIX + name, help, labels=["model_name", "replica"])
            for replica in counts.living():
                family.add_metric([self._model, str(replica)], of(replica))
            yield family

    def _counters(self) -> Iterator[Metric]:
        total, engine = self._counts.total, self._counts.engines()
        for name, help, value in (
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", engine.prefix_queried_tokens_total),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache", engine.prefix_hit_tokens_total),
            ("num_preemptions", "Requests put back to waiting for lack of pages", engine.preemptions_total),
            ("engine_steps", "Steps the engine has run", engine.steps_total),
            ("engine_step_seconds", "Time the engine's steps took", engine.step_s_total),
            ("prompt_tokens", "Prompt tokens of finished requests", total("prompt_tokens")),
            ("generation_tokens", "Tokens generated", total("generation_tokens")),
            ("requests_accepted", "Requests given to the engine", total("accepted")),
            ("requests_finished", "Requests answered whole", total("finished")),
            ("requests_aborted", "Requests ended by the client or by a limit", total("aborted")),
            ("requests_failed", "Requests ended by an error of the engine or of a front process", total("failed")),
            ("log_lines_dropped", "Log lines given up because nobody read them", total("log_lines_dropped")),
            ("front_cpu_seconds", "CPU time of the front processes", total("cpu_s")),
        ):
            family = CounterMetricFamily(PREFIX + name, help, labels=["model_name"])
            family.add_metric([self._model], value)
            yield family
        success = {reason: total(f"success_{reason}") for reason in ("stop", "length")}
        yield self._labelled("request_success", "Requests answered whole", "finished_reason", success)
        rejected = {reason: total(f"rejected_{reason}") for reason in REJECTIONS}
        yield self._labelled("requests_rejected", "Requests refused before the engine", "reason", rejected)

    def _labelled(self, name: str, help: str, label: str, values: dict[str, float]) -> Metric:
        family = CounterMetricFamily(PREFIX + name, help, labels=["model_name", label])
        for value, count in values.items():
            family.add_metric([self._model, value], count)
        return family
