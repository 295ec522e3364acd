"""Traces against a scripted collector: attributes, parents, sampling, a collector that is down; nothing when off."""

from __future__ import annotations

import asyncio
import io
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import uvloop
from server_harness import configure
from upstream_tools import CHAT, DONE, EVENT, Upstream, answer, sends, served, stream
from waiting import WAIT_S, wait_until

from meltcore.common.errors import ConfigError
from meltcore.serve.requests.log import Log
from meltcore.serve.requests.metrics import Metrics
from meltcore.serve.requests.stats import ServerStats
from meltcore.serve.requests.tracing import Tracing, describe_span, end_span, resolve_tracing, trace_headers

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
USAGE = b'{"id":"x","choices":[],"usage":{"prompt_tokens":11,"completion_tokens":7}}'


def test_nothing_is_imported_while_traces_are_off() -> None:
    code = "import sys, meltcore.serve.api_server; sys.exit(any('opentelemetry' in name for name in sys.modules))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=WAIT_S)


@pytest.mark.parametrize(
    ("endpoint", "variables", "expected"),
    [
        (None, {}, None),
        ("http://c/v1/traces", {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://d"}, "http://c/v1/traces"),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://d/x"}, "http://d/x"),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://d/"}, "http://d/v1/traces"),
        ("http://c/v1/traces", {"OTEL_SDK_DISABLED": "true"}, None),
        ("c:4317", {}, "--otlp-traces-endpoint must be like http://127.0.0.1:4318/v1/traces; got 'c:4317'"),
        ("http://c", {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "OTLP_PROTOCOL must be http/protobuf; got 'grpc'"),
        ("http://c", {"OTEL_BSP_MAX_QUEUE_SIZE": "0"}, "OTEL_BSP_MAX_QUEUE_SIZE must be a whole number of at least 1"),
    ],
)
def test_endpoint_comes_from_flag_or_environment(
    endpoint: str | None, variables: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("meltcore.serve.requests.tracing.find_spec", lambda _name: object())
    config = configure(otlp_endpoint=endpoint).spec
    if expected is None or expected.startswith("http"):
        assert resolve_tracing(config).server.otlp_endpoint == expected
    else:
        with pytest.raises(ConfigError, match=re.escape(expected)):
            resolve_tracing(config)


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meltcore.serve.requests.tracing.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"needs OpenTelemetry: pip install '.\[otel\]'"):
        resolve_tracing(configure(otlp_endpoint="http://c/v1/traces").spec)


# --- against a collector


class Collector:
    """Keeps the spans that it gets, or answers `status`."""

    def __init__(self, status: int) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        self.spans: list[Any] = []
        self.resource: dict[str, str] = {}
        self.headers: dict[str, str] = {}
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.headers = {name.lower(): value for name, value in self.headers.items()}
                if status == 200 and self.path == "/v1/traces":
                    for part in ExportTraceServiceRequest.FromString(body).resource_spans:
                        collector.resource = {each.key: each.value.string_value for each in part.resource.attributes}
                        collector.spans += [span for scope in part.scope_spans for span in scope.spans]
                self.send_response(status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1/traces"


@contextmanager
def collector(status: int = 200) -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.sdk", reason="the extra `otel` is not installed: make .venv/.installed")
    found = Collector(status)
    thread = threading.Thread(target=found.server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield found
    finally:
        found.server.shutdown()
        thread.join(WAIT_S)
        found.server.server_close()


def attributes(span: Any) -> dict[str, Any]:
    values = {}
    for each in span.attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        values[each.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return values


def tracing(endpoint: str) -> tuple[Tracing, ServerStats]:
    stats = ServerStats(())
    return Tracing(endpoint, stats, Log("json", stats, io.StringIO())), stats


def counted(stats: ServerStats) -> list[int]:
    return [round(stats.total(f"trace_spans_{name}")) for name in ("sent", "overflowed", "failed")]


def test_spans_of_requests_reach_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attributes, times, the client's parent, our parent for the upstream; errors; standard variables."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=a")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "api")

    async def check(endpoint: str) -> ServerStats:
        traces, stats = tracing(endpoint)
        upstream = Upstream(sends(answer(USAGE)))
        async with served(upstream, tracing=traces) as server:
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=b", "x-request-id": "r1"}
            async with server.session.post(server.url + CHAT, data=b'{"model":"m"}', headers=headers) as response:
                assert response.status == 200
            passed_on.update(upstream.received[0].headers)
            upstream.behave = sends(stream(EVENT, EVENT, DONE, b""))
            assert (await server.ask(stream=True))[0] == 200
            upstream.behave = sends(answer(b"<p>", content_type="text/html"))
            assert (await server.ask())[0] == 502
            assert (await server.ask(model="unknown"))[0] == 404
            async with server.session.get(server.url + "/health") as response:
                assert response.status == 200
        await asyncio.to_thread(traces.close)
        return stats

    passed_on: dict[str, str] = {}
    began_ns = time.time_ns()
    with collector() as found:
        stats = uvloop.run(check(found.url))
    assert counted(stats) == [4, 0, 0]
    assert b"meltcore:trace_spans_sent_total 4.0" in Metrics(stats, dict).text()
    assert (found.headers["x-tenant"], found.resource["service.name"]) == ("a", "api")
    whole, streamed, html, unknown = found.spans
    assert (whole.trace_id.hex(), whole.parent_span_id.hex(), whole.trace_state) == (TRACE, PARENT, "a=b")
    assert passed_on["traceparent"] == f"00-{TRACE}-{whole.span_id.hex()}-01"
    assert passed_on["tracestate"] == "a=b"
    assert began_ns <= whole.start_time_unix_nano < whole.end_time_unix_nano <= time.time_ns()
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "meltcore",
        "gen_ai.request.model": "m",
        "gen_ai.request.id": "r1",
        "gen_ai.request.stream": False,
        "http.request.method": "POST",
        "url.path": CHAT,
        "http.response.status_code": 200,
        "meltcore.replica": 0,
    }
    found_attributes = attributes(whole)
    assert expected.items() <= found_attributes.items()
    assert 0 < found_attributes["gen_ai.response.time_to_first_chunk"] < 10
    assert (whole.name, whole.kind, whole.status.code) == ("chat m", 2, 0)
    assert attributes(streamed)["gen_ai.request.stream"] is True
    assert not streamed.parent_span_id
    assert (html.status.code, attributes(html)["error.type"]) == (2, "upstream_error")
    assert (unknown.status.code, attributes(unknown)["http.response.status_code"]) == (0, 404)


def test_sampling_is_that_of_the_environment_and_of_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    with collector() as found:
        traces, stats = tracing(found.url)
        for flags in ("00", "01"):
            headers = [(b"traceparent", f"00-{TRACE}-{PARENT}-{flags}".encode())]
            span = traces.begin({"headers": headers, "method": "POST", "path": CHAT})
            assert trace_headers(span)["traceparent"].endswith(flags), "an upstream samples as we do"
            describe_span(span, {"status": 200, "model": "m"})
            end_span(span)
        traces.begin({"headers": [], "method": "POST", "path": CHAT}).end()
        traces.close()
    assert len(found.spans) == 1
    assert counted(stats) == [1, 0, 0]


@pytest.mark.slow
def test_spans_are_dropped_and_counted_where_the_collector_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collector that refuses, one that is not there, and a queue that is full: requests do not wait for any."""
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")
    with collector(status=400) as found:
        traces, stats = tracing(found.url)
        for _ in range(3):
            traces.begin({"headers": [], "method": "POST", "path": CHAT}).end()
        traces.close()
        assert counted(stats) == [0, 0, 3]
    traces, stats = tracing(found.url)  # its socket is closed
    for _ in range(50):
        traces.begin({"headers": [], "method": "POST", "path": CHAT}).end()
    traces.close()
    wait_until(lambda: sum(counted(stats)) >= 50, "every span is counted")
    sent, overflowed, failed = counted(stats)
    assert (sent, overflowed + failed) == (0, 50)
    assert 1 <= failed <= 8, "what the queue and one batch hold: the others did not wait for the collector"
