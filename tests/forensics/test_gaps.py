"""The gap finder on traces made by hand: every figure is known, and must come out exactly."""

import gzip
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import HandMade, one_of_each

from meltcore.cli.main import main
from meltcore.errors import ConfigError
from meltcore.forensics.chrome import parse_events
from meltcore.forensics.gaps import analyse, devices
from meltcore.forensics.read import read_trace
from meltcore.results.gaps import GapReport


def causes(report: GapReport) -> dict[str, tuple[int, float]]:
    return {part.name: (part.count, part.total_us) for part in report.by_cause}


def test_every_cause_is_found_to_the_nanosecond() -> None:
    report = analyse(one_of_each().trace(), 0)
    assert causes(report) == {
        "no work": (1, 200.0),
        "host silent": (1, 112.0),
        "synchronisation": (1, 50.0),
        "copy": (1, 40.0),
        "host late": (1, 30.0),
        "collective wait": (1, 30.0),
        "unknown": (1, 10.0),
        "queued": (1, 5.0),
    }
    assert report.window_us == 1000.0
    assert report.computing_us == 1000.0 - 477.0
    assert report.busy_us == report.computing_us + 40.0 + 30.0
    assert report.recoverable_share == pytest.approx(0.277)
    assert (report.kernels, report.streams) == (10, 3)


def test_stretches_are_counted_by_their_size() -> None:
    report = analyse(one_of_each().trace(), 0)
    assert {part.name: (part.count, part.total_us) for part in report.by_size} == {
        "below 10 us": (1, 5.0),
        "10 to 100 us": (5, 160.0),
        "0.1 to 1 ms": (2, 312.0),
        "1 ms and more": (0, 0.0),
    }


def test_busy_time_is_the_union_over_streams() -> None:
    made = HandMade()
    made.kernel(0, 100, "a", stream=1)
    made.kernel(20, 30, "b", stream=2)
    made.kernel(90, 60, "c", stream=3)
    report = analyse(made.trace(), 0)
    assert (report.computing_us, report.window_us, report.by_cause) == (150.0, 150.0, [])
    assert report.recoverable_share == 0.0


def test_the_pair_whose_gaps_cost_most_together_comes_first() -> None:
    made = HandMade()
    for step in range(10):
        made.kernel(100 * step, 60, "attention", made.launch(100 * step - 1))
        made.kernel(100 * step + 65, 15, "product", made.launch(100 * step + 62))
    report = analyse(made.trace(), 0)
    first, second = report.pairs
    assert (first.before, first.after, first.count, first.total_us) == ("product", "attention", 9, 180.0)
    assert (first.median_us, first.cause) == (20.0, "host silent")
    assert (second.before, second.after, second.count, second.median_us) == ("attention", "product", 10, 5.0)


def test_a_window_cuts_what_crosses_its_edges() -> None:
    report = analyse(one_of_each().trace(), 0, (50_000, 215_000))
    assert report.window_us == 165.0
    assert report.computing_us == 50.0 + 95.0
    assert causes(report) == {"queued": (1, 5.0), "host late": (1, 15.0)}


def test_each_gpu_is_read_alone() -> None:
    made = HandMade()
    made.kernel(0, 10, "a")
    made.kernel(0, 40, "b", device=1)
    made.kernel(50, 10, "c", device=1)
    trace = made.trace()
    assert devices(trace) == [0, 1]
    assert analyse(trace, 0).window_us == 10.0
    assert causes(analyse(trace, 1)) == {"unknown": (1, 10.0)}
    with pytest.raises(ConfigError, match="GPU 2 did nothing"):
        analyse(trace, 2)


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
def test_computing_and_causes_add_up_to_the_window_whatever_overlaps(
    events: list[tuple[str, int, int, int]],
) -> None:
    made = HandMade()
    for kind, start, dur, stream in events:
        launch = made.launch(start - 3) if stream == 1 else None
        if kind == "gpu_memcpy":
            made.gpu("gpu_memcpy", start, dur, "Memcpy", launch, stream)
        else:
            made.kernel(start, dur, kind, launch, stream)
    report = analyse(made.trace(), 0)
    lost = round(1000 * sum(part.total_us for part in report.by_cause))
    assert round(1000 * report.computing_us) + lost == round(1000 * report.window_us)
    assert round(1000 * sum(part.total_us for part in report.by_size)) == lost
    # Counted microsecond by microsecond.
    computed = {at for kind, start, dur, _ in events if kind == "kernel" for at in range(start, start + dur)}
    assert report.computing_us == len(computed)


