"""`snapshot`, `certify` and `bench --ray` on two raylets: results, failures and processes of every node."""

from __future__ import annotations

import json
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self

import pytest
from ray_nodes import start_nodes
from waiting import WAIT_S

from meltcore.cli import all_nodes
from meltcore.cli.main import main
from meltcore.fleet.ray.client import run_on_nodes
from meltcore.measure.documents.values.nodes import NodesReport, make_report
from meltcore.protocol.cluster import RunOnNodes


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """TMPDIR of the nodes; short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="m") as name, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", name)
        yield Path(name)


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    """A node without a GPU, and one that Ray believes to have one and whose driver shows none."""
    with start_nodes(folder, [], [80]) as cluster:
        (folder / "pynvml.py").unlink()  # the commands ask the real one
        yield cluster.address


@pytest.mark.ray
@pytest.mark.slow
def test_snapshots_of_all_nodes_are_one_report(address: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["snapshot", "--json", "--ray", address]) == 2
    report = json.loads(capfd.readouterr().out)
    assert sorted(node["status"] for node in report["nodes"]) == ["done", "failed"]
    assert all(node["document"]["fingerprint"]["cores"] > 0 for node in report["nodes"])
    [failed] = [node for node in report["nodes"] if node["status"] == "failed"]
    assert "its driver shows none" in failed["reason"]
    assert report["verdict"] == "FAIL"


@pytest.mark.ray
@pytest.mark.slow
def test_nodes_that_are_late_are_ended_and_named(address: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["snapshot", "--ray", address, "--node-limit", "0.01"]) == 2
    printed = " ".join(capfd.readouterr().out.split())
    assert printed.count("it did not end within 0.01 s") >= 2
    assert "0 of 2 nodes have a result; failed:" in printed


@pytest.mark.ray
@pytest.mark.slow
def test_certificate_leaves_out_nodes_without_a_gpu_and_is_unknown_for_a_broken_one(
    address: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["certify", "--ray", address, "--out", str(tmp_path)]) == 3
    [folder] = tmp_path.iterdir()
    report = json.loads((folder / "nodes.json").read_text())
    assert sorted(node["status"] for node in report["nodes"]) == ["failed", "no GPU"]
    assert "no NVIDIA driver here" in (folder / "report.html").read_text()
    assert "UNKNOWN" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("command", "option", "status"),
    [("snapshot", "--gpu", 2), ("certify", "--baseline", 3), ("bench", "--reference", 2), ("bench", "--export", 2)],
)
def test_options_of_one_node_are_refused(
    command: str, option: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--ray", "auto", option, "x.svg"]) == status
    assert f"{option} is for one node; it excludes --ray" in capsys.readouterr().err


@pytest.mark.parametrize(("model", "passed"), [("./m", "{}/m"), ("m", "{}/m"), ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B")])
def test_nodes_get_the_absolute_path_of_a_checkpoint(
    model: str, passed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(args: object, command: list[str], **_: object) -> NodesReport:
        commands.append(command)
        return make_report("bench", [], dict, float, started="", duration_s=1.0)

    monkeypatch.setattr(all_nodes, "run_on_all_nodes", run)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    assert main(["bench", "--ray", "auto", "--model", model]) == 0
    assert commands[0][commands[0].index("--model") + 1] == passed.format(tmp_path)


class SilentServer:
    """Names its model, and answers no request: what a command that takes long is run against."""

    def __enter__(self) -> Self:
        is_closed = self._is_closed = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                content = b'{"data": [{"id": "silent"}]}'
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def do_POST(self) -> None:
                is_closed.wait(WAIT_S)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed.set()
        self._server.shutdown()
        self._server.server_close()

    def request(self, limit_s: float, *, takes_gpus: bool = False) -> RunOnNodes:
        return RunOnNodes(["load", self.url, "--concurrency", "1"], limit_s, takes_gpus=takes_gpus, has_folder=True)

    def processes(self) -> list[int]:
        """Those that run on it, by its address in their command lines."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                if b"meltcore.cli.main" in (line := path.read_bytes()) and self.url.encode() in line:
                    found.append(int(path.parent.name))
        return found

    def wait(self, is_done: Callable[[list[int]], bool], limit_s: float = 30.0) -> list[int]:
        deadline_s = time.monotonic() + limit_s
        while not is_done(found := self.processes()):
            assert time.monotonic() < deadline_s, found
            time.sleep(0.05)
        return found


