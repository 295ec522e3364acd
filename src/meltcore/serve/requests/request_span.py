"""The span of one request in an OpenTelemetry trace; `tracing.py` begins it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meltcore.serve.requests.request_fields import shorten

if TYPE_CHECKING:
    from opentelemetry.trace import Span

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


def describe_span(span: Span, fields: dict[str, Any]) -> None:
    """Set the name of the span, and the attributes that follow from the fields of the request's log line."""
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
    """End the span of a request. `error` is an error of this server."""
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