def graphs(kernels: list[int], *, plain: int = 0) -> HandMade:
    """A graph launch for each number of recorded kernels, and `plain` launches without a kernel."""
    made = HandMade()
    made.kernel(0, 1, "start", made.launch(-5))
    for place, count in enumerate(kernels):
        start = 100 * (place + 1)
        correlation = made.launch(start - 10, name="cudaGraphLaunch")
        for each in range(count):
            made.kernel(start + 10 * each, 9, f"k{each}", correlation, **{"graph id": 4, "graph node id": each})
    for place in range(plain):
        made.launch(5000 + place)
    return made


def test_whole_graphs_are_trusted_and_their_kernels_counted() -> None:
    made = graphs([3, 3, 3])
    for launch in range(3):
        # The start's launch has correlation 1. What clears memory is of the graph too, but no kernel.
        made.gpu("gpu_memset", 100 * launch + 150, 2, "Memset", launch + 2, **{"graph id": 4, "graph node id": 9})
    report = analyse(made.trace(), 0)
    assert (report.untrusted, report.kernels, report.graph_launches, report.graph_kernels) == ([], 10, 3, 9)


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (graphs([3, 0, 3]), "1 of 3 graph launches have no kernel"),
        (graphs([3, 2, 3]), "graph 4: 1 of 3 launches have fewer than its 3 kernels"),
        (graphs([3], plain=1), "1 of 2 kernel launches have no kernel"),
    ],
)
def test_a_trace_that_lost_kernels_is_untrusted(made: HandMade, reason: str) -> None:
    assert any(reason in found for found in analyse(made.trace(), 0).untrusted)


def test_launches_that_a_graph_captures_have_lost_no_kernel() -> None:
    made = graphs([3])
    made.launch(5000, name="cudaStreamBeginCapture_v10000")
    made.launch(5010)
    made.launch(5020, name="cuLaunchKernelEx")
    made.launch(5030, name="cudaStreamEndCapture")
    assert analyse(made.trace(), 0).untrusted == []
    made.launch(5040)
    assert analyse(made.trace(), 0).untrusted == ["1 of 2 kernel launches have no kernel in the trace"]


def test_a_graph_that_was_under_way_when_the_recording_began_has_lost_nothing() -> None:
    made = graphs([3, 3])
    made.kernel(20, 9, "k2", 9999, **{"graph id": 4, "graph node id": 2})  # its launch is not in the trace
    assert analyse(made.trace(), 0).untrusted == []


def test_counters_that_saw_more_than_the_trace_make_it_untrusted() -> None:
    trace = one_of_each().trace()
    [reason] = analyse(trace, 0, activity_share=0.99).untrusted
    assert "own counters say it was active 99 % of the time, the trace 59 %" in reason
    assert analyse(trace, 0, activity_share=0.4).untrusted == []


