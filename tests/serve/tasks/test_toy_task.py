"""A task of another package is served alone and in a fleet and loaded, with all that built-in tasks have."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from server_harness import RunningServer, fleet_command, running, serve_command, server_config
from waiting import WAIT_S, wait_until

from meltcore.fleet.processes.engine_process import ENGINE_COMMAND
from meltcore.fleet.run.restart_policy import RestartAfterPause
from meltcore.settings.fleet_spec import ModelSection

pytestmark = pytest.mark.slow
PACKAGE = Path(__file__).parents[2] / "doubles" / "echo_task"
ENTRY_POINTS = "[meltcore.tasks]\necho = echo_task:TASK\n"
MAX_LINES = 149  # a new task costs one folder and one line


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of the task, whose package every process finds as if pip had installed it."""
    installed = tmp_path / "site" / "echo_task-1.0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: echo-task\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(ENTRY_POINTS)
    inherited = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (installed.parent, PACKAGE.parent, inherited))))
    folder = tmp_path / "echo"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["Echo"]}))
    return folder


def wait_for(path: Path) -> dict[str, str]:
    """A text whose echo comes once there is such a file."""
    return {"text": f"wait for {path}"}


def check_served(server: RunningServer, name: str) -> None:
    assert server.post("/v1/echo", {"text": "hello", "model": name}).json == {"text": "hello"}
    (card,) = server.request("GET", "/v1/models").json["data"]
    assert (card["id"], card["task"], card["device"]) == (name, "echo", "CPU")
    assert server.request("GET", "/openapi.json").json["paths"]["/v1/echo"]["post"]["summary"] == "Echo a text"
    labels = f'model_name="{name}",priority_class="standard",task="echo"'
    assert f"queue_requests{{{labels}}}" in server.request("GET", "/metrics").body.decode()
    refused = server.post("/v1/translate", {"sentences": ["a"], "src_lang": "en", "tgt_lang": "hi", "model": name})
    assert (
        refused.error["message"] == f"{name} cannot translate; serve an IndicTrans2 checkpoint here; it serves /v1/echo"
    )


def check_loaded(server: RunningServer, name: str, folder: Path) -> None:
    """Its workloads, its throughput and its page come from the record that the entry point names."""
    command = [sys.executable, "-m", "meltcore.cli.main", "load", f"http://127.0.0.1:{server.port}", "--model", name]
    options = ["--workload", "echo:words=2", "--num-prompts", "6", "--concurrency", "2", "--out", str(folder), "--json"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
    (level,) = json.loads(done.stdout)["levels"]
    assert (level["succeeded"], level["task"]["task"], level["task"]["work"]) == (6, "echo", 6.0)
    (page,) = folder.glob("*/report.html")
    assert "answers/s" in page.read_text()


def test_it_has_few_lines() -> None:
    lines = [line for file in PACKAGE.glob("*.py") for line in file.read_text().splitlines()]
    assert len([*lines, *ENTRY_POINTS.splitlines()]) <= MAX_LINES


def test_it_is_served_with_its_queue_its_deadline_and_its_documents(checkpoint: Path, tmp_path: Path) -> None:
    config = server_config(
        ModelSection(checkpoint=str(checkpoint), device="cpu"), api_server_count=1, max_queue_chars=1, max_queue=9
    )
    with running(serve_command(config, engine=ENGINE_COMMAND), tmp_path / "stderr") as server:
        server.wait_healthy()
        check_served(server, "scripted")
        late = server.post("/v1/echo", wait_for(tmp_path / "never"), headers={"X-Request-Timeout": "0.2"})
        assert (late.status, late.error["code"]) == (504, "request_timeout")
        waiting = [server.open("/v1/echo", wait_for(tmp_path / "now")) for _ in range(3)]  # one of them in the queue
        server.wait_metric("requests_in_flight", 3)
        full = server.post("/v1/echo", {"text": "a"})
        assert (full.status, full.error["code"]) == (429, "queue_full")
        assert (
            "2 echoes would wait, the limit is 1 (--max-queue-chars, or max_queue_chars of a fleet)"
            in full.error["message"]
        )
        (tmp_path / "now").touch()
        for connection in waiting:
            assert b"200 OK" in connection.recv(65_536)
            connection.close()
        check_loaded(server, "scripted", tmp_path / "runs")
        server.check_no_leak()


def test_it_is_planned_and_served_in_a_fleet_and_retried_after_a_loss(checkpoint: Path, tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.yaml"
    model = {"checkpoint": str(checkpoint), "task": "echo", "device": "cpu", "replicas": 2}
    fleet.write_text(json.dumps({"server": {"port": 0, "api_server_count": 1}, "models": {"echo": model}}))
    command = [sys.executable, "-m", "meltcore.cli.main", "plan", str(fleet)]
    planned = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert planned.returncode == 0, planned.stderr
    assert "echo" in planned.stdout
    fleet.write_text(fleet.read_text().replace('"replicas": 2', '"replicas": 2, "quantization": "fp8"'))
    refused = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert "models.echo.quantization: got 'fp8'; is for task generation, and the model's is echo" in " ".join(
        refused.stderr.split()
    )
    fleet.write_text(fleet.read_text().replace(', "quantization": "fp8"', ""))
    with running(fleet_command(fleet, RestartAfterPause(), engine=ENGINE_COMMAND), tmp_path / "stderr") as server:
        wait_until(lambda: server.request("GET", "/health").json.get("replicas") == "2 of 2", "two replicas")
        check_served(server, "echo")
        connection = server.open("/v1/echo", wait_for(tmp_path / "now"))
        server.wait_metric("num_requests_running", 1)
        os.kill(server.engine_pids()[0], signal.SIGKILL)
        server.wait_metric("requests_retried_total", 1)
        (tmp_path / "now").touch()
        assert b"200 OK" in connection.recv(65_536)
        connection.close()
