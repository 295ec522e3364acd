"""Names of nodes whose raylets are started again: a node keeps its name, and with it the numbers of its GPUs."""

from __future__ import annotations

import asyncio
import io
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
from ray_nodes import STORE_BYTES, start_nodes
from waiting import WAIT_S, wait_until

from meltcore.common.gpus.machine import Machine
from meltcore.common.process import end_group, start
from meltcore.fleet.ray import driver, nodes
from meltcore.fleet.ray.node_names import NodeNames, node_names
from meltcore.protocol.cluster import DRIVER_MODULE, ClusterNode, FromDriver, Nodes, ReadNodes

OLD, NEW, THIRD = "0123456789", "2123456789", "3123456789"


def raylet(node_id: str, port: int, *, alive: bool = True, host: str = "beta") -> dict[str, Any]:
    return {
        "NodeID": node_id,
        "Alive": alive,
        "NodeManagerHostname": host,
        "NodeManagerAddress": "127.0.0.1",
        "NodeManagerPort": port,
    }


@contextmanager
def listening() -> Iterator[int]:
    """A port at which a raylet listens, until the end of the block."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def named(nodes: Sequence[dict[str, Any]]) -> dict[str, str]:
    return {node["NodeID"]: node["name"] for node in nodes}


def test_nodes_of_one_host_name_are_told_apart() -> None:
    two = [("a", OLD), ("a", NEW)]
    assert node_names([*two, ("b", "1123456789")], {}) == ["a-012345", "a-212345", "b"]
    # A node keeps its name when another one joins. Where it is gone, its host's next node has the same name.
    assert node_names(two, {OLD: "a"}) == ["a", "a-212345"]
    assert node_names(two[1:], {OLD: "a"}) == ["a"]


def test_raylet_that_joins_before_the_old_one_is_declared_dead_has_its_name() -> None:
    names = NodeNames()
    with listening() as port:
        assert named(names.living([raylet(OLD, port)])) == {OLD: "beta"}
    with listening() as other_port:
        both = [raylet(OLD, port), raylet(NEW, other_port)]
        assert named(names.living(both)) == {NEW: "beta"}
        assert named(names.living(both)) == {NEW: "beta"}, "also while Ray takes the old one for alive"
        # At the same port: only one of them can listen there.
        assert named(names.living([*both, raylet(THIRD, other_port)])) == {THIRD: "beta"}


def test_another_raylet_of_a_host_gets_another_name_until_it_is_alone_and_unused() -> None:
    names = NodeNames()
    with listening() as port, listening() as other_port:
        names.living([raylet(OLD, port)])
        both = [raylet(OLD, port), raylet(NEW, other_port)]
        assert named(names.living(both, [])) == {OLD: "beta", NEW: "beta-212345"}
        alone = [raylet(OLD, port, alive=False), raylet(NEW, other_port)]
        assert named(names.living(alone)) == {NEW: "beta-212345"}, "it changes only where it is known what is used"
        assert named(names.living(alone, ["beta-212345"])) == {NEW: "beta-212345"}, "engines run there"
        assert named(names.living(alone, ["beta"])) == {NEW: "beta"}
        assert named(names.living(alone)) == {NEW: "beta"}
        # Two that share a host from the start have no other names, also where one is left.
        names = NodeNames()
        names.living(both, [])
        assert named(names.living(alone, [])) == {NEW: "beta-212345"}


class Reader:
    """Reads no node: what is tested is what the driver calls them."""

    def read(self, checkpoints: list[str], limit_s: float, used: list[str]) -> list[ClusterNode]:
        assert not checkpoints
        assert limit_s
        return [ClusterNode(name, node["NodeID"], "", Machine((), "", 0)) for name, node in nodes.living_nodes(used)]


@pytest.mark.parametrize("since", ["joined", "fixed port", "given up"])
def test_driver_calls_nodes_what_the_plan_called_them(since: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """since: what has happened between the plan and the driver's first look."""
    ray = ModuleType("ray")
    answers: list[FromDriver] = []
    reading, writing = os.pipe()
    with listening() as port, listening() as other_port:
        both = [raylet(OLD, port), raylet(NEW, port if since == "fixed port" else other_port)]
        of_plan, expected = {
            "joined": ({OLD: "beta"}, {OLD: "beta", NEW: "beta-212345"}),
            "fixed port": ({OLD: "beta"}, {NEW: "beta"}),
            "given up": (named(NodeNames().living(both)), {NEW: "beta-212345"}),
        }[since]
        if since == "given up":
            both[0]["Alive"] = False
        ray.__dict__["nodes"] = lambda: both
        monkeypatch.setitem(sys.modules, "ray", ray)
        monkeypatch.setattr(nodes, "names", NodeNames())
        monkeypatch.setattr(driver, "names", nodes.names)
        monkeypatch.setattr(driver, "NodeReader", Reader)

        async def run() -> None:
            running = asyncio.create_task(driver.Driver(answers.append).run())
            await asyncio.sleep(0.3)  # a look at the nodes before the names of the plan have come would name them
            question = ReadNodes(names=of_plan, used=sorted(of_plan.values()))
            os.write(writing, msgspec.json.encode(question) + b"\n")
            os.close(writing)
            await running

        with io.TextIOWrapper(os.fdopen(reading, "rb")) as lines:
            monkeypatch.setattr(sys, "stdin", lines)
            asyncio.run(run())
    found = [answer for answer in answers if isinstance(answer, Nodes)]
    assert [{node.node_id: node.name for node in answer.nodes} for answer in found] == [expected]


@contextmanager
def machine(address: str, host: str) -> Iterator[subprocess.Popen[bytes]]:
    """A raylet with a host name of its own, started as users do, until the end of the block."""
    if subprocess.run(["unshare", "--uts", "true"], capture_output=True, timeout=WAIT_S, check=False).returncode:
        pytest.skip("needs a host name of its own (unshare --uts)")
    command = ["unshare", "--uts", "sh", "-c", 'hostname "$1" && shift && exec "$@"', "sh", host]
    command += [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--address", address]
    command += ["--num-cpus", "1", "--object-store-memory", str(STORE_BYTES), "--disable-usage-stats"]
    process = start(command, environment=os.environ | {"SCRIPTED_GIB": "40", "SCRIPTED_NVML_S": "0"})
    try:
        yield process
    finally:
        end_group(process, 0)


@pytest.mark.ray
@pytest.mark.slow
def test_raylet_that_is_killed_and_started_again_keeps_its_name(tmp_path: Path) -> None:
    with (
        start_nodes(tmp_path, [40]) as cluster,
        subprocess.Popen(
            [sys.executable, "-m", DRIVER_MODULE, cluster.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as driver,
    ):

        def read() -> dict[str, str]:
            assert driver.stdin is not None
            assert driver.stdout is not None
            driver.stdin.write(msgspec.json.encode(ReadNodes([], 20)) + b"\n")
            driver.stdin.flush()
            answer = msgspec.json.decode(driver.stdout.readline(), type=FromDriver)
            assert isinstance(answer, Nodes)
            return {node.name: node.node_id for node in answer.nodes}

        with machine(cluster.address, "beta"):
            wait_until(lambda: "beta" in read(), "the node")
            before = read()
        with machine(cluster.address, "beta"):
            wait_until(lambda: read().get("beta", before["beta"]) != before["beta"], "the same node")
            assert read().keys() == before.keys()
            assert driver.stdin is not None
            driver.stdin.close()
            driver.wait(30)
