"""Exports of Nsight Systems, made after the documented schema."""

import sys
from pathlib import Path

import pytest
from nsight_tools import PROCESS, Export, one_of_each_exported
from traces import one_of_each

from meltcore.cli.main import main
from meltcore.common.errors import ConfigError
from meltcore.measure.trace.gaps import analyze
from meltcore.measure.trace.read import read_trace


def test_export_gives_the_same_report_as_a_torch_trace(tmp_path: Path) -> None:
    ours = analyze(one_of_each().trace(), 0)
    theirs = analyze(read_trace(one_of_each_exported(tmp_path / "report.sqlite")), 0)
    assert theirs.by_cause == ours.by_cause
    assert theirs.by_size == ours.by_size
    assert (theirs.window_us, theirs.computing_us, theirs.busy_us) == (1000.0, ours.computing_us, ours.busy_us)
    assert (theirs.kernels, theirs.streams, theirs.untrusted) == (ours.kernels, ours.streams, [])


def test_correlations_of_two_processes_stay_distinct(tmp_path: Path) -> None:
    made = Export(tmp_path / "two.sqlite")
    first = made.launch(0)
    made.kernel(10, 5, "a", first)
    made.kernel(40, 5, "b", first, process=PROCESS + 1)  # of a process that recorded no launch
    trace = read_trace(made.done())
    assert trace.host[0].correlation == trace.activities[0].correlation != trace.activities[1].correlation
    [gap] = analyze(trace, 0).by_cause
    assert gap.name == "unknown"


def test_graph_recorded_as_a_whole_is_computing_time(tmp_path: Path) -> None:
    made = Export(tmp_path / "graphs.sqlite")
    for step in range(3):
        made.graph(100 * step, 90, made.launch(100 * step - 5, name="cudaGraphLaunch_v10000"), graph=4)
    report = analyze(read_trace(made.done()), 0)
    assert (report.computing_us, report.window_us, report.graph_launches) == (270.0, 290.0, 3)
    assert report.untrusted == []


def test_graph_launches_without_a_record_are_untrusted(tmp_path: Path) -> None:
    made = Export(tmp_path / "lost.sqlite")
    made.kernel(0, 5, "a", made.launch(-5))
    made.launch(20, name="cudaGraphLaunch_v10000")
    made.kernel(50, 5, "b", made.launch(40))
    assert analyze(read_trace(made.done()), 0).untrusted == ["1 of 1 graph launches have no kernel in the trace"]


def test_ranges_have_text_or_string_ids_and_marks_are_skipped(tmp_path: Path) -> None:
    made = Export(tmp_path / "ranges.sqlite")
    made.kernel(0, 5, "a", made.launch(-5))
    made.range(0, 10, "execute_context_0(0)_generation_64(64)")
    made.range(20, 10, "execute_context_1(512)_generation_63(63)", registered=True)
    made.range(40, None, "execute_mark")
    made.kernel(60, 5, "b", made.launch(50))
    report = analyze(read_trace(made.done()), 0)
    assert report.steps == 2


def test_missing_tables_were_not_recorded(tmp_path: Path) -> None:
    made = Export(tmp_path / "few.sqlite")
    made.kernel(0, 5, "a", made.launch(-5))
    for table in ("OSRT_API", "NVTX_EVENTS", "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"):
        made.drop(f"DROP TABLE {table}")
    assert [each.name for each in read_trace(made.done()).activities] == ["a"]


@pytest.mark.parametrize(
    ("sql", "reason"),
    [
        ("ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL DROP COLUMN deviceId", "KERNEL has no column deviceId"),
        ("DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL", "no GPU activity"),
    ],
)
def test_export_of_another_schema_is_refused(sql: str, reason: str, tmp_path: Path) -> None:
    made = Export(tmp_path / "odd.sqlite")
    made.kernel(0, 5, "a", made.launch(-5))
    made.drop(sql)
    with pytest.raises(ConfigError, match=reason):
        read_trace(made.done())


def test_broken_database_is_refused(tmp_path: Path) -> None:
    path = one_of_each_exported(tmp_path / "report.sqlite")
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(ConfigError, match=r"cannot read .* as an export of Nsight Systems"):
        read_trace(path)


def test_command_reads_an_export_without_changing_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = one_of_each_exported(tmp_path / "report.sqlite")
    before = path.read_bytes()
    assert main(["profile", str(path)]) == 0
    assert "at most 27.70 % is idle time to recover" in " ".join(capsys.readouterr().out.split())
    assert path.read_bytes() == before
    assert {file.name for file in tmp_path.iterdir()} == {"report.sqlite", "gaps.html", "gaps.json"}


def fake_nsys(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a program named nsys on the path, and nothing else."""
    program = folder / "bin" / "nsys"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nimport shutil, sys\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))


def test_report_is_exported_by_nsys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one_of_each_exported(tmp_path / "kept.sqlite").rename(tmp_path / "report.nsys-rep")
    fake_nsys(
        tmp_path,
        "assert sys.argv[1:5] == ['export', '--type', 'sqlite', '--output'], sys.argv\n"
        "shutil.copy(sys.argv[6], sys.argv[5])",
        monkeypatch,
    )
    assert analyze(read_trace(tmp_path / "report.nsys-rep"), 0).window_us == 1000.0
    assert {file.name for file in tmp_path.iterdir()} == {"bin", "report.nsys-rep"}


def test_failed_export_states_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="needs nsys, which is not installed here"):
        read_trace(tmp_path / "report.nsys-rep")
    fake_nsys(tmp_path, "sys.exit('unknown report version')", monkeypatch)
    with pytest.raises(ConfigError, match=r"could not export .*: unknown report version"):
        read_trace(tmp_path / "report.nsys-rep")
