"""The demo against a scripted server that knows the answers, and against each of its faults."""

import io
import json
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_openai import FakeServer
from places import program
from rich.console import Console
from waiting import WAIT_S

from meltcore.common.errors import MeltcoreError
from meltcore.common.process import ProcessError
from meltcore.measure import problems
from meltcore.measure.documents.runfolder import read_result
from meltcore.measure.experiments import servers
from meltcore.measure.experiments.demo import clients
from meltcore.measure.experiments.demo.clients import check_routes
from meltcore.measure.experiments.demo.config import DemoConfig
from meltcore.measure.experiments.demo.run import fleet_server, print_outcome, run_demo, write_fleet
from meltcore.measure.load.fleet.fleet_streams import NUM_PROBLEMS
from meltcore.settings.fleet_file import load_fleet

FAKE = program("fake_openai.py")
LEVEL = 12


@pytest.fixture(scope="module")
def answers_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Question and value of every problem that a demo asks."""
    asked = problems.evaluation_set() + problems.generate("heldout", kind="short", num_problems=NUM_PROBLEMS, seed=0)
    path = tmp_path_factory.mktemp("answers") / "answers.json"
    path.write_text(json.dumps({problem.question: problem.value for problem in asked}))
    return path


@pytest.fixture(autouse=True)
def _restore_server_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "SERVER_COMMAND", servers.SERVER_COMMAND)


def fake_server(*options: str) -> tuple[str, ...]:
    """Replace our server by the fake one; return its command."""
    servers.SERVER_COMMAND = (sys.executable, str(FAKE), *options)
    return servers.SERVER_COMMAND


def demo_config(out: Path, answers: Path, fault: str = "none") -> DemoConfig:
    fake_server("--fault", fault, "--answers", str(answers))
    return DemoConfig(levels=(LEVEL,), level_s=0.5, out=str(out), tasks=("generation",), clients=False)


def run(config: DemoConfig) -> tuple[int, dict[str, Any]]:
    """The exit code and what result.json holds."""
    output = io.StringIO()
    folder, result = run_demo(config, Console(quiet=True))
    assert read_result(folder.path) == result
    assert folder.report_path.read_text().startswith("<!doctype html>")
    code = print_outcome(Console(file=output, width=100), folder, result)
    assert "note: No client opened the routes: " in output.getvalue()
    for level in result.mixed:
        assert output.getvalue().index(f"{level.label}:") < output.getvalue().index(" conn.")
    return code, json.loads(folder.result_path.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("device", ["CPU", "NVIDIA H200"])
def test_demo_passes_with_whole_and_right_answers_and_names_missing_clients(
    tmp_path: Path, answers_file: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(clients, "PACKAGES", ("no_such_package",))
    config = replace(demo_config(tmp_path, answers_file), clients=True)
    fake_server("--answers", str(answers_file), "--device", device)
    code, result = run(config)
    assert code == 0
    missing = "no_such_package is not installed (pip install 'meltcore[clients]')"
    assert result["notes"][-1] == f"No client opened the routes: {missing}."
    assert result["accuracy"] == 1.0
    [level] = result["mixed"]
    assert (level["connections"], level["peak_in_flight"]) == (LEVEL, LEVEL)
    [load] = [stream["level"] for stream in level["streams"]]
    assert load["requests"] == load["succeeded"] >= LEVEL
    assert load["accuracy"] == 1.0
    assert load["output_tokens_per_s"] > 0
    assert result["settings"]["weights"] == "real"
    assert result["settings"]["devices"] == {"fake": device}
    [folder] = tmp_path.iterdir()
    assert folder.name.endswith("-demo")
    assert len((folder / "requests.jsonl").read_text().splitlines()) >= load["requests"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "verdict", "reason"),
    [
        ("wrong-answers", "FAILED", "unloaded accuracy is 0 %"),
        ("streams-wrong", "FAILED", "more than one point from the unloaded 100 %"),
        ("bare-errors", "FAILED", "API check failed"),
        ("dies", "SERVER_DIED", f"the server ended at mixed, {LEVEL} connections"),
    ],
)
def test_demo_fails_with_the_reason(tmp_path: Path, answers_file: Path, fault: str, verdict: str, reason: str) -> None:
    code, result = run(demo_config(tmp_path, answers_file, fault))
    assert code == 1
    assert result["verdict"] == verdict
    assert any(reason in line for line in result["reasons"]), result["reasons"]


def test_failed_start_shows_the_servers_log(tmp_path: Path, answers_file: Path) -> None:
    with pytest.raises(ProcessError, match="ended with code 1") as caught:
        run_demo(demo_config(tmp_path, answers_file, "crashes"), Console(quiet=True))
    assert "cannot open the model" in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "what"), [("silent", "print its address"), ("never-ready", "become ready")])
def test_wait_for_a_server_has_a_limit_and_ends_it(tmp_path: Path, fault: str, what: str) -> None:
    fake_server("--fault", fault)
    server = fleet_server(tmp_path / "fleet.yaml", tmp_path / "log", report=lambda text: None)
    with server, pytest.raises(ProcessError, match=what):
        server.wait_ready(listen_limit_s=1.5 if fault == "silent" else WAIT_S, ready_limit_s=0.5)
    assert not server.running


def test_server_that_ignores_sigterm_is_killed_and_reported(tmp_path: Path) -> None:
    lines: list[str] = []
    fake_server("--fault", "deaf")
    with fleet_server(tmp_path / "fleet.yaml", tmp_path / "log", report=lines.append) as server:
        server.wait_ready()
        assert server.stop(limit_s=0.5) == -signal.SIGKILL
    assert "killing it" in lines[0]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted_demo_ends_its_server_and_leaves_a_partial_run(
    tmp_path: Path, answers_file: Path, number: signal.Signals
) -> None:
    command = fake_server("--fault", "slow", "--answers", str(answers_file))
    script = (
        "import sys; from meltcore.cli import main; from meltcore.measure.experiments import servers\n"
        f"servers.SERVER_COMMAND = {command!r}\n"
        f"options = ['--levels', '{LEVEL}', '--out', {str(tmp_path)!r}, '--no-clients', '--tasks', 'generation']\n"
        "sys.exit(main.main(['demo', *options]))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        log = _wait_for(lambda: next(tmp_path.glob("*-demo/server.log"), None))
        address = _wait_for(lambda: log.read_text().strip().rpartition(" ")[2])
        _wait_for(lambda: _has_streams(process.pid))
        process.send_signal(number)
        output, _ = process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, output
    result = read_result(log.parent)
    assert (result.status, result.verdict) == ("partial", "PARTIAL")
    assert not _answers(address)


def _wait_for(look, limit_s: float = 30.0):  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        found = look()
        if found:
            return found
        time.sleep(0.1)
    raise AssertionError("did not happen in time")


def _has_streams(pid: int) -> bool:
    """Whether the process holds the connections of the level."""
    folder = Path(f"/proc/{pid}/fd")
    return sum(_target(link).startswith("socket:") for link in folder.iterdir()) >= LEVEL


def _target(link: Path) -> str:
    """What a descriptor refers to; nothing where it was closed since it was listed."""
    try:
        return str(link.readlink())
    except FileNotFoundError:
        return ""


def _answers(address: str) -> bool:
    from meltcore.measure.experiments.servers import Api, ApiError

    try:
        Api(address, timeout_s=2.0).get("/health")
    except ApiError:
        return False
    return True


def test_model_that_fails_to_start_is_named(tmp_path: Path) -> None:
    fake_server("--fault", "failed-model")
    server = fleet_server(tmp_path / "fleet.yaml", tmp_path / "log", report=lambda text: None)
    with server, pytest.raises(MeltcoreError, match=r"fake did not start: .*no memory"):
        server.wait_ready()
    assert not server.running


def test_fleet_of_some_tasks_is_a_valid_file(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    write_fleet(tmp_path / "with.yaml", ("generation",), embedder=tmp_path / "model")
    spec = load_fleet(tmp_path / "with.yaml")
    assert (spec.models["minilm"].task, spec.models["minilm"].checkpoint) == ("embedding", str(tmp_path / "model"))
    assert {model.device for model in spec.models.values()} == {"cpu"}
    write_fleet(path, ("generation", "transcription"), device="cuda")
    spec = load_fleet(path)
    assert {model.device for model in spec.models.values()} == {"cuda"}
    assert (list(spec.models), spec.server.port) == (["sums", "tones"], 0)
    assert (spec.languages.translation, spec.languages.transcription, spec.languages.synthesis) == (
        (),
        {"*": "tones"},
        {},
    )


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "is_right"), [("none", True), ("wrong-answers", False)])
def test_routes_need_the_right_answer(tmp_path: Path, fault: str, is_right: bool) -> None:
    """The scripted server has two routes: what it lacks fails, and so does a wrong answer."""
    server = FakeServer(fault, {"What is 7 * 8?": 56})
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        checks = {check.name: check for check in check_routes(server.address, {"generation": "fake"}, tmp_path)}
    finally:
        server.shutdown()
        server.server_close()
    for name in ("openai: chat.completions.create", "openai: chat.completions.create, streamed"):
        assert (checks[name].status == "PASS") is is_right, checks[name]
    for name in ("dwani: chat.direct", "HTTP: /v1/chat", "every route of /openapi.json was opened"):
        assert checks[name].status == "FAIL"
    lacking = [check for name, check in checks.items() if "speech" in name or "transcri" in name]
    assert {check.status for check in lacking} == {"NOT_APPLICABLE"}
    assert checks["dwani: audio.speech"].detail == "no model was served at /v1/audio/speech"


@pytest.mark.parametrize(
    ("packages", "missing"),
    [
        (("openai", "no_such_package"), "no_such_package is not installed (pip install 'meltcore[clients]')"),
        (("no_such", "nor_this"), "no_such and nor_this are not installed (pip install 'meltcore[clients]')"),
        (("openai",), ""),
    ],
)
def test_missing_clients_are_named(packages: tuple[str, ...], missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "PACKAGES", packages)
    assert clients.missing_clients() == missing
