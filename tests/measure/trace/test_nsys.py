"""`meltcore profile --nsys` with a scripted nsys: a report, failures, a .qdstrm alone, hangs, interrupts, no nsys."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from nsight_tools import one_of_each_exported
from waiting import WAIT_S

from meltcore.cli.main import main
from meltcore.common.errors import ConfigError
from meltcore.common.process import free_port, start_ticks
from meltcore.measure.documents.gaps import GpuProfile
from meltcore.measure.experiments.servers import is_healthy
from meltcore.measure.trace.nsys import nsys_command, record

# Runs the command, as nsys does, and then leaves what SCRIPT says. `export` copies the report, a database here.
NSYS = """#!{python}
import json, os, pathlib, shutil, subprocess, sys, time
arguments = sys.argv[1:]
with open({calls!r}, "a") as calls:
    calls.write(json.dumps(arguments) + "\\n")
if arguments[0] == "export":
    shutil.copy(arguments[5], arguments[4])
    sys.exit(0)
options = [each for each in arguments[1:] if each.startswith("--")]
output = next(each.removeprefix("--output=") for each in options if each.startswith("--output="))
count = next((at for at, each in enumerate(arguments[1:]) if not each.startswith("--")), None)
child = subprocess.Popen(arguments[1 + count:])
{script}
"""
REPORT = "status = child.wait(); shutil.copy({export!r}, output + '.nsys-rep'); sys.exit(status)"


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


def fake_nsys(folder: Path, script: str = REPORT) -> None:
    export = folder / "made.sqlite"
    if not export.exists():
        one_of_each_exported(export)
    program = folder / "bin" / "nsys"
    program.parent.mkdir(exist_ok=True)
    script = script.replace("{export!r}", repr(str(export)))
    program.write_text(NSYS.format(python=sys.executable, calls=str(folder / "calls"), script=script))
    program.chmod(0o755)


def calls(folder: Path) -> list[list[str]]:
    return [json.loads(line) for line in (folder / "calls").read_text().splitlines()]


def run_of(folder: Path) -> Path:
    [run] = (folder / "runs").iterdir()
    return run


def command(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def ended(pid_file: Path, limit_s: float = 10.0) -> bool:
    deadline_s = time.monotonic() + limit_s
    while start_ticks(int(pid_file.read_text())) is not None and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return start_ticks(int(pid_file.read_text())) is None


# A command that writes its process id and stays.
STAY = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(600)"


def test_command_is_recorded_exported_and_analyzed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake_nsys(folder)
    written = folder / "said"
    code = f"import pathlib, sys; pathlib.Path({str(written)!r}).write_text(repr(sys.argv[1:])); print('hello')"
    assert main(["profile", "--nsys", "--", *command(code), "--flag", "-x", "a b"]) == 0
    assert written.read_text() == "['--flag', '-x', 'a b']"
    assert "at most 27.70 % is idle time to recover" in " ".join(capsys.readouterr().out.split())
    run = run_of(folder)
    assert {each.name for each in run.iterdir()} == {
        *("trace.nsys-rep", "trace.sqlite", "nsys.log", "gaps.html", "gaps.json")
    }
    assert "hello" in (run / "nsys.log").read_text()
    assert msgspec.json.decode((run / "gaps.json").read_bytes(), type=GpuProfile).fingerprint is not None
    profile, export = calls(folder)
    assert profile[:4] == ["profile", "--trace=cuda,nvtx,osrt", "--cuda-graph-trace=node", "--sample=none"]
    assert not [each for each in profile if "capture-range" in each]
    assert export[0] == "export"


def test_failing_command_with_a_report_is_analyzed_and_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake_nsys(folder)
    assert main(["profile", "--nsys", "--", *command("raise SystemExit(3)")]) == 0
    assert "the command ended with exit status 3; the report covers what it did" in capsys.readouterr().err


def test_missing_nsys_is_said_in_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--nsys", "--", *command("open('ran', 'w')")]) == 2
    [line] = [each for each in capsys.readouterr().err.splitlines() if each]
    assert "nsys is not installed here (not on PATH): install NVIDIA Nsight Systems" in line
    assert not list(folder.iterdir()), "no folder, and the command did not run"


def test_failing_nsys_is_said_with_its_log(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake_nsys(folder, "child.kill(); child.wait(); print('the target is not supported'); sys.exit(7)")
    assert main(["profile", "--nsys", "--", *command("")]) == 2
    error = " ".join(capsys.readouterr().err.split())
    log = run_of(folder) / "nsys.log"
    assert "nsys ended with exit status 7; it left no report; its output: runs/" in error
    assert "the target is not supported" in log.read_text()


def test_qdstrm_without_a_report_is_named_with_the_importer(folder: Path) -> None:
    fake_nsys(folder, "child.wait(); pathlib.Path(output + '.qdstrm').write_bytes(b'raw')")
    with pytest.raises(ConfigError) as raised:
        record(command(""), folder, limit_s=30, report=print)
    raw = folder / "trace.qdstrm"
    said = f"nsys ended with exit status 0; it left {raw} without a report: run `QdstrmImporter --input-file {raw}`"
    assert said in str(raised.value)
    assert f"then `meltcore profile {folder / 'trace.nsys-rep'}`" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("raw", [False, True])
def test_hanging_nsys_is_ended_with_its_command(folder: Path, raw: bool) -> None:
    fake_nsys(folder, "pathlib.Path(output + '.qdstrm').touch()\ntime.sleep(600)" if raw else "time.sleep(600)")
    with pytest.raises(ConfigError, match=r"nsys did not end within 4 s and was ended; it left ") as raised:
        record([*command(STAY), "pid"], folder, limit_s=4.0, report=print)
    assert ("trace.qdstrm without a report" in str(raised.value)) == raw
    assert ("it left no report" in str(raised.value)) != raw
    assert str(raised.value).endswith(f"it printed nothing ({folder / 'nsys.log'})")
    assert ended(folder / "pid")


def test_report_that_cannot_be_exported_is_refused(folder: Path) -> None:
    fake_nsys(folder, "child.wait(); pathlib.Path(output + '.nsys-rep').write_text('odd')")
    program = folder / "bin" / "nsys"
    program.write_text(
        program.read_text().replace("shutil.copy(arguments[5], arguments[4])", "sys.exit('bad version')")
    )
    with pytest.raises(ConfigError, match=r"nsys could not export .*: bad version"):
        record(command(""), folder, limit_s=30, report=print)


def test_interrupt_ends_nsys_and_the_command(folder: Path) -> None:
    fake_nsys(folder, "time.sleep(600)")
    line = [sys.executable, "-m", "meltcore.cli.main", "profile", "--nsys", "--", *command(STAY), "pid"]
    child = subprocess.Popen(line, cwd=folder, start_new_session=True, stderr=subprocess.PIPE, env=dict(os.environ))
    try:
        deadline_s = time.monotonic() + 30
        while not ((folder / "pid").exists() and (folder / "pid").read_text()) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        child.send_signal(signal.SIGTERM)
        child.wait(WAIT_S)
    finally:
        child.kill()
        child.communicate()
    assert child.returncode not in (0, None)
    assert ended(folder / "pid")


SERVER = """
import http.server, json, os, pathlib, signal, sys
seen = pathlib.Path("seen")
class Handler(http.server.BaseHTTPRequestHandler):
    def reply(self):
        refused = self.path == "/start_profile" and "--refuse" in sys.argv
        with seen.open("a") as file:
            file.write(self.path + "\\n")
        if self.path == "/stop_profile" and "--end" in sys.argv:
            os._exit(0)
        self.send_response(404 if refused else 200)
        self.end_headers()
        self.wfile.write(b"{}")
    do_GET = do_POST = reply
    def log_message(self, *_): pass
