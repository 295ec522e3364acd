"""`meltcore plan --ray` on a cluster of two raylets, and the errors of a cluster that cannot be used."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from ray_nodes import add_node, start_nodes
from waiting import WAIT_S

import meltcore
from meltcore import __version__
from meltcore.cli.main import main
from meltcore.common.code_version import code_version
from meltcore.common.errors import ConfigError
from meltcore.common.sizes import GIB
from meltcore.fleet.plan.cluster import Cluster
from meltcore.fleet.ray.client import run_on_nodes
from meltcore.fleet.ray.nodes import connected
from meltcore.protocol.cluster import DRIVER_MODULE, FromDriver, Nodes, ReadNodes, RunOnNodes


def connect(address: str) -> None:
    with connected(address):
        pass


def raylet_commands(folder: Path) -> str:
    """The command lines of Ray's processes whose files are in a folder."""
    found = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if os.access(path, os.R_OK)]
    return b"\n".join(each for each in found if str(folder).encode() in each).decode().replace("\0", " ")


def owns(pid: int, folder: Path) -> bool:
    return any(link.resolve() == folder for link in Path(f"/proc/{pid}/fd").iterdir())


QWEN = "checkpoint: none/here, shapes: Qwen/Qwen3-0.6B, max_model_len: 4096, max_num_seqs: 4"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with start_nodes(tmp_path_factory.mktemp("nodes"), [40], [80, 80]) as cluster:
        yield cluster.address


@pytest.mark.ray
@pytest.mark.slow
def test_plan_reads_gpus_and_memory_of_every_node(
    address: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster.read(address)
    assert sorted([gpu.total_bytes // GIB for gpu in node.machine.gpus] for node in cluster.nodes) == [[40], [80, 80]]
    assert all(node.machine.host_bytes > GIB and node.machine.driver == "570.1" for node in cluster.nodes)
    host = socket.gethostname()
    assert [node.name for node in cluster.nodes] == sorted(f"{host}-{node.node_id[:6]}" for node in cluster.nodes)

    fleet = tmp_path / "fleet.yaml"
    fleet.write_text(f"models: {{a: {{{QWEN}, tensor_parallel_size: 2}}, b: {{{QWEN}, replicas: 2}}}}")
    assert main(["plan", str(fleet), "--ray", address]) == 0
    printed = " ".join(capfd.readouterr().out.split())
    conclusion = printed.split("The fleet fits on ")[1]
    assert all(f"{node.name} GPU" in conclusion for node in cluster.nodes)
    assert "idle" not in conclusion


@pytest.mark.ray
@pytest.mark.slow
def test_silent_node_and_those_with_other_gpus_or_code_have_a_problem(tmp_path: Path) -> None:
    with start_nodes(tmp_path, [40]) as cluster:
        add_node(cluster, tmp_path, [40], ray_gpus=2)
        add_node(cluster, tmp_path, [40], nvml_s=300)
        shutil.copytree(Path(meltcore.__file__).parent, tmp_path / "other" / "meltcore")
        with (tmp_path / "other" / "meltcore" / "errors.py").open("a") as file:
            file.write("# other code\n")
        add_node(cluster, tmp_path, [40], packages=tmp_path / "other")
        cluster.wait_for_nodes(60)
        with subprocess.Popen(
            [sys.executable, "-m", DRIVER_MODULE, cluster.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as driver:
            assert driver.stdin is not None
            assert driver.stdout is not None
            for limit_s in (15, 10**6):  # the silent node is not waited for again: the second answer comes
                driver.stdin.write(msgspec.json.encode(ReadNodes(limit_s=limit_s)) + b"\n")
                driver.stdin.flush()
                answer = msgspec.json.decode(driver.stdout.readline(), type=FromDriver)
                assert isinstance(answer, Nodes)
                found = sorted((node.problem, len(node.machine.gpus)) for node in answer.nodes)
                assert found[0] == ("", 1)
                assert found[1][0].startswith("Ray counts 2 GPUs there and NVML shows 1; start Ray on it with CUDA_VIS")
                assert found[2][0].startswith(f"it has Meltcore {__version__}+"), "the same version, other code"
                assert found[2][0].endswith(
                    f", and the machine of this command {code_version()}: install the same on both"
                )
                assert found[3] == ("the task that reads its GPUs and memory does not answer", 0)
        ended = run_on_nodes(cluster.address, RunOnNodes(["--version"], 30.0), lambda ended: None)
        assert sorted(each.status for each in ended) == ["ended", "ended", "ended", "failed"]
        assert [each.reason for each in ended if each.status == "failed"] == [found[2][0]]


@pytest.mark.slow
@pytest.mark.ray
def test_local_cluster_has_its_own_token_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    driver = [sys.executable, "-m", DRIVER_MODULE, "local"]
    with subprocess.Popen(driver, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.json.encode(ReadNodes()) + b"\n")
        process.stdin.flush()
        answer = msgspec.json.decode(process.stdout.readline(), type=FromDriver)
        assert isinstance(answer, Nodes)
        (planned,) = Cluster.read("local").nodes
        assert [node.name for node in answer.nodes] == [planned.name], "the plan, which starts no cluster, has its name"
        (folder,) = (path for path in Path(tempfile.gettempdir()).glob("meltcore-ray-*") if owns(process.pid, path))
        assert folder.stat().st_mode & 0o077 == 0
        head = re.findall(r"--gcs-address=(\S+)", raylet_commands(folder))[0]
        for mode in ("disabled", "token"):
            monkeypatch.setenv("RAY_AUTH_MODE", mode)
            with pytest.raises(ConfigError, match="token"):
                Cluster.read(head)
        process.stdin.close()
        assert process.wait(WAIT_S) == 0
    assert not folder.exists()
    assert not (tmp_path / "home").exists()


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("is_silent", [True, False])
def test_port_of_something_else_is_refused(is_silent: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        if not is_silent:
            threading.Thread(target=lambda: other.accept()[0].close(), daemon=True).start()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"--ray {address}: what listens there has not answered as a head node"):
            Cluster.read(address)


@pytest.mark.slow
@pytest.mark.ray
def test_cluster_that_is_not_there_is_refused_immediately() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    for address, reason in (
        (f"127.0.0.1:{port}", "nothing answers there: Connection refused"),
        ("head", "must be auto, local or HOST:PORT"),
        ("ray://head:10001", "name the head as HOST:PORT"),
        ("http://127.0.0.1:8265", "an address is HOST:PORT of the head node"),
    ):
        with pytest.raises(ConfigError, match=f"--ray {address}: .*{reason}"):
            Cluster.read(address)


@pytest.mark.ray
@pytest.mark.slow
def test_own_cluster_whose_head_is_gone_is_refused_immediately(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    services = importlib.import_module("ray._private.services")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        head = f"127.0.0.1:{unused.getsockname()[1]}"
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text(head)  # as `ray start` leaves it
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(services, "_find_address_from_flag", lambda _flag: set())  # no raylet of another test
    with pytest.raises(
        ConfigError, match=rf"--ray auto: nothing answers at \S+{head[9:]}, its head node: Connection ref"
    ):
        connect("auto")
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(ConfigError, match="--ray ray://head:10001: name the head as HOST:PORT"):
        connect("auto")


def test_missing_ray_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"needs the package ray on every node: pip install 'meltcore\[cluster\]'"):
        connect("auto")
