"""Gap reports of hand-made traces: every number is known and must come out exactly."""

import gzip
import json
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from fake_gpu import FakeGpu, cli_command
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import TraceBuilder, one_of_each
from waiting import WAIT_S

from meltcore.cli.main import main
from meltcore.common.errors import ConfigError
from meltcore.measure.documents.gaps import GapReport
from meltcore.measure.trace.gaps import analyze, trace_devices
from meltcore.measure.trace.read import parse_events, read_trace


def causes(report: GapReport) -> dict[str, tuple[int, float]]:
    return {part.name: (part.count, part.total_us) for part in report.by_cause}


def test_every_cause_is_found_to_the_nanosecond() -> None:
    report = analyze(one_of_each().trace(), 0)
    assert causes(report) == {
        "no work": (1, 200.0),
        "untraced host": (1, 112.0),
        "synchronization": (1, 50.0),
        "exposed copy": (1, 40.0),
        "late launch": (1, 30.0),
        "exposed communication": (1, 30.0),
        "unknown": (1, 10.0),
        "kernel wait": (1, 5.0),
    }
    assert report.window_us == 1000.0
    assert report.computing_us == 1000.0 - 477.0
    assert report.busy_us == report.computing_us + 40.0 + 30.0
    assert report.recoverable_share == pytest.approx(0.277)
    assert (report.kernels, report.streams) == (10, 3)


def test_gaps_are_counted_by_size() -> None:
    report = analyze(one_of_each().trace(), 0)
    assert {part.name: (part.count, part.total_us) for part in report.by_size} == {
        "below 10 us": (1, 5.0),
        "10 to 100 us": (5, 160.0),
        "0.1 to 1 ms": (2, 312.0),
        "1 ms and more": (0, 0.0),
    }


def test_busy_time_is_the_union_over_streams() -> None:
    made = TraceBuilder()
    made.kernel(0, 100, "a", stream=1)
    made.kernel(20, 30, "b", stream=2)
    made.kernel(90, 60, "c", stream=3)
    report = analyze(made.trace(), 0)
    assert (report.computing_us, report.window_us, report.by_cause) == (150.0, 150.0, [])
    assert report.recoverable_share == 0.0


def test_pair_with_the_longest_total_gap_comes_first() -> None:
    made = TraceBuilder()
    for step in range(10):
        made.kernel(100 * step, 60, "attention", made.launch(100 * step - 1))
        made.kernel(100 * step + 65, 15, "gemm", made.launch(100 * step + 62))
    report = analyze(made.trace(), 0)
    first, second = report.pairs
    assert (first.before, first.after, first.count, first.total_us) == ("gemm", "attention", 9, 180.0)
    assert (first.median_us, first.cause) == (20.0, "untraced host")
    assert (second.before, second.after, second.count, second.median_us) == ("attention", "gemm", 10, 5.0)


def test_window_cuts_activities_at_its_edges() -> None:
    report = analyze(one_of_each().trace(), 0, (50_000, 215_000))
    assert report.window_us == 165.0
    assert report.computing_us == 50.0 + 95.0
    assert causes(report) == {"kernel wait": (1, 5.0), "late launch": (1, 15.0)}


def test_gpus_are_analyzed_separately() -> None:
    made = TraceBuilder()
    made.kernel(0, 10, "a")
    made.kernel(0, 40, "b", device=1)
    made.kernel(50, 10, "c", device=1)
    trace = made.trace()
    assert trace_devices(trace) == [0, 1]
    assert analyze(trace, 0).window_us == 10.0
    assert causes(analyze(trace, 1)) == {"unknown": (1, 10.0)}
    with pytest.raises(ConfigError, match="GPU 2 has no activity"):
        analyze(trace, 2)


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["kernel", "gpu_memcpy", "nccl"]),
            st.integers(0, 500),
            st.integers(1, 80),
            st.integers(1, 3),
        ),
        min_size=1,
        max_size=40,
    )
)
def test_computing_and_gaps_add_up_to_the_window(
    events: list[tuple[str, int, int, int]],
) -> None:
    made = TraceBuilder()
    for kind, start, dur, stream in events:
        launch = made.launch(start - 3) if stream == 1 else None
        if kind == "gpu_memcpy":
            made.gpu("gpu_memcpy", start, dur, "Memcpy", launch, stream)
        else:
            made.kernel(start, dur, kind, launch, stream)
    report = analyze(made.trace(), 0)
    lost = round(1000 * sum(part.total_us for part in report.by_cause))
    assert round(1000 * report.computing_us) + lost == round(1000 * report.window_us)
    assert round(1000 * sum(part.total_us for part in report.by_size)) == lost
    # Counted microsecond by microsecond.
    computed = {at for kind, start, dur, _ in events if kind == "kernel" for at in range(start, start + dur)}
    assert report.computing_us == len(computed)