pathlib.Path("pid").write_text(str(os.getpid()))
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
# As with --capture-range-end=stop-shutdown --kill=sigterm: the end of the range ends the command.
UNTIL_STOPPED = """
seen = pathlib.Path("seen")
while child.poll() is None and not (seen.exists() and "/stop_profile" in seen.read_text()):
    time.sleep(0.02)
child.terminate()
child.wait()
shutil.copy({export!r}, output + '.nsys-rep')
sys.exit(143)
"""


@pytest.mark.parametrize("ending", [[], ["--end"]], ids=["answers", "ends without an answer"])
def test_server_is_captured_between_its_marks(
    folder: Path, capsys: pytest.CaptureFixture[str], port: int, ending: list[str]
) -> None:
    fake_nsys(folder, UNTIL_STOPPED)
    url = f"http://127.0.0.1:{port}"
    options = ["profile", "--nsys", "--url", url, "--seconds", "0.2", "--json", "--"]
    assert main([*options, *command(SERVER), str(port), *ending]) == 0
    paths = (folder / "seen").read_text().split()
    assert paths[-2:] == ["/start_profile", "/stop_profile"]
    assert set(paths[:-2]) == {"/health"}
    [profile, _] = calls(folder)
    assert {"--capture-range=cudaProfilerApi", "--capture-range-end=stop-shutdown", "--kill=sigterm"} <= set(profile)
    output = capsys.readouterr()
    assert json.loads(output.out)["reports"][0]["window_us"] == 1000.0
    assert "ended with" not in output.err, "nsys ends the server itself"
    assert ended(folder / "pid")