@pytest.mark.ray
@pytest.mark.slow
def test_gpus_of_a_running_command_are_taken_and_its_processes_end_with_its_limit(address: str) -> None:
    with SilentServer() as server, ThreadPoolExecutor(2) as threads:
        first = threads.submit(run_on_nodes, address, server.request(22.0, takes_gpus=True), lambda ended: None)
        server.wait(lambda found: len(found) == 2)
        second = run_on_nodes(address, server.request(0.1, takes_gpus=True), lambda ended: None)
        assert sorted(each.status for each in second) == ["failed", "late"]
        assert "other Ray jobs have its GPUs" in next(each.reason for each in second if each.status == "failed")
        assert [each.status for each in first.result(WAIT_S)] == ["late", "late"]
        assert server.processes() == []


@pytest.mark.ray
@pytest.mark.slow
def test_killed_driver_leaves_no_process_and_every_node_is_named(address: str) -> None:
    with SilentServer() as server, ThreadPoolExecutor(1) as threads:
        result = threads.submit(run_on_nodes, address, server.request(100.0), lambda ended: None)
        server.wait(lambda found: len(found) == 2)
        [driver] = [
            int(path.parent.name)
            for path in Path("/proc").glob("[0-9]*/cmdline")
            if path.read_bytes().endswith(f"meltcore.fleet.ray.driver\0{address}\0".encode())
        ]
        os.kill(driver, signal.SIGKILL)
        ended = result.result(WAIT_S)
        assert {each.reason for each in ended} == {"the driver of the cluster ended before the node answered"}
        server.wait(lambda found: not found)


@pytest.mark.ray
@pytest.mark.slow
def test_interruption_ends_the_processes_and_leaves_no_file(address: str, folder: Path) -> None:
    def interrupt(server: SilentServer) -> None:
        server.wait(lambda found: len(found) == 2)
        os.kill(os.getpid(), signal.SIGINT)

    before = set(folder.glob("meltcore-node-*"))
    with SilentServer() as server, ThreadPoolExecutor(1) as threads:
        interrupted = threads.submit(interrupt, server)
        with pytest.raises(KeyboardInterrupt):
            run_on_nodes(address, server.request(100.0), lambda ended: None)
        interrupted.result(WAIT_S)
        assert server.processes() == []
    assert set(folder.glob("meltcore-node-*")) <= before


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize(("command", "status"), [("snapshot", 2), ("certify", 3), ("bench", 2)])
def test_cluster_that_is_not_there_is_one_error(
    command: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        out = [] if command == "snapshot" else ["--out", str(tmp_path / "runs")]
        assert main([command, "--ray", address, *out]) == status
    assert f"--ray {address}: nothing answers there" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.ray
@pytest.mark.slow
def test_node_that_is_gone_is_named_and_the_other_goes_on(tmp_path: Path) -> None:
    with start_nodes(tmp_path, [], []) as cluster, SilentServer() as server, ThreadPoolExecutor(1) as threads:
        (tmp_path / "pynvml.py").unlink()
        result = threads.submit(run_on_nodes, cluster.address, server.request(15.0), lambda ended: None)
        server.wait(lambda found: len(found) == 2)
        cluster.remove_node(cluster.list_all_nodes()[1], allow_graceful=False)
        ended = {each.status: each.reason for each in result.result(WAIT_S)}
        assert "the node is gone" in ended["failed"]
        assert ended["late"].startswith("it did not end within 15 s")