def graphs(kernels: list[int], *, plain: int = 0) -> TraceBuilder:
    """A graph launch for each number of recorded kernels, and `plain` launches without a kernel."""
    made = TraceBuilder()
    made.kernel(0, 1, "start", made.launch(-5))
    for index, count in enumerate(kernels):
        start = 100 * (index + 1)
        correlation = made.launch(start - 10, name="cudaGraphLaunch")
        for each in range(count):
            made.kernel(start + 10 * each, 9, f"k{each}", correlation, **{"graph id": 4, "graph node id": each})
    for index in range(plain):
        made.launch(5000 + index)
    return made


def test_complete_graphs_are_trusted_and_their_kernels_counted() -> None:
    made = graphs([3, 3, 3])
    for launch in range(3):
        # The start's launch has correlation 1. A memset belongs to the graph, too, but is no kernel.
        made.gpu("gpu_memset", 100 * launch + 150, 2, "Memset", launch + 2, **{"graph id": 4, "graph node id": 9})
    report = analyze(made.trace(), 0)
    assert (report.untrusted, report.kernels, report.graph_launches, report.graph_kernels) == ([], 10, 3, 9)


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (graphs([3, 0, 3]), "1 of 3 graph launches have no kernel"),
        (graphs([3, 2, 3]), "graph 4: 1 of 3 launches have fewer than its 3 kernels"),
        (graphs([3], plain=1), "1 of 2 kernel launches have no kernel"),
    ],
)
def test_trace_that_lost_kernels_is_untrusted(made: TraceBuilder, reason: str) -> None:
    assert any(reason in found for found in analyze(made.trace(), 0).untrusted)


def test_captured_launches_have_lost_no_kernel() -> None:
    made = graphs([3])
    made.launch(5000, name="cudaStreamBeginCapture_v10000")
    made.launch(5010)
    made.launch(5020, name="cuLaunchKernelEx")
    made.launch(5030, name="cudaStreamEndCapture")
    assert analyze(made.trace(), 0).untrusted == []
    made.launch(5040)
    assert analyze(made.trace(), 0).untrusted == ["1 of 2 kernel launches have no kernel in the trace"]


def test_graph_running_when_the_recording_began_has_lost_nothing() -> None:
    made = graphs([3, 3])
    made.kernel(20, 9, "k2", 9999, **{"graph id": 4, "graph node id": 2})  # its launch is not in the trace
    assert analyze(made.trace(), 0).untrusted == []


def test_trace_below_the_gpus_counters_is_untrusted() -> None:
    trace = one_of_each().trace()
    [reason] = analyze(trace, 0, activity_share=0.99).untrusted
    assert "own counters say it was active 99 % of the time, the trace 59 %" in reason
    assert analyze(trace, 0, activity_share=0.4).untrusted == []


