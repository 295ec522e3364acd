"""Writes OpenTelemetry traces: one span per request, which a thread of each API server process sends over OTLP.

Without an endpoint OpenTelemetry is not imported, and nothing is done per request. Attributes have the names of
OpenTelemetry's GenAI and HTTP conventions. The attribute of the queue has vLLM's name. No span contains text of a
prompt or an answer.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec
from starlette.types import Scope

from meltcore.common.errors import ConfigError
from meltcore.common.options import is_number, shown_url
from meltcore.common.tasks import tasks
from meltcore.serve.requests.log import Log
from meltcore.serve.requests.request_fields import header, shorten
from meltcore.serve.requests.stats import ServerStats
from meltcore.settings.fleet_spec import FleetSpec

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

TRACES_VARIABLE, BASE_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"
QUEUE_VARIABLE, DEFAULT_QUEUE = "OTEL_BSP_MAX_QUEUE_SIZE", 2048
CLOSE_S = 2.0  # for the last spans when a server ends
CONTEXT_HEADERS = (b"traceparent", b"tracestate")
# Ends of paths beside those of tasks, and the task's path whose operation they are, or the name of their own.
_OPERATION_BY_SUFFIX = (
    (("chat", "chat_direct"), "/v1/chat/completions"),
    (("completions",), "/v1/completions"),
    (("embeddings",), "embeddings"),
    (("audio/speech", "speech_batch"), "/v1/audio/speech"),
    (("speech_to_speech",), "speech_to_speech"),
    (("audio/translations", "transcribe", "transcribe_batch"), "/v1/audio/transcriptions"),
    (("translate",), "/v1/translate"),
)

_ATTRIBUTES = {  # of the fields of a request's log line
    "request_id": "gen_ai.request.id",
    "model": "gen_ai.request.model",
    "stream": "gen_ai.request.stream",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "ttft_s": "gen_ai.response.time_to_first_chunk",
    "queue_wait_s": "gen_ai.latency.time_in_queue",
    "task": "meltcore.task",
    "class": "meltcore.priority_class",
    "replica": "meltcore.replica",
    "status": "http.response.status_code",
}


def resolve_tracing(config: FleetSpec) -> FleetSpec:
    """Return the configuration with the endpoint of traces from the flag, the file or the environment.

    If the endpoint is None, no traces are written. Raises ConfigError if the endpoint is no address, if its protocol is
    not OTLP over HTTP, or if a package is missing.
    """
    endpoint, source = config.server.otlp_endpoint, "--otlp-traces-endpoint"
    if endpoint is None and (endpoint := os.environ.get(TRACES_VARIABLE)):
        source = TRACES_VARIABLE
    elif endpoint is None and (base := os.environ.get(BASE_VARIABLE)):
        endpoint, source = base.rstrip("/") + "/v1/traces", BASE_VARIABLE
    if not endpoint or os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return _with_endpoint(config, None)
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{source} must be like http://127.0.0.1:4318/v1/traces; got {shown_url(endpoint)!r}")
    for variable in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if (protocol := os.environ.get(variable, "http/protobuf")) != "http/protobuf":
            raise ConfigError(f"{variable} must be http/protobuf; got {protocol!r}")
    _queue_size()
    if find_spec("opentelemetry") is None:
        raise ConfigError(f"{source} needs OpenTelemetry: pip install '.[otel]'")
    return _with_endpoint(config, endpoint)


def _with_endpoint(config: FleetSpec, endpoint: str | None) -> FleetSpec:
    return msgspec.structs.replace(config, server=msgspec.structs.replace(config.server, otlp_endpoint=endpoint))


def _queue_size() -> int:
    value = os.environ.get(QUEUE_VARIABLE, "") or str(DEFAULT_QUEUE)
    if not is_number(value) or int(value) < 1:
        raise ConfigError(f"{QUEUE_VARIABLE} must be a whole number of at least 1; got {value!r}")
    return int(value)


class Tracing:
    """Begins spans, and sends ended spans to a collector.

    Ended spans wait in a bounded queue. Spans that do not fit in it, or that the collector does not take, are dropped
    and counted.
    """

    def __init__(self, endpoint: str, stats: ServerStats, log: Log) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # Their lines would stand between those of the log. What they say is counted.
        logger = logging.getLogger("opentelemetry")
        logger.addHandler(logging.NullHandler())
        logger.propagate = False
        resource = Resource({SERVICE_NAME: "meltcore"}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = _CountingExporter(OTLPSpanExporter(endpoint=endpoint), stats, log)
        self._provider.add_span_processor(_processor(exporter, stats, _queue_size()))
        self._tracer = self._provider.get_tracer("meltcore")
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, scope: Scope) -> Span:
        """Begin the span of a request. If the request's headers name a span of the client, that span is the parent."""
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind

        carrier = {
            name.decode(): value.decode("latin-1")
            for name in CONTEXT_HEADERS
            if (value := header(scope, name)) is not None
        }
        parent = self._propagator.extract(carrier, context=Context())
        operation = _operation(scope["path"])
        attributes = {"http.request.method": scope["method"], "url.path": shorten(scope["path"])}
        if operation is not None:
            attributes |= {"gen_ai.operation.name": operation, "gen_ai.provider.name": "meltcore"}
        span: Span = self._tracer.start_span(operation or scope["method"], parent, SpanKind.SERVER, attributes)
        return span

    def close(self) -> None:
        """Send the queued spans, for at most CLOSE_S."""
        thread = threading.Thread(target=self._provider.shutdown, name="traces-close", daemon=True)
        thread.start()
        thread.join(CLOSE_S)


