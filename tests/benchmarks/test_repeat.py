"""benchmarks/repeat.py: it chooses a committed run, refuses what it cannot compare, and sets old beside new."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import bench_output
import pytest
import repeat

HEADLINE_FILE, HEADLINE_SUBJECT = bench_output.HEADLINE


def test_every_row_of_a_script_is_found_with_the_arguments_that_were_recorded() -> None:
    runs = repeat.repeatable_runs()
    assert len(runs) > 30
    for name, run in ((name, run) for name, found in runs.items() for run in found):
        words = shlex.split(run["command"])
        files = [Path("/place") / word[4:] for word in words if word.startswith(".../")]
        script, *arguments = repeat.arguments_of(run, files)
        assert (repeat.ROOT / script).exists(), name
        assert [word.replace("/place/", ".../", 1) for word in arguments] == words[2:], name


def test_readme_stands_for_the_run_of_its_table() -> None:
    machine, run = repeat.choose("README")
    assert (machine, run) == repeat.choose(HEADLINE_FILE, HEADLINE_SUBJECT)
    assert (machine, run["subject"]) == ("h200", HEADLINE_SUBJECT)


@pytest.mark.parametrize(
    ("name", "subject", "number", "message"),
    [
        ("offline/tpu", None, None, "no rows 'offline/tpu'; one of README, "),
        ("offline/h200", "a", None, "offline/h200 has no subject 'a'; one of "),
        ("offline/h200", None, 0, "--run 0: offline/h200 has runs 1 to "),
        ("fleet_load/h200", None, None, "fleet_load/h200 has no rows of a script under benchmarks/; its file names "),
    ],
)
def test_rows_that_are_not_there_are_named(name: str, subject: str | None, number: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        repeat.choose(name, subject, number)


def test_every_run_of_a_file_can_be_chosen() -> None:
    for name, runs in repeat.repeatable_runs().items():
        assert [repeat.choose(name, None, number)[1] for number in range(1, len(runs) + 1)] == runs
        assert repeat.choose(name)[1] == runs[-1]


def test_path_without_its_folder_is_asked_for() -> None:
    run = {"command": "python benchmarks/a.py --model .../b.gguf --count 2"}
    assert repeat.arguments_of(run, [Path("/c/b.gguf")]) == ["benchmarks/a.py", "--model", "/c/b.gguf", "--count", "2"]
    with pytest.raises(ValueError, match=r"add --file PATH/b\.gguf"):
        repeat.arguments_of(run, [Path("/c/d.gguf")])


@pytest.mark.parametrize(
    ("machine", "gpus", "fits"),
    [
        ("cpu", [], True),
        ("cpu", ["NVIDIA H200"], True),
        ("h200", [], False),
        ("h200", ["NVIDIA H200"] * 2, True),
        ("h200-x4", ["NVIDIA H200"] * 2, False),
        ("h200", ["NVIDIA H100 80GB HBM3"], False),
    ],
)
def test_rows_of_another_kind_of_machine_are_refused(machine: str, gpus: list[str], fits: bool) -> None:
    if fits:
        repeat.check_machine(machine, gpus)
        return
    with pytest.raises(ValueError, match=f"the rows are of {machine}, .* --anyway"):
        repeat.check_machine(machine, gpus)


def test_rows_of_a_single_run_are_counted_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    single, repeated = {"value": 1.0}, {"value": 1.0, "repeats": 3}
    script, command = "python benchmarks/a.py", "meltcore load URL"
    for name, runs in {
        "a/cpu": [{"command": script, "rows": [single, repeated]}, {"command": script, "rows": [single]}],
        "b/h200": [{"command": script, "rows": [single]}, {"command": command, "rows": [single]}],
        "c/cpu": [{"command": script, "rows": [repeated]}],
    }.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / f"{name}.json").write_text(json.dumps({"runs": runs}))
    monkeypatch.setattr(repeat, "RESULTS", tmp_path)
    assert repeat.without_spread() == [
        "a/cpu: 2 of 3 rows, of cpu",
        "b/h200: 2 of 2 rows, of h200; this script repeats 1 of them",
        "4 of 6 rows have no spread; 2 of them can be repeated on a CPU",
    ]


@pytest.mark.slow
def test_command_of_a_run_writes_beside_the_committed_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "benchmarks").mkdir()
    path = tmp_path / "benchmarks" / "results" / "twice" / "cpu.json"
    path.parent.mkdir(parents=True)
    script = "from bench_output import Row, write_result\nimport sys\n"
    script += "write_result([Row(work='w', unit='s', value=float(sys.argv[1]))], {}, gpus=0)\n"
    (tmp_path / "benchmarks" / "twice.py").write_text(script)
    rows = [{"work": work, "unit": "s", "value": 2.0} for work in ("w", "gone")]
    run = {"subject": "", "date": "2026-11-21", "commit": "c0ffee", "command": "python benchmarks/twice.py 3"}
    before = json.dumps({"runs": [run | {"rows": rows}]})
    path.write_text(before)
    monkeypatch.setattr(repeat, "ROOT", tmp_path)
    monkeypatch.setattr(repeat, "RESULTS", tmp_path / "benchmarks" / "results")
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    monkeypatch.setattr(sys, "argv", ["repeat.py", "twice/cpu"])
    monkeypatch.setattr(repeat, "machine_cautions", lambda surroundings: {"steal": f"{surroundings.cores} were taken"})
    assert repeat.main() == 0
    shown = capfd.readouterr().out
    assert shown.endswith(f"caution: {len(os.sched_getaffinity(0))} were taken\n")
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines()]
    assert ["w", "s", "2", "3", "1.50"] in lines
    assert ["gone", "s", "2", "", ""] in lines
    assert path.read_text() == before


@pytest.mark.slow
def test_runs_of_one_command_become_rows_with_a_spread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The row of the median stays whole; a bound on the value holds for the worst run; a failed run records nothing."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks/count.py").write_text(
        """import pathlib, sys
