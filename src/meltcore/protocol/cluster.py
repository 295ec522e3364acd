"""Defines the lines between a process of Meltcore and the driver of a Ray cluster, its child (JSON over two pipes).

Ray stays within the driver: a cluster that loses its head node ends the driver, and nothing else of Meltcore.
`python -m meltcore.cluster.driver ADDRESS` is the driver. It answers each line of its standard input with one line, and
ends, with what it has started, at the end of its input.
"""

from __future__ import annotations

import msgspec

from meltcore.protocol.machine import Machine

DRIVER_MODULE = "meltcore.cluster.driver"


class ReadNodes(msgspec.Struct, tag="read_nodes", frozen=True):
    """Asks for all living nodes. Answered by `Nodes`."""


class ClusterNode(msgspec.Struct, frozen=True):
    """A node of the cluster. name: its host name, with the begin of its id where several nodes have the same."""

    name: str
    node_id: str
    address: str
    machine: Machine
    ray_gpus: int  # that Ray counts


class Nodes(msgspec.Struct, tag="nodes", frozen=True):
    """The living nodes, in the order of their names."""

    nodes: list[ClusterNode]


class ClusterFailed(msgspec.Struct, tag="failed", frozen=True):
    """Reports in one line why a question has no answer, or why the cluster cannot be reached."""

    message: str


ToDriver = ReadNodes
FromDriver = Nodes | ClusterFailed