def test_gzipped_trace_and_bare_list_of_events_are_read(tmp_path: Path) -> None:
    made = one_of_each()
    plain = read_trace(made.write(tmp_path / "trace.json"))
    (tmp_path / "trace.json.gz").write_bytes(gzip.compress((tmp_path / "trace.json").read_bytes()))
    (tmp_path / "list.json").write_text(json.dumps([*made.events, {"ph": "M", "name": "process_name"}, "odd"]))
    assert read_trace(tmp_path / "trace.json.gz") == plain == read_trace(tmp_path / "list.json")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "cannot read the trace"),
        ('{"a": 1}', "has no traceEvents"),
        ('{"traceEvents": []}', "no GPU activity"),
        ('[{"ph": "X", "cat": "kernel", "dur": 5}]', "no GPU activity"),
        ('[{"ph": "X", "cat": "kernel", "ts": 1, "dur": 5, "args": {"device": "x"}}]', "an event with invalid fields"),
        ('[{"ph": "X", "cat": "kernel", "ts": null, "dur": 5}]', "an event with invalid fields"),
        ('[{"ph": "X", "cat": "kernel", "ts": 1, "dur": 5, "args": [0]}]', "an event with invalid fields"),
    ],
)
def test_files_other_than_gpu_traces_are_refused(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text(text)
    with pytest.raises(ConfigError, match=reason):
        read_trace(tmp_path / "trace.json")


def test_events_without_a_duration_are_skipped() -> None:
    assert parse_events([{"ph": "X", "cat": "kernel", "name": "k", "ts": 1}]).activities == []


def test_command_writes_page_and_table_and_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = one_of_each().write(tmp_path / "trace.json")
    assert main(["profile", str(path)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "at most 27.70 % is idle time to recover. Most of it: untraced host (11.20 %)" in printed
    page = (tmp_path / "gaps.html").read_text()
    assert "TRUSTED" in page
    assert "<script" not in page
    assert main(["profile", str(path), "--from-ms", "0.05", "--to-ms", "0.215", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["reports"][0]["window_us"] == 165.0
    bad = graphs([3, 0]).write(tmp_path / "bad.json")
    assert main(["profile", str(bad)]) == 1
    assert "it does not say how idle the GPU was" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("arguments", [[], ["a.json", "--url", "http://127.0.0.1:9"]])
def test_profile_takes_a_trace_or_a_server(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", *arguments]) == 2
    assert "takes a TRACE, or --url" in capsys.readouterr().err


def test_damaged_gzip_trace_is_refused(tmp_path: Path) -> None:
    whole = gzip.compress(b'{"traceEvents": []}' * 99)
    for bad in (whole[:-9], whole[:12] + b"spoilt" + whole[18:]):
        (tmp_path / "trace.json.gz").write_bytes(bad)
        with pytest.raises(ConfigError, match="cannot read the trace"):
            read_trace(tmp_path / "trace.json.gz")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--seconds", "-1"], "'-1' is not a number of more than 0"),
        (["--from-ms", "nan"], "'nan' is not a number of at least 0"),
        (["--to-ms", "inf"], "'inf' is not a number of at least 0"),
        (["--active-percent", "101"], "'101' is not a number of at least 0 and at most 100"),
        (["--from-ms", "99"], "--from-ms 99 is not before the last activity at"),
    ],
)
def test_invalid_numbers_are_refused(
    arguments: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = one_of_each().write(tmp_path / "trace.json")
    try:
        code = main(["profile", str(path), *arguments])
    except SystemExit as error:  # of argparse
        code = int(error.code or 0)
    assert code == 2
    assert reason in capsys.readouterr().err


@pytest.mark.slow
def test_live_trace_is_checked_by_the_gpus_counters(tmp_path: Path) -> None:
    """The trace says 59 % busy, the counters 95 % active: the trace is incomplete."""
    path = one_of_each().write(tmp_path / "trace.json")
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            paths.append(self.path)
            body = json.dumps({"path": str(path)}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Keep the test's output clean."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    gpus = [FakeGpu(readings={"sm_active_percent": 95.0})]
    command = cli_command(gpus, "profile", "--url", url, "--seconds", "1", "--gpu", "0", "--json")
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    server.shutdown()
    server.server_close()
    assert done.returncode == 1, done.stderr
    assert paths == ["/start_profile", "/stop_profile"]
    assert "active 95 % of the time, the trace 59 %" in json.loads(done.stdout)["reports"][0]["untrusted"][0]


def test_unfinished_report_of_nsight_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.qdstrm").touch()
    with pytest.raises(ConfigError, match=r"a\.qdstrm is not a report yet: .* QdstrmImporter makes a \.nsys-rep"):
        read_trace(tmp_path / "a.qdstrm")
