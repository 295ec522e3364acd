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


class RequestSpan:
    """The span of one request, from the gate to the end of its answer."""

    __slots__ = ("_name", "_span", "headers")

    def __init__(self, span: Span, name: str, headers: dict[str, str]) -> None:
        """Wrap a span that has begun. `headers` make it the parent of an upstream's span."""
        self._span = span
        self._name = name
        self.headers = headers

    def describe(self, fields: dict[str, Any]) -> None:
        """Set the attributes that the fields of the request's log line give, and its name."""
        span = self._span
        if not span.is_recording():
            return
        for field, name in _ATTRIBUTES.items():
            if (value := fields.get(field)) is not None:
                span.set_attribute(name, shorten(value))
        if reason := fields.get("finish_reason"):
            span.set_attribute("gen_ai.response.finish_reasons", reason.split(","))
        if model := fields.get("model"):
            span.update_name(f"{self._name} {shorten(model)}")
        if error := fields.get("error"):
            span.set_attribute("error.type", shorten(error))
        if fields.get("status", 0) >= 500:
            self._fail(fields.get("error"))

    def end(self, error: BaseException | None = None) -> None:
        """End the span. `error` is a fault of this server."""
        if error is not None:
            self._span.set_attribute("error.type", type(error).__name__)
            self._fail(type(error).__name__)
        self._span.end()

    def _fail(self, description: str | None) -> None:
        from opentelemetry.trace import Status, StatusCode

        self._span.set_status(Status(StatusCode.ERROR, description))
