"""Fresh starts of the scripted server, whose speed is known: a slower script must be a regression."""

import json
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from scripted_server import COMMAND_LINE
from waiting import WAIT_S

from meltcore.cli.main import main
from meltcore.common.errors import ConfigError, MeltcoreError
from meltcore.common.process import ProcessError
from meltcore.measure.documents.comparison import ComparisonResult, read_start_set, write_start_set
from meltcore.measure.experiments.compare.starts import (
    StartOptions,
    baseline_folder,
    interleave,
    run_starts,
    stored_load,
)
from meltcore.measure.experiments.servers import parse_command
from meltcore.measure.load.config import LoadConfig

SCRIPTED = f"{COMMAND_LINE} --port {{port}} --ttft-ms 5"
# On a busy machine a start may be CLIENT_BOUND, which a comparison refuses otherwise.
FORCE = "--force"
LOAD = ["--concurrency", "4", "--num-prompts", "8", "--workload", "random:in=8,out=8"]


def command_file(path: Path, itl_ms: float, more: str = "") -> str:
    path.write_text(f"{SCRIPTED} --itl-ms {itl_ms} {more}\n")
    return str(path)


def left_behind(folder: Path) -> list[str]:
    """Ids of the processes whose output goes to a file in `folder`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/fd/1"):
        with suppress(OSError):
            if str(path.readlink()).startswith(f"{folder}/"):
                found.append(path.parts[2])
    return found


def small_load() -> LoadConfig:
    return LoadConfig(url="", concurrency=(4,), num_prompts=(8,), num_warmups=2, workload="random:in=8,out=8", seed=3)


def test_two_servers_alternate_in_mirrored_order() -> None:
    commands = {"A": parse_command("a {port}"), "B": parse_command("b {port}")}
    planned = interleave(commands, 6)
    assert "".join(start.set_name for start in planned) == "ABBAABBAABBA"
    assert [start.number for start in planned if start.set_name == "B"] == [1, 2, 3, 4, 5, 6]
    # A steady drift of the machine adds as much to one side as to the other.
    assert len({sum(at for at, start in enumerate(planned) if start.set_name == name) for name in "AB"}) == 1
    with pytest.raises(ConfigError, match="at least 1"):
        interleave(commands, 0)


@pytest.mark.slow
def test_every_start_has_its_own_port_and_the_same_load(tmp_path: Path) -> None:
    lines: list[str] = []
    command = parse_command(f"{SCRIPTED} --itl-ms 1")
    found = run_starts(interleave({"A": command}, 2), StartOptions(load=small_load()), tmp_path, report=lines.append)[
        "A"
    ]
    assert [start.levels[0].succeeded for start in found.starts] == [8, 8]
    assert found.load["workload"] == "random:in=8,out=8"
    ports = {path.read_text().split()[-1] for path in tmp_path.glob("server-A-*.log")}
    assert len(ports) == 2
    assert lines == []


def test_stored_set_gives_its_load_again(tmp_path: Path) -> None:
    command = parse_command(f"{SCRIPTED} --itl-ms 1")
    found = run_starts(interleave({"A": command}, 1), StartOptions(load=small_load()), tmp_path, report=print)["A"]
    write_start_set(tmp_path / "kept", found)
    assert stored_load(read_start_set(tmp_path / "kept").load) == small_load()


@pytest.mark.parametrize(
    ("more", "error", "says"),
    [
        ("--nonsense", ProcessError, "ended with code 2 before it could become ready"),
        ("--die-after 5", MeltcoreError, "start 1 of A ended SERVER_DIED"),
    ],
)
def test_failed_start_ends_the_series_and_is_named(
    more: str, error: type[Exception], says: str, tmp_path: Path
) -> None:
    command = parse_command(f"{SCRIPTED} --itl-ms 1 {more}")
    with pytest.raises(error, match=says):
        run_starts(interleave({"A": command}, 2), StartOptions(load=small_load()), tmp_path, report=print)


@pytest.mark.slow
def test_slower_server_is_a_regression_with_exit_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = command_file(tmp_path / "A.cmd", 4), command_file(tmp_path / "B.cmd", 40)
    arguments = ["compare", "--run", old, new, "--starts", "4", "--control", "3", "--out", str(tmp_path), "--json"]
    assert main([*arguments, FORCE, *LOAD]) == 1
    found = msgspec.json.decode(capsys.readouterr().out, type=ComparisonResult)
    assert found.verdict == "REGRESSION"
    assert found.order == "ABBAABBA"
    assert found.control is not None
    assert len(found.control.old_values) == 3
    assert found.new_command.endswith("--itl-ms 40")
    [folder] = tmp_path.glob("*-compare")
    assert (folder / "report.html").exists()
    assert "REGRESSION" in (folder / "comparison.md").read_text()
    assert main(["compare", str(folder / "B"), str(folder / "A"), FORCE]) == 0
    assert "IMPROVEMENT" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_interrupted_comparison_ends_its_server_and_keeps_measured_starts(number: int, tmp_path: Path) -> None:
    file = command_file(tmp_path / "A.cmd", 1)
    command = [sys.executable, "-m", "meltcore.cli.main", "compare", "--run", file, file, "--control", "3", *LOAD]
    compared = subprocess.Popen([*command, "--out", str(tmp_path / "runs")], stderr=subprocess.PIPE, text=True)
    try:
        limit_s = time.monotonic() + WAIT_S
        while not (begun := list(tmp_path.glob("runs/*/server-B-2.log"))):
            assert time.monotonic() < limit_s
            assert compared.poll() is None
            time.sleep(0.02)
        compared.send_signal(number)
        _, output = compared.communicate(timeout=WAIT_S)
    finally:
        compared.kill()
    [log] = begun
    assert compared.returncode == 130
    assert f"meltcore compare {log.parent / 'A'} {log.parent / 'B'}" in output
    starts = {name: len(read_start_set(log.parent / name).starts) for name in ("control", "A", "B")}
    assert starts == {"control": 3, "A": 1, "B": 1}
    assert left_behind(log.parent) == []


@pytest.mark.slow
def test_baseline_is_saved_listed_shown_and_compared_against(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = ["--baselines", str(tmp_path / "kept")]
    old, new = command_file(tmp_path / "A.cmd", 4), command_file(tmp_path / "B.cmd", 40)
    assert main(["baseline", "save", "main", "--run", old, *kept, *LOAD]) == 0
    assert main(["baseline", "list", *kept]) == 0
    assert main(["baseline", "show", "main", *kept]) == 0
    assert "Git revision" in capsys.readouterr().out
    assert main(["baseline", "show", "main", "--json", *kept]) == 0
    assert len(json.loads(capsys.readouterr().out)["starts"]) == 6
    out = ["--out", str(tmp_path), "--starts", "4"]
    # The median gap between tokens, because the rate of eight short answers halves where a busy machine stops once.
    assert main(["compare", "main", "--run", new, *kept, *out, FORCE, "--metric", "ITL p50 ms"]) == 1
    assert "not interleaved" in " ".join(capsys.readouterr().out.split())
    assert main(["baseline", "save", "main", "--run", old, *kept]) == 2
    assert "baseline main exists already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["save", "main"], "needs --run FILE"),
        (["save", "main", "--run", "A.cmd", "--starts", "5"], "at least 6 starts"),
        (["save"], "needs a NAME"),
        (["show", "other"], "there is no baseline other"),
    ],
)
def test_invalid_baseline_commands_are_refused(
    arguments: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["baseline", *arguments, "--baselines", str(tmp_path)]) == 2
    assert reason in capsys.readouterr().err


def test_baseline_name_must_not_be_a_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a baseline name"):
        baseline_folder(tmp_path, "../main", replace=False)


@pytest.mark.parametrize("sides", [["A"], ["A", "B", "C"], ["A", "B", "--run", "x.cmd"], ["--run", "x.cmd"]])
def test_compare_takes_two_sides(sides: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *sides]) == 2
    assert "compare takes two sides" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["--metric", "beauty"], "no metric 'beauty'"),
        (["--at", "7"], "concurrency 7 is to be judged but not measured"),
        (["--starts", "0"], "at least 1 start per side"),
        (["--control", "2"], "3 of A against A"),
        (["--least", "6"], "--least 6 must be at least 0 and below --must-find 5"),
    ],
)
def test_invalid_comparison_starts_no_server(
    more: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = command_file(tmp_path / "A.cmd", 4)
    assert main(["compare", "--run", file, file, "--out", str(tmp_path / "runs"), *LOAD, *more]) == 2
    assert reason in capsys.readouterr().err
    assert not list(tmp_path.rglob("server-*.log"))