from bench_output import Row, Target, write_result
count = pathlib.Path("count")
at = int(count.read_text()) if count.exists() else 0
count.write_text(str(at + 1))
value = [3.0, 9.0, 5.0, 7.0, 7.0, 7.0][at]
targets = {"a": Target(4.0), "b": Target(2.0, "ratio")}
rows = [Row(work=work, unit="s", value=value, ratio=value / 2, target=target) for work, target in targets.items()]
write_result(rows, {}, gpus=0)
sys.exit(at == 5)
"""
    )
    file = tmp_path / "benchmarks/results/count/cpu.json"
    file.parent.mkdir(parents=True)
    run = {"subject": "", "command": "python benchmarks/count.py", "date": "2026-01-01", "commit": "0"}
    file.write_text(json.dumps({"runs": [run | {"rows": [{"work": "a", "unit": "s", "value": 1.0}]}]}))
    monkeypatch.setattr(repeat, "ROOT", tmp_path)
    monkeypatch.setattr(repeat, "RESULTS", tmp_path / "benchmarks/results")
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    arguments = ["repeat.py", "count/cpu", "--record", "3"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert repeat.main() == 0
    (recorded,) = json.loads(file.read_text())["runs"]
    a, b = recorded["rows"]
    assert (a["value"], a["ratio"], a["repeats"], a["lowest"], a["highest"], a["met"]) == (5.0, 2.5, 3, 3.0, 9.0, False)
    assert (b["value"], b["ratio"], b["met"]) == (5.0, 2.5, True)
    assert repeat.main() == 1  # the third of its runs fails
    assert json.loads(file.read_text())["runs"] == [recorded]
    monkeypatch.setattr(sys, "argv", [*arguments[:-1], "2"])
    with pytest.raises(SystemExit):
        repeat.main()
    assert "--record 2: must be at least 3" in capsys.readouterr().err


def test_runs_with_other_rows_are_refused() -> None:
    runs = [{"subject": "", "rows": [{"work": work, "unit": "s", "value": 1.0}]} for work in "ab"]
    with pytest.raises(ValueError, match="the runs have different rows"):
        repeat.with_spread(runs)
