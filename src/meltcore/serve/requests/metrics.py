"""Writes the statistics of the whole server as Prometheus text. Every API server process can do so.

docs/metrics.md maps the names to vLLM's names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from meltcore.protocol.generation import EngineStats
from meltcore.protocol.step_sums import StepKind, sums_by_kind
from meltcore.serve.requests.stats import (
    CLASSES,
    EVENT_LOOP_LAG,
    HISTOGRAMS,
    QUEUE_REFUSAL_REASONS,
    QUEUE_WAIT,
    REJECTION_REASONS,
    SLEEP_STATES,
    ModelStats,
    ServerStats,
)

PREFIX = "meltcore:"
_Family = type[GaugeMetricFamily] | type[CounterMetricFamily]
_ModelMetric = tuple[_Family, str, str, Callable[[ModelStats], float]]


def _kv_cache_usage(engine: EngineStats) -> float:
    return engine.pages_used / engine.num_pages if engine.num_pages else 0.0


_ENGINE_METRICS: tuple[tuple[_Family, str, str, Callable[[EngineStats], float]], ...] = (
    (
        GaugeMetricFamily,
        "num_requests_running",
        "Requests in the batch of the engines' last steps",
        attrgetter("running"),
    ),
    (GaugeMetricFamily, "num_requests_waiting", "Requests that wait to be scheduled", attrgetter("waiting")),
    (GaugeMetricFamily, "kv_cache_usage_perc", "Fraction of KV cache pages in use", _kv_cache_usage),
    (
        GaugeMetricFamily,
        "recurrent_state_slots",
        "Slots for recurrent states",
        attrgetter("recurrent_state_slots"),
    ),
    (
        GaugeMetricFamily,
        "recurrent_state_slots_used",
        "Slots of running requests and of snapshots being taken",
        attrgetter("recurrent_state_slots_used"),
    ),
    (
        GaugeMetricFamily,
        "recurrent_state_snapshots",
        "Slots with a snapshot for the prefix cache",
        attrgetter("recurrent_state_snapshots"),
    ),
    (
        CounterMetricFamily,
        "prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache",
        attrgetter("prefix_queried_tokens_total"),
    ),
    (
        CounterMetricFamily,
        "prefix_cache_hits",
        "Prompt tokens found in the prefix cache",
        attrgetter("prefix_hit_tokens_total"),
    ),
    (
        CounterMetricFamily,
        "num_preemptions",
        "Requests preempted for lack of pages",
        attrgetter("preemptions_total"),
    ),
    (CounterMetricFamily, "grammar_masks", "Masks of next tokens for structured output", attrgetter("masks_total")),
    (CounterMetricFamily, "grammar_mask_seconds", "Time of the threads that filled them", attrgetter("mask_s_total")),
    (
        CounterMetricFamily,
        "grammar_masks_late",
        "Masks that were late, whose requests missed a step",
        attrgetter("late_masks_total"),
    ),
    (
        CounterMetricFamily,
        "spec_decode_num_drafts",
        "Sequences in steps that checked drafts of them",
        lambda engine: engine.drafted[0],
    ),
    (
        CounterMetricFamily,
        "spec_decode_num_draft_tokens",
        "Drafts that were checked",
        lambda engine: sum(engine.drafted),
    ),
    (
        CounterMetricFamily,
        "spec_decode_num_accepted_tokens",
        "Drafts that were accepted",
        lambda engine: sum(engine.accepted),
    ),
)
# Metric, attribute, help.
_DRAFT_COUNTERS = (
    ("spec_decode_num_draft_tokens_per_pos", "drafted", "Drafts that were checked, by position from 0"),
    ("spec_decode_num_accepted_tokens_per_pos", "accepted", "Drafts that were accepted, by position from 0"),
)
# In the order of `StepSums`: name, help.
_STEP_COUNTERS = (
    ("steps", "Steps that the engines have run, by phase and by the power of two of rows or prompt tokens"),
    ("step_seconds", "Time of these steps"),
    ("step_rows", "Sequences, sentences, clips or texts of these steps"),
    ("step_prompt_tokens", "Prompt tokens or padded positions of these steps"),
)


def _column(family_type: _Family, name: str, column: str, help: str) -> _ModelMetric:
    return family_type, name, help, lambda model: model.total(column)


_MODEL_METRICS: tuple[_ModelMetric, ...] = (
    _column(CounterMetricFamily, "prompt_tokens", "prompt_tokens", "Prompt tokens of finished requests"),
    _column(CounterMetricFamily, "generation_tokens", "generation_tokens", "Generated tokens"),
    _column(CounterMetricFamily, "requests_accepted", "accepted", "Requests admitted, also those that still wait"),
    _column(CounterMetricFamily, "requests_finished", "finished", "Requests with a complete response"),
    _column(CounterMetricFamily, "requests_aborted", "aborted", "Requests ended by the client or by a limit"),
    _column(CounterMetricFamily, "requests_retried", "retried", "Requests sent to another replica, as theirs was lost"),
    _column(
        CounterMetricFamily, "requests_failed", "failed", "Requests ended by an error of an engine or an API server"
    ),
    _column(GaugeMetricFamily, "requests_in_flight", "in_flight", "Requests accepted and not ended"),
    (
        GaugeMetricFamily,
        "requests_in_flight_peak",
        "Most requests in flight since the start",
        lambda model: model.max_value("in_flight_peak"),
    ),
    (GaugeMetricFamily, "replicas", "Replicas that serve", lambda model: model.num_serving()),
    _column(
        GaugeMetricFamily,
        "engines_time_sliced",
        "time_sliced",
        "Engines whose kernels take turns in spite of means: mps",
    ),
    _column(CounterMetricFamily, "grammars_compiled", "grammars_compiled", "Grammars of structured output compiled"),
    _column(CounterMetricFamily, "grammars_refused", "grammars_refused", "Requests whose grammar was refused"),
    _column(CounterMetricFamily, "grammars_weakened", "grammars_weakened", "Schemas that are enforced only in part"),
    _column(
        CounterMetricFamily, "grammar_compile_seconds", "grammar_compile_s", "Time of threads that compile grammars"
    ),
    _column(CounterMetricFamily, "wakes", "wakes", "Times that the model was woken"),
    _column(CounterMetricFamily, "wake_seconds", "wake_s", "Time that waking took"),
)

# Metric, column, help.
_SERVER_COUNTERS = (
    ("api_server_cpu_seconds", "cpu_s", "CPU time of the API server processes"),
    ("api_server_deaths", "api_server_deaths", "API server processes that died or were ended, since the start"),
    ("log_lines_dropped", "log_lines_dropped", "Log lines dropped because they were not read, or not written"),
    ("trace_spans_sent", "trace_spans_sent", "Spans that the collector has taken"),
)


class Metrics(Collector):
    """Collects the statistics of a server. The statistics of a model have the label `model_name`."""

    def __init__(self, stats: ServerStats, models: Callable[[], Mapping[str, ModelStats]]) -> None:
        """Create the collector. `models()` returns the statistics of the current models by model name."""
        self._stats = stats
        self._list_models = models
        self._models: Mapping[str, ModelStats] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """Return all metrics in the Prometheus exposition format."""
        self._stats.record_cpu_time()
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families. prometheus_client calls this method."""
        self._models = self._list_models()
        engines = {name: _engines(model) for name, model in self._models.items()}
        for family_type, name, help, value in _ENGINE_METRICS:
            yield self._family(family_type, name, help, {label: value(engine) for label, engine in engines.items()})
        for family_type, name, help, read in _MODEL_METRICS:
            yield self._family(family_type, name, help, {label: read(model) for label, model in self._models.items()})
        yield from self._steps(engines)
        for name, attribute, help in _DRAFT_COUNTERS:
            family = CounterMetricFamily(PREFIX + name, help, labels=["model_name", "position"])
            for label, engine in engines.items():
                counts = enumerate(getattr(engine, attribute))
                _add(family, label, {str(position): count for position, count in counts if engine.drafted[position]})
            yield family
        yield from self._labeled()
        for name, help, _ in HISTOGRAMS:
            histogram = HistogramMetricFamily(PREFIX + name, help, labels=["model_name"])
            for label, model in self._models.items():
                buckets, total = model.histograms[name].totals()
                histogram.add_metric([label], buckets, total)
            yield histogram
        yield from self._server()

    def _server(self) -> Iterator[Metric]:
        """Yield the metric families of the server, which do not have the label `model_name`."""
        stats = self._stats
        yield GaugeMetricFamily(PREFIX + "api_servers", "API server processes", stats.api_servers)
        for name, column, help in _SERVER_COUNTERS:
            yield CounterMetricFamily(PREFIX + name, help, stats.total(column))
        name, help, _ = EVENT_LOOP_LAG
        buckets, total = stats.event_loop_lag.totals()
        yield HistogramMetricFamily(PREFIX + name, help, buckets=buckets, sum_value=total)
        dropped = CounterMetricFamily(
            PREFIX + "trace_spans_dropped", "Spans that no collector has got, by reason", labels=["reason"]
        )
        dropped.add_metric(["queue_full"], stats.total("trace_spans_overflowed"))
        dropped.add_metric(["not_taken"], stats.total("trace_spans_failed"))
        yield dropped

    @staticmethod
    def _family(family_type: _Family, name: str, help: str, values: Mapping[str, float]) -> Metric:
        family = family_type(PREFIX + name, help, labels=["model_name"])
        for label, value in values.items():
            family.add_metric([label], value)
        return family

    def _labeled(self) -> Iterator[Metric]:
        """Yield the metric families that have another label beside the model's name."""
        request_success = CounterMetricFamily(
            PREFIX + "request_success", "Requests with a complete response", labels=["model_name", "finished_reason"]
        )
        requests_rejected = CounterMetricFamily(
            PREFIX + "requests_rejected", "Requests refused before the engine", labels=["model_name", "reason"]
        )
        replica_requests = GaugeMetricFamily(
            PREFIX + "replica_requests", "Open requests of a replica", labels=["model_name", "replica"]
        )
        replica_tokens = GaugeMetricFamily(
            PREFIX + "replica_tokens",
            "Tokens as which a replica's open requests count: prompts, expected answers, and a number for each",
            labels=["model_name", "replica"],
        )
        for label, model in self._models.items():
            num_live = model.live_replicas()
            _add(request_success, label, {key: model.total(f"success_{key}") for key in ("stop", "length")})
            _add(requests_rejected, label, {key: model.total(f"rejected_{key}") for key in REJECTION_REASONS})
            _add(replica_requests, label, {str(replica): model.open_requests(replica) for replica in num_live})
            _add(replica_tokens, label, {str(replica): model.open_tokens(replica) for replica in num_live})
        yield from (request_success, requests_rejected, replica_requests, replica_tokens)
        yield from self._sleep()
        yield from self._queues()

    @staticmethod
    def _steps(engines: Mapping[str, EngineStats]) -> Iterator[Metric]:
        """Yield the counters of the engines' steps, for each kind of step that has run."""
        sums = {label: sums_by_kind(engine.step_sums) for label, engine in engines.items()}
        for index, (name, help) in enumerate(_STEP_COUNTERS):
            family = CounterMetricFamily(f"{PREFIX}engine_{name}", help, labels=["model_name", *StepKind._fields])
            for label, by_kind in sums.items():
                for kind, each in by_kind.items():
                    family.add_metric([label, kind.phase, str(kind.size)], each[index])
            yield family

    def _sleep(self) -> Iterator[Metric]:
        """Yield one gauge per sleep state of each model. As in vLLM, the gauge of the current state is 1."""
        state = GaugeMetricFamily(
            PREFIX + "engine_sleep_state", "Whether the engines sleep, and how", labels=["model_name", "sleep_state"]
        )
        for label, model in self._models.items():
            level = model.total("sleep_level")
            _add(state, label, {name: float(level == index) for index, name in enumerate(SLEEP_STATES)})
        yield state

    def _queues(self) -> Iterator[Metric]:
        """Yield the number of requests that wait before the engines, by class."""
        labels = ["model_name", "task", "priority_class"]
        requests = GaugeMetricFamily(PREFIX + "queue_requests", "Requests that wait for their turn", labels=labels)
        units = GaugeMetricFamily(
            PREFIX + "queue_units", "Their prompt tokens, characters or seconds of audio", labels=labels
        )
        refused = CounterMetricFamily(
            PREFIX + "queue_refused",
            "Requests that were refused, or expired in the queue",
            labels=[*labels, "reason"],
        )
        name, help, _ = QUEUE_WAIT
        waits = HistogramMetricFamily(PREFIX + name, help, labels=labels)
        for label, model in self._models.items():
            for each in CLASSES:
                values = [label, model.task, each]
                requests.add_metric(values, model.total(f"queue_requests/{each}"))
                units.add_metric(values, model.total(f"queue_units/{each}"))
                for reason in QUEUE_REFUSAL_REASONS:
                    refused.add_metric([*values, reason], model.total(f"refused_{reason}/{each}"))
                buckets, total = model.queue_waits[each].totals()
                waits.add_metric(values, buckets, total)
        yield from (requests, units, refused, waits)


def _engines(model: ModelStats) -> EngineStats:
    """Return the engine statistics summed over a model's replicas. Requests in the queue count as waiting too."""
    engines = model.engines()
    return msgspec.structs.replace(engines, waiting=engines.waiting + round(model.total("queue_requests")))


def _add(family: CounterMetricFamily | GaugeMetricFamily, label: str, values: Mapping[str, float]) -> None:
    for key, value in values.items():
        family.add_metric([label, key], value)
