"""Two nodes of a cluster, each in a network namespace, serve as one does, until the network between them drops all."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from network_namespaces import Network, network
from ray_nodes import STORE_BYTES, Stream, rows, sums_answers
from server_harness import RunningServer, running
from waiting import WAIT_S, wait_until

import meltcore
from meltcore.common.process import end_group, start, start_ticks
from meltcore.fleet.ray.node_folder import remove_abandoned

pytestmark = [pytest.mark.ray, pytest.mark.slow]
TOKENS = 1000
PORT = "6379"  # of the head, in a namespace of its own
# The far node alone has memory for the large model.
MEMORY_GIB = {"near": 2, "far": 5}
MODELS = """
server: {port: 0}
models:
  sums: {checkpoint: meltcore/sums, device: cpu, memory: 256MiB, max_num_seqs: 8, replicas: REPLICAS}
  large: {checkpoint: meltcore/sums-hybrid, device: cpu, memory: 1536MiB, max_num_seqs: 8}
"""
# Sooner than by default Ray takes a node for gone, and a node ends that lacks its head.
QUICK = {
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_memory_monitor_refresh_ms": "0",  # it would not understand the memory
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
}
# A machine of its own: its host name, its memory, and Ray's files.
AS_NODE = 'hostname "$1" && mount --bind "$2" /proc/meminfo && mount -t tmpfs tmpfs "$3" && shift 3 && exec "$@"'


@pytest.fixture
def ray_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Ray's folder, whose name is short enough for its sockets; every process that is started has it in its name."""
    folder = Path(tempfile.mkdtemp(prefix="melt-ray-"))
    environment = {"RAY_TMPDIR": str(folder), "XDG_STATE_HOME": str(tmp_path / "state"), "RAY_USAGE_STATS_ENABLED": "0"}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    source = os.pathsep.join([str(Path(meltcore.__file__).parents[1]), *sys.path])
    for name, value in (environment | QUICK | {"PYTHONPATH": source}).items():
        monkeypatch.setenv(name, value)
    try:
        yield folder
        wait_until(lambda: not of_test(), "no process left")
    finally:
        for pid in of_test():
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def of_test() -> list[int]:
    """Processes of the cluster, and all that they started."""
    found, setting = [], f"RAY_TMPDIR={os.environ['RAY_TMPDIR']}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            is_ours = setting in path.read_bytes().split(b"\0")
        except OSError:
            continue
        if is_ours and start_ticks(int(path.parent.name)) is not None:
            found.append(int(path.parent.name))
    return found


@contextmanager
def node(
    folder: Path, ray_folder: Path, name: str, prefix: Sequence[str], address: str, *options: str
) -> Iterator[None]:
    """A node by Ray's own command, with a temporary folder of its own, until the end of the block."""
    temporary = folder / name
    temporary.mkdir()
    meminfo, size = temporary / "meminfo", MEMORY_GIB[name] << 20
    real = Path("/proc/meminfo").read_text()
    meminfo.write_text(re.sub(r"^(MemTotal|MemFree|MemAvailable):.*", rf"\1: {size} kB", real, flags=re.M))
    own_files = ray_folder if name == "far" else temporary  # the driver of the near node finds it by its files
    command = [*prefix, "unshare", "--mount", "--uts", "sh", "-c", AS_NODE, "sh", name, str(meminfo), str(own_files)]
    command += [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        "--block",
        "--num-cpus",
        "1",
        "--disable-usage-stats",
    ]
    command += [
        "--object-store-memory",
        str(STORE_BYTES),
        "--memory",
        str(size << 10),
        "--node-ip-address",
        address,
        *options,
    ]
    log = folder / f"{name}.log"
    with log.open("w") as output:
        process = start(
            command, stdout=output, stderr=subprocess.STDOUT, environment=os.environ | {"TMPDIR": str(temporary)}
        )
    try:
        wait_until(lambda: "Ray runtime started" in log.read_text() or process.poll() is not None, name)
        assert process.poll() is None, log.read_text()
        yield
    finally:
        end_group(process, 2.0)


@contextmanager
def fleet(path: Path, replicas: int, *arguments: str) -> Iterator[RunningServer]:
    path.write_text(MODELS.replace("REPLICAS", str(replicas)))
    command = [sys.executable, "-m", "meltcore.cli.main", "up", str(path), *arguments]
    with running(command, path.with_suffix(".err")) as server:
        assert server.url, server.stderr
        wait_until(lambda: [row["state"] for row in rows(server)] == ["ready"] * (replicas + 1), "ready")
        yield server
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(WAIT_S) == 0