def test_a_gzipped_trace_and_a_bare_list_of_events_are_read_too(tmp_path: Path) -> None:
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
        ('{"traceEvents": []}', "nothing that a GPU"),
        ('[{"ph": "X", "cat": "kernel", "dur": 5}]', "nothing that a GPU"),
        ('[{"ph": "X", "cat": "kernel", "ts": 1, "dur": 5, "args": {"device": "x"}}]', "not of a trace's form"),
        ('[{"ph": "X", "cat": "kernel", "ts": null, "dur": 5}]', "not of a trace's form"),
        ('[{"ph": "X", "cat": "kernel", "ts": 1, "dur": 5, "args": [0]}]', "not of a trace's form"),
    ],
)
def test_what_is_no_trace_of_a_gpu_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text(text)
    with pytest.raises(ConfigError, match=reason):
        read_trace(tmp_path / "trace.json")


def test_events_without_a_duration_are_left_out() -> None:
    assert parse_events([{"ph": "X", "cat": "kernel", "name": "k", "ts": 1}]).activities == []


def test_the_verb_answers_with_a_page_a_table_and_a_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = one_of_each().write(tmp_path / "trace.json")
    assert main(["profile", str(path)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "At most 27.70 % of the time could be won. Most of it: host silent (11.20 %)" in printed
    page = (tmp_path / "gaps.html").read_text()
    assert "TRUSTED" in page
    assert "<script" not in page
    assert main(["profile", str(path), "--from-ms", "0.05", "--to-ms", "0.215", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["reports"][0]["window_us"] == 165.0
    bad = graphs([3, 0]).write(tmp_path / "bad.json")
    assert main(["profile", str(bad)]) == 1
    assert "no share of it says how idle the GPU was" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("arguments", [[], ["a.json", "--url", "http://127.0.0.1:9"]])
def test_profile_takes_a_trace_or_a_server(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", *arguments]) == 2
    assert "takes a TRACE, or --url" in capsys.readouterr().err


def test_a_gzipped_trace_that_was_cut_or_is_spoilt_is_refused(tmp_path: Path) -> None:
    whole = gzip.compress(b'{"traceEvents": []}' * 99)
    for bad in (whole[:-9], whole[:12] + b"spoilt" + whole[18:]):
        (tmp_path / "trace.json.gz").write_bytes(bad)
        with pytest.raises(ConfigError, match="cannot read the trace"):
            read_trace(tmp_path / "trace.json.gz")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--seconds", "-1"], "--seconds must be more than 0"),
        (["--from-ms", "nan"], "--from-ms must be 0 or more"),
        (["--to-ms", "inf"], "--to-ms must be 0 or more"),
        (["--active-percent", "101"], "--active-percent must lie between 0 and 100"),
        (["--from-ms", "99"], "--from-ms 99 is not before the last activity at"),
    ],
)
def test_a_number_that_is_no_time_or_share_is_refused(
    arguments: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = one_of_each().write(tmp_path / "trace.json")
    assert main(["profile", str(path), *arguments]) == 2
    assert reason in capsys.readouterr().err


# The command with a scripted machine behind it: nothing else is changed.
_COMMAND = """
import sys, msgspec
from meltcore.hardware import sampler
from meltcore.hardware.fake import FakeGpu
real = sampler.Setup
sampler.Setup = lambda **settings: real(**settings, fake=[FakeGpu(readings={"sm_active_percent": 95.0})])
from meltcore.cli.main import main
sys.exit(main(["profile", *sys.argv[1:]]))
"""


def test_a_live_trace_is_checked_by_the_gpus_own_counters(tmp_path: Path) -> None:
    """The trace says 59 % busy, the counters 95 % active: the trace has lost something."""
    path = one_of_each().write(tmp_path / "trace.json")
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.path)
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
    code = [sys.executable, "-c", _COMMAND, "--url", url, "--seconds", "1", "--gpu", "0", "--json"]
    done = subprocess.run(code, capture_output=True, text=True, timeout=60, check=False)
    server.shutdown()
    server.server_close()
    assert done.returncode == 1, done.stderr
    assert asked == ["/start_profile", "/stop_profile"]
    assert "active 95 % of the time, the trace 59 %" in json.loads(done.stdout)["reports"][0]["untrusted"][0]