def _operation(path: str) -> str | None:
    path, operations = path.rstrip("/"), _operations()
    if path in operations:
        return operations[path]
    return next((operations.get(name, name) for suffix, name in _OPERATION_BY_SUFFIX if path.endswith(suffix)), None)


@cache
def _operations() -> dict[str, str]:
    return {path: name for task in tasks().values() for path, name in task.paths.items()}


class _CountingExporter:
    """Counts the spans that an exporter sends and loses. Only the export thread calls `export`."""

    def __init__(self, exporter: SpanExporter, stats: ServerStats, log: Log) -> None:
        self._exporter = exporter
        self._stats = stats
        self._log = log
        self.num_exported = 0

    def export(self, spans: Sequence[ReadableSpan]) -> Any:
        """Send spans."""
        self.num_exported += len(spans)
        result = self._exporter.export(spans)
        if result.name == "SUCCESS":
            self._stats.add("trace_spans_sent", len(spans))
        else:
            self._stats.add("trace_spans_failed", len(spans))
            self._log.write_rate_limited("traces_failed", spans=len(spans), why="the collector did not take them")
        return result

    def shutdown(self) -> None:
        """End a retry that waits before it sends again."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Call the method of the wrapped exporter."""
        return bool(self._exporter.force_flush(timeout_millis))


def _processor(exporter: Any, stats: ServerStats, limit: int) -> Any:
    """Return a BatchSpanProcessor that counts the spans that do not fit into its queue of `limit` spans.

    The class is defined here because its base class needs the package OpenTelemetry.
    """
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    class Bounded(BatchSpanProcessor):  # type: ignore[misc, unused-ignore]
        num_ended = 0

        def on_end(self, span: ReadableSpan) -> None:
            if not (span.context and span.context.trace_flags.sampled):
                return
            if self.num_ended - exporter.num_exported >= limit:  # its queue would drop the oldest, and count nothing
                stats.add("trace_spans_overflowed")
                return
            self.num_ended += 1
            super().on_end(span)

    return Bounded(exporter, max_queue_size=limit, max_export_batch_size=min(512, limit))


def describe_span(span: Span, fields: dict[str, Any]) -> None:
    """Set the name and the attributes of the span from the fields of the request's log line."""
    if not span.is_recording():
        return
    for field, name in _ATTRIBUTES.items():
        if (value := fields.get(field)) is not None:
            span.set_attribute(name, shorten(value))
    if reason := fields.get("finish_reason"):
        span.set_attribute("gen_ai.response.finish_reasons", reason.split(","))
    if model := fields.get("model"):
        span.update_name(f"{span.name} {shorten(model)}")  # type: ignore[attr-defined]  # of one that is recorded
    if error := fields.get("error"):
        span.set_attribute("error.type", shorten(error))
    if fields.get("status", 0) >= 500:
        _fail(span, fields.get("error"))


def end_span(span: Span, error: BaseException | None = None) -> None:
    """End the span of a request. `error` is an unexpected error of this server, or None."""
    if error is not None:
        span.set_attribute("error.type", type(error).__name__)
        _fail(span, type(error).__name__)
    span.end()


def trace_headers(span: Span) -> dict[str, str]:
    """Return the headers that make `span` the parent of an upstream's span."""
    from opentelemetry.trace import set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers, set_span_in_context(span))
    return headers


def _fail(span: Span, description: str | None) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_status(Status(StatusCode.ERROR, description))
