"""Names the nodes of a cluster. A raylet that is started again has a new id, but its node keeps its name."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

_ID_DIGITS = 6
_ANSWER_LIMIT_S = 0.5  # for the machine of a raylet to accept or refuse a connection


class NodeNames:
    """Stores the name of each node that this process has seen, by the id of its raylet."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._ended: set[str] = set()  # raylets that have ended, which Ray takes for alive for some 15 s more
        self._lock = threading.Lock()

    def keep(self, names: Mapping[str, str]) -> None:
        """Use the names, by node id, that nodes already have in another process."""
        with self._lock:
            self._names.update(names)

    def living(self, nodes: Sequence[dict[str, Any]], used: Collection[str] | None = None) -> list[dict[str, Any]]:
        """Return Ray's living nodes, each with its `name`, in the order of the names.

        Nodes with engines, whose names are in `used`, keep their names. Without `used` all nodes keep their names.
        """
        with self._lock:
            alive = self._running([node for node in nodes if node["Alive"]])
            hosts = [(node["NodeManagerHostname"], node["NodeID"]) for node in alive]
            if used is not None:
                self._names.update(short_node_names(hosts, self._names, used))
            names = node_names(hosts, self._names)
            self._names.update(zip([node["NodeID"] for node in alive], names, strict=True))
        named = [node | {"name": name} for name, node in zip(names, alive, strict=True)]
        return sorted(named, key=lambda node: node["name"])

    def _running(self, alive: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the nodes without those whose raylet has ended.

        Ray may still list an ended raylet. If another raylet joins on the same host, a connection shows which one has
        ended.
        """
        new = [node for node in alive if node["NodeID"] not in self._names]
        for node in alive:
            others = [other for other in new if other is not node]
            if any(other["NodeManagerHostname"] == node["NodeManagerHostname"] for other in others) and (
                (node not in new and _endpoint(node) in map(_endpoint, others)) or _refuses(*_endpoint(node))
            ):
                self._ended.add(node["NodeID"])
        return [node for node in alive if node["NodeID"] not in self._ended]


def node_names(hosts: Sequence[tuple[str, str]], known: Mapping[str, str]) -> list[str]:
    """Return a name for each (host name, node id).

    The name is the host name. The beginning of the node id is added if the host name is not unique. Names in `known`,
    by node id, stay, so a raylet that joins on the same host renames no other node.
    """
    new = Counter(host for host, node_id in hosts if node_id not in known)
    taken = {known[node_id] for _, node_id in hosts if node_id in known}
    return [
        known.get(node_id) or (host if new[host] == 1 and host not in taken else f"{host}-{node_id[:_ID_DIGITS]}")
        for host, node_id in hosts
    ]


def short_node_names(
    hosts: Sequence[tuple[str, str]], known: Mapping[str, str], used: Collection[str]
) -> dict[str, str]:
    """Return the host names, by node id, that nodes can have as their names again.

    A node can have its host name if no other living node is on the same host. Names in `used` do not change, because
    engines have been started on nodes by these names.
    """
    alone = Counter(host for host, _ in hosts)
    given = set(known.values())
    return {
        node_id: host
        for host, node_id in hosts
        if alone[host] == 1 and host in given and known.get(node_id, host) not in {host, *used}
    }


def _endpoint(node: dict[str, Any]) -> tuple[str, int]:
    return node["NodeManagerAddress"], node["NodeManagerPort"]


def _refuses(address: str, port: int) -> bool:
    """Return whether a machine refuses connections to a port, because no process listens there.

    A machine that does not answer may come back, so False is returned for it.
    """
    try:
        socket.create_connection((address, port), _ANSWER_LIMIT_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
