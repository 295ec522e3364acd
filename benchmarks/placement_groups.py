"""Compares two ways to start an engine's actor on Ray: on a node that the plan names, and through a placement group.

    python benchmarks/placement_groups.py [--repeats 5]

Several raylets of this machine, each with 40 GiB of two GPUs as resources; the actor does nothing. Measured: the time
from the request until the actor answers, alternating; and what a group does when its node is killed: how much memory of
another node Ray reserves for it, and how long after the node was found dead, though nothing runs there.

Needs the package ray.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from bench_output import Row, median_rows, write_result

from meltcore.fleet.ray.nodes import STORE_BYTES, free_resources, living_nodes
from meltcore.protocol.cluster import gpu_resource

NODES, GPU_GIB, ENGINE_GIB = 3, 40, 30
LIMIT_S, POLL_S = 60.0, 0.01
ASKED = {gpu_resource(number): ENGINE_GIB for number in range(2)}


class Engine:
    """An actor in the place of the one that starts an engine."""


def wait_until(met: Callable[[], bool], what: str) -> None:
    """Wait until `met`. Raises TimeoutError after LIMIT_S."""
    deadline_s = time.monotonic() + LIMIT_S
    while not met():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{what}: not within {LIMIT_S:g} s")
        time.sleep(POLL_S)


def start_actor(strategy: Any) -> float:
    """Start an actor, wait until it answers, and end it. Returns the seconds until it has answered."""
    import ray

    asked_s = time.monotonic()
    actor = ray.remote(Engine).options(num_cpus=0, resources=ASKED, scheduling_strategy=strategy()).remote()
    ray.get(actor.__ray_ready__.remote(), timeout=LIMIT_S)
    took_s = time.monotonic() - asked_s
    ray.kill(actor)
    return took_s


def on_node() -> Any:
    """Name the node, as the plan does."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node_id = next(node["NodeID"] for _, node in living_nodes() if gpu_resource(0) in node["Resources"])
    return NodeAffinitySchedulingStrategy(node_id, soft=False)


def in_group() -> Any:
    """Make a group with one bundle, which Ray places on a node, and name it."""
    import ray
    from ray.util import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = placement_group([ASKED], strategy="STRICT_PACK")
    ray.get(group.ready(), timeout=LIMIT_S)
    return PlacementGroupSchedulingStrategy(group)


def reserved() -> dict[str, float]:
    """GiB of GPU 0 that Ray has given away of each living node, by its id."""
    free, gpu = free_resources(), gpu_resource(0)
    with_gpu = {node["NodeID"]: node["Resources"][gpu] for _, node in living_nodes() if gpu in node["Resources"]}
    return {node: size - free.get(node, {}).get(gpu, 0.0) for node, size in with_gpu.items()}


def lose_node(cluster: Any, raylets: list[Any]) -> list[Row]:
    """Kill the node of a group, and measure what Ray reserves for the group elsewhere."""
    group = in_group().placement_group
    wait_until(lambda: sum(reserved().values()) > 0, "the group is reserved")
    (lost,) = [node for node, gib in reserved().items() if gib]
    cluster.remove_node(next(raylet for raylet in raylets if raylet.node_id == lost), allow_graceful=False)
    wait_until(lambda: lost not in reserved(), "the node is found dead")
    found_s = time.monotonic()
    wait_until(lambda: sum(reserved().values()) > 0, "the group is reserved elsewhere")
    rows = [
        Row(work="node lost: its group is reserved on another one after", unit="s", value=time.monotonic() - found_s),
        Row(work="node lost: reserved there without an engine, per GPU", unit="GiB", value=sum(reserved().values())),
    ]
    remove_group(group)
    return rows


def remove_group(group: Any) -> None:
    """Remove a group, and wait until Ray has its memory back."""
    from ray.util import remove_placement_group

    remove_placement_group(group)
    wait_until(lambda: sum(reserved().values()) == 0, "the memory of a group comes back")


def measure(cluster: Any, raylets: list[Any]) -> list[Row]:
    """Start an actor in both ways, and lose a node."""
    node_s = start_actor(on_node)
    wait_until(lambda: sum(reserved().values()) == 0, "the memory of an actor comes back")
    groups: list[Any] = []
    group_s = start_actor(lambda: groups.append(in_group()) or groups[0])
    remove_group(groups[0].placement_group)
    return [
        Row(work="start on a node that the plan names", unit="s", value=node_s),
        Row(work="start through a placement group", unit="s", value=group_s),
        *lose_node(cluster, raylets),
    ]


def main() -> int:
    """Measure on a cluster of this machine, which ends with this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    if find_spec("ray") is None:
        raise SystemExit("needs the package ray: pip install '.[cluster]'")
    import ray
    from ray import cluster_utils

    cluster = cluster_utils.Cluster()
    try:
        node = {"num_cpus": 1, "object_store_memory": STORE_BYTES, "wait": True}
        cluster.add_node(include_dashboard=False, **node)
        gpus = dict.fromkeys(ASKED, GPU_GIB)
        raylets = [cluster.add_node(resources=gpus, **node) for _ in range(NODES)]
        ray.init(address=cluster.address, logging_level="ERROR")
        start_actor(on_node)  # the first worker process takes longer
        runs = []
        for _ in range(args.repeats):
            runs.append(measure(cluster, raylets))
            raylets.append(cluster.add_node(resources=gpus, **node))
        write_result(median_rows(runs), {"ray": metadata.version("ray")})
    finally:
        ray.shutdown()
        cluster.shutdown()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
