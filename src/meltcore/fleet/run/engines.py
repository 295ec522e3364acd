"""Creates the engine process of a replica: on this machine, or on the node of a cluster that the plan has chosen."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from functools import partial

from meltcore.fleet.plan.placement import Placement, shared_engine
from meltcore.fleet.run.replica import Replica
from meltcore.fleet.run.supervised_model import ServerParts
from meltcore.protocol.cluster import StartEngine
from meltcore.protocol.engines import FromEngine
from meltcore.serve.engines.engine_process import EngineProcess, LocalEngineProcess
from meltcore.serve.engines.remote_engine import RemoteEngineProcess
from meltcore.settings.config import PriorityClass


def new_engine(
    parts: ServerParts, replica: Replica, priority_class: PriorityClass, on_message: Callable[[FromEngine], None]
) -> EngineProcess:
    """Return an engine that has not been started. Without sockets it never will be."""
    directory = replica.sockets or parts.sockets
    if parts.cluster is not None:
        start = _start(parts, replica, directory.name, priority_class)
        return RemoteEngineProcess(
            parts.cluster,
            start,
            on_message,
            directory,
            replica.log,
            on_place=partial(replica.move, parts.on_moved),
            failed_nodes=parts.policy.failed_nodes(replica.deaths, time.monotonic()),
        )
    return LocalEngineProcess(
        shared_engine(_placement(parts, replica), parts.sharing, priority_class, parts.sockets),
        parts.engine_command,
        on_message,
        directory=directory,
        client_count=parts.client_count,
        environment=replica.placement.environment | parts.environment(replica.placement, priority_class),
        log=replica.log,
    )


def _placement(parts: ServerParts, replica: Replica) -> Placement:
    """Return the place where an engine starts, with the number of ranks that may compile there concurrently."""
    placement = replica.placement
    engine = dataclasses.replace(placement.engine, node_ranks=parts.gpu_ranks(placement.node))
    return placement._replace(engine=engine)


def _start(parts: ServerParts, replica: Replica, number: str, priority_class: PriorityClass) -> StartEngine:
    """Return the order to start an engine on its node. It has the number of its folder of sockets."""
    assert parts.cluster is not None
    placement = _placement(parts, replica)
    size_bytes = placement.engine.memory_bytes or 0
    return StartEngine(
        engine=int(number) if number.isdigit() else -1,
        node=placement.node,
        command=list(parts.engine_command[1:]),
        config=placement.engine,
        client_count=parts.client_count,
        client_key=parts.cluster.keys.public,
        gpus=list(placement.gpus),
        gib=size_bytes / 2**30,
        cpu_engines=parts.cpu_engines(placement.node),
        fleet=parts.cluster.name,
        sharing=parts.sharing,
        priority_class=priority_class,
        model=placement.model,
        replica=replica.index,
    )