def test_server_without_the_profiler_is_refused_and_ended(
    folder: Path, capsys: pytest.CaptureFixture[str], port: int
) -> None:
    fake_nsys(folder, UNTIL_STOPPED)
    url = f"http://127.0.0.1:{port}"
    assert main(["profile", "--nsys", "--url", url, "--", *command(SERVER), str(port), "--refuse"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "/start_profile returned 404: {}; start our server with --profiler cuda to offer it" in error
    assert ended(folder / "pid")


@pytest.mark.slow
def test_server_that_never_answers_is_ended(folder: Path, capsys: pytest.CaptureFixture[str], port: int) -> None:
    fake_nsys(folder, "time.sleep(600)")
    url = f"http://127.0.0.1:{port}"
    options = ["profile", "--nsys", "--nsys-timeout", "1", "--url", url, "--", *command(STAY), "pid"]
    assert main(options) != 0
    assert f"nsys did not serve {url} within 1 s" in " ".join(capsys.readouterr().err.split())
    assert ended(folder / "pid")


def test_server_that_runs_already_is_not_recorded(folder: Path, capsys: pytest.CaptureFixture[str], port: int) -> None:
    fake_nsys(folder)
    other = subprocess.Popen([*command(SERVER), str(port)], cwd=folder)
    try:
        deadline_s = time.monotonic() + 20
        while not is_healthy(f"http://127.0.0.1:{port}") and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert main(["profile", "--nsys", "--url", f"http://127.0.0.1:{port}", "--", "true"]) == 2
    finally:
        other.kill()
        other.wait()
    assert "already; nsys records only what it has started itself" in " ".join(capsys.readouterr().err.split())
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nsys"], "--nsys needs a command after --"),
        (["--nsys", "--gpu", "0", "--", "true"], "--gpu is for --url without --nsys"),
        (["a.json", "b.json"], "profile takes one TRACE, or --nsys with a command; got a.json b.json"),
    ],
)
def test_wrong_arguments_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    fake_nsys(folder)
    assert main(["profile", *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_unmarked_command_has_no_capture_range(tmp_path: Path) -> None:
    plain = nsys_command("nsys", ["a", "b"], tmp_path, has_range=False)
    has_range = nsys_command("nsys", ["a", "b"], tmp_path, has_range=True)
    assert plain[-2:] == has_range[-2:] == ["a", "b"]
    assert [each for each in has_range if each not in plain] == [
        *("--capture-range=cudaProfilerApi", "--capture-range-end=stop-shutdown", "--kill=sigterm")
    ]
