"""Bundled models on nodes that `ray start` has started answer as on one machine: `--ray auto`, and `--ray local`."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ray_nodes import STORE_BYTES, engine_pids, rows, sums_answers, write_fleet
from server_harness import RunningServer, fleet_command, running
from waiting import WAIT_S, wait_until

import meltcore
from meltcore.cli.main import main
from meltcore.common.process import end_group, start, start_ticks
from meltcore.fleet.run.restart_policy import RestartAfterPause
from meltcore.measure.problems.phrases import SOURCE_LANGUAGE, TARGET_LANGUAGE, generate_phrases

pytestmark = [pytest.mark.ray, pytest.mark.slow]
SUMS, PHRASES = "meltcore/sums", "meltcore/phrases"
MODELS = """
server: {port: 0}
models:
  sums: {checkpoint: meltcore/sums, device: cpu, memory: 384MiB, max_num_seqs: 8, replicas: 2}
  phrases: {checkpoint: meltcore/phrases, task: translation, device: cpu, memory: 384MiB}
"""


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A state folder of fleets, and a folder of Ray, where `auto` looks, whose name is short enough for its sockets."""
    folder = tempfile.mkdtemp(prefix="melt-ray-")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("RAY_TMPDIR", folder)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(meltcore.__file__).parents[1]), *sys.path]))
    yield
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def ray_start(log: Path, *arguments: str) -> Iterator[None]:
    """A node of a cluster by Ray's own command, until the end of the block."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", *arguments, "--block", "--num-cpus", "1"]
    with log.open("w") as output:
        command += ["--object-store-memory", str(STORE_BYTES), "--disable-usage-stats"]
        process = start(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: "Ray runtime started" in log.read_text() or process.poll() is not None, "a node")
        assert process.poll() is None, log.read_text()
        yield
    finally:
        end_group(process, 20.0)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def answers(server: RunningServer) -> list[Any]:
    """What both tasks answer, greedily, with the tokens of each text."""
    sources = [phrase.source for phrase in generate_phrases("heldout", num_phrases=4, seed=9)]
    body = {"model": "phrases", "sentences": sources, "src_lang": SOURCE_LANGUAGE, "tgt_lang": TARGET_LANGUAGE}
    return [*sums_answers(server, "sums"), server.post("/v1/translate", body).json["translations"]]


def open_requests(server: RunningServer) -> list[int]:
    """Of each replica of sums."""
    lines = server.request("GET", "/metrics").body.decode().splitlines()
    found = [line for line in lines if line.startswith("meltcore:replica_requests{") and 'model_name="sums"' in line]
    return [round(float(line.rpartition(" ")[2])) for line in found]


@contextmanager
def fleet(path: Path, stderr: Path, *arguments: str) -> Iterator[RunningServer]:
    command = [sys.executable, "-m", "meltcore.cli.main", "up", str(path), *arguments]
    with running(command, stderr) as server:
        assert server.url, server.stderr
        wait_until(lambda: [row["state"] for row in rows(server)] == ["ready"] * 3, "all ready")
        pids = [row["pid"] for row in rows(server)]
        yield server
        assert main(["down", "--port", str(server.port)]) == 0
        assert server.process.wait(WAIT_S) == 0
        wait_until(lambda: not any(map(start_ticks, pids)), "no engine left")


def test_bundled_models_answer_on_two_nodes_as_on_one(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(MODELS)
    with fleet(path, tmp_path / "one.err") as server:
        expected = answers(server)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = str(unused.getsockname()[1])
    with (
        ray_start(tmp_path / "head.log", "--head", "--port", port, "--include-dashboard", "false"),
        ray_start(tmp_path / "node.log", "--address", "auto"),
        fleet(path, tmp_path / "two.err", "--ray", "auto") as server,
    ):
        raylets = {parent(parent(row["pid"])) for row in rows(server)}  # of the workers that started the engines
        assert len(raylets) == 2, "engines are on one node"
        assert answers(server) == expected
        # A long answer keeps the first replica busy, so the other one gets the same requests.
        body = {"model": "sums", "prompt": "1 + 2 = ", "max_tokens": 1800, "ignore_eos": True, "stream": True}
        with server.open("/v1/completions", body):
            wait_until(lambda: open_requests(server)[0] == 1, "the long answer")
            assert answers(server) == expected
            assert open_requests(server) == [1, 0], "the long answer ended too early"


def test_local_cluster_serves_and_ends_with_the_command(tmp_path: Path) -> None:
    path = write_fleet(tmp_path)
    path.write_text(path.read_text().partition("  gpu:")[0])
    with running(fleet_command(path, RestartAfterPause(), "local"), tmp_path / "err") as server:
        assert server.url, server.stderr
        wait_until(lambda: [row["state"] for row in rows(server)] == ["ready"] * 2, "both ready")
        assert server.chat("hello", max_tokens=4).status == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(WAIT_S) == 0
    wait_until(lambda: not engine_pids(), "no engine left")
    folder = os.environ["RAY_TMPDIR"].encode()
    left = [each for each in Path("/proc").glob("[0-9]*/cmdline") if each.exists() and folder in each.read_bytes()]
    assert not left, "processes of the local cluster"