def namespace_of(pid: int) -> str:
    return str(Path(f"/proc/{pid}/ns/net").readlink())


def is_lost(end: str) -> bool:
    """Whether an answer ended as the API server lost the engine, or the supervisor told it so."""
    return "the engine on far cannot be reached: the connection is lost" in end or "has died" in end


def is_engine(pid: int) -> bool:
    return b"meltcore.engine" in Path(f"/proc/{pid}/cmdline").read_bytes()


@contextmanager
def two_nodes(tmp_path: Path, ray_folder: Path) -> Iterator[Network]:
    with network() as made:
        head = f"{made.near_address}:{PORT}"
        far = ["ip", "netns", "exec", made.far]
        with (
            node(
                tmp_path,
                ray_folder,
                "near",
                [],
                made.near_address,
                "--head",
                "--port",
                PORT,
                "--include-dashboard",
                "false",
            ),
            node(tmp_path, ray_folder, "far", far, made.far_address, "--address", head),
        ):
            yield made


def test_partition_ends_answers_of_the_far_node_alone(
    tmp_path: Path, ray_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fleet(tmp_path / "one.yaml", 1) as server:
        expected = {model: sums_answers(server, model) for model in ("sums", "large")}
    with (
        two_nodes(tmp_path, ray_folder) as nodes,
        fleet(tmp_path / "two.yaml", 2, "--ray", f"{nodes.near_address}:{PORT}") as server,
    ):
        namespaces = {(row["model"], row["replica"]): namespace_of(row["pid"]) for row in rows(server)}
        own, far = namespace_of(os.getpid()), namespaces["large", 0]
        assert far != own, "the large model is on the near node"
        assert {namespaces["sums", 0], namespaces["sums", 1]} == {own, far}, "replicas are on one node"
        assert sums_answers(server, "large") == expected["large"]
        assert sums_answers(server, "sums") == expected["sums"]
        # Special tokens too have text: those without send nothing, which looks like a pause.
        with_text = {"temperature": 0, "ignore_eos": True, "skip_special_tokens": False}
        streams = [Stream(server, model, TOKENS, **with_text) for model in ("sums", "sums", "large")]
        assert sums_answers(server, "sums") == expected["sums"], "one of both replicas"
        far_engines = [pid for pid in of_test() if namespace_of(pid) == far and is_engine(pid)]
        assert len(far_engines) == 2

        nodes.cut()
        assert is_lost(streams[2].end())
        wait_until(lambda: "large" in server.request("GET", "/health").json.get("models", {}), "degraded")
        assert server.request("GET", "/health").json["status"] == "degraded"
        ends = [stream.end() for stream in streams[:2]]
        (near,) = [stream for stream, end in zip(streams, ends, strict=False) if end == "done"]
        assert sum(map(is_lost, ends)) == 1
        assert near.ended_s > max(stream.ended_s for stream in streams if stream is not near), "it was too short"

        # The replica has room on the near node. The large model has none, and is named.
        wait_until(lambda: "no other node has 1.50 GiB free" in server.stderr, "no room")
        wait_until(lambda: [row["state"] for row in rows(server)][:2] == ["ready"] * 2, "both replicas")
        pids = [row["pid"] for row in rows(server) if row["model"] == "sums"]
        assert [namespace_of(pid) for pid in pids] == [own] * 2
        health = server.request("GET", "/health").json
        assert (health["status"], list(health["models"])) == ("degraded", ["large"])
        assert "the node far is gone, and no other node has 1.50 GiB free for it" in health["models"]["large"]
        assert sums_answers(server, "sums") == expected["sums"]
        assert server.post("/v1/completions", {"model": "large", "prompt": "1", "max_tokens": 2}).status == 503
        wait_until(lambda: not any(map(start_ticks, far_engines)), "the far engines end by themselves")
    assert not list((tmp_path / "near").glob("meltcore-*"))
    wait_until(lambda: not of_test(), "no process left", 20)  # each holds the lock of its folder
    # The driver could not ask the far node to remove them: the next start there does.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "far"))
    assert len(list((tmp_path / "far").glob("meltcore-*"))) == 3, "two engines, and their marks"

    def all_are_removed() -> bool:
        remove_abandoned()
        return not list((tmp_path / "far").glob("meltcore-*"))

    # On a busy machine a process that has been killed may still be about to close its files.
    wait_until(all_are_removed, "the folders are removed", 20)
