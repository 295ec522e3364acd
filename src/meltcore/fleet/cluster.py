"""A Ray cluster as a fleet sees it: its nodes, read by a driver process, and what may be planned on them."""

from __future__ import annotations

import sys
from typing import NamedTuple, Self

import msgspec

from meltcore.errors import ConfigError
from meltcore.process import run
from meltcore.protocol.cluster import DRIVER_MODULE, ClusterFailed, ClusterNode, FromDriver, ReadNodes
from meltcore.protocol.machine import Machine

_READ_LIMIT_S = 180.0  # to start a local cluster and to probe all nodes


class Cluster(NamedTuple):
    """The nodes of a cluster. Its GPUs are numbered from 0 on through all nodes, by name."""

    nodes: tuple[ClusterNode, ...]

    @classmethod
    def read(cls, address: str) -> Self:
        """Read the cluster at `address`: "auto", "local" or HOST:PORT.

        Raises ConfigError where there is none, or where a node cannot be read.
        """
        command = [sys.executable, "-m", DRIVER_MODULE, address]
        done = run(command, limit_s=_READ_LIMIT_S, stdin=msgspec.json.encode(ReadNodes()) + b"\n")
        if done.returncode is None:
            raise ConfigError(f"--ray {address}: the cluster gave no answer within {_READ_LIMIT_S:g} s")
        lines = done.stdout.splitlines()
        if not lines:
            last_line = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise ConfigError(f"--ray {address}: the driver ended with status {done.returncode}: {last_line}")
        answer = msgspec.json.decode(lines[-1], type=FromDriver)
        if isinstance(answer, ClusterFailed):
            raise ConfigError(answer.message)
        return cls(tuple(answer.nodes))

    @property
    def machine(self) -> Machine:
        """All nodes as one machine: their GPUs, the driver of the first that has one, and their host memory."""
        gpus = [gpu for node in self.nodes for gpu in node.machine.gpus]
        driver = next((node.machine.driver for node in self.nodes if node.machine.gpus), "")
        numbered = tuple(gpu._replace(number=number) for number, gpu in enumerate(gpus))
        return Machine(numbered, driver, sum(node.machine.host_bytes for node in self.nodes))

    @property
    def gpu_nodes(self) -> list[str]:
        """The node of each GPU."""
        return [node.name for node in self.nodes for _ in node.machine.gpus]

    @property
    def host_bytes(self) -> dict[str, int]:
        """The available bytes of host memory of each node."""
        return {node.name: node.machine.host_bytes for node in self.nodes}
