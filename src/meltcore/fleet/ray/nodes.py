"""Connects to a Ray cluster, and runs a task on each node that reads the node's GPUs and memory."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from meltcore.common.code_version import code_version
from meltcore.common.errors import ConfigError
from meltcore.common.gpus.machine import Machine
from meltcore.common.options import is_number
from meltcore.common.process import call_with_timeout
from meltcore.fleet.plan.machine import read_machine, unloadable
from meltcore.fleet.ray.node_folder import NodeFolder
from meltcore.fleet.ray.node_names import NodeNames
from meltcore.protocol.cluster import ClusterNode, gpu_resource

_CONNECT_LIMIT_S = 5.0  # for the head's machine to accept a connection
_ANSWER_LIMIT_S = 10.0  # for the head to answer; Ray itself tries for minutes
STORE_BYTES = 100 * 2**20  # of a local cluster: nothing large travels through it
# Ray would hide the GPUs from tasks and actors without its resource `GPU`. The plan says which one an engine takes.
KEEP_VISIBLE = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
# Engines outlive an actor whose driver or head node is gone: their server ends them, or they end without it.
KEEP_ENGINES = {"RAY_kill_child_processes_on_worker_exit": "0"}
names = NodeNames()  # of all nodes that this process has seen


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Connect this process to a cluster during the block.

    The address "local" starts a cluster of this machine, and "auto" finds the cluster of this node. A cluster that was
    started here ends with the block, and its files are removed. Raises ConfigError if no cluster is found, or if the
    cluster requires a token that is missing here. Raises ConfigError also if ray is missing or has another version.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address == "local":  # before Ray is imported, which reads them
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    try:
        import ray
    except ImportError as error:
        raise ConfigError("--ray needs the package ray on every node: pip install 'meltcore[cluster]'") from error
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or address  # as Ray takes it
    if address.startswith("ray://"):
        raise ConfigError(f"--ray {address}: name the head as HOST:PORT, and run this on a node of the cluster")
    if "://" in address:
        raise ConfigError(
            f"--ray {address}: an address is HOST:PORT of the head node (6379 by default), without a scheme"
        )
    with ExitStack() as stack:
        try:
            if address == "local":
                folder = NodeFolder(f"ray-{secrets.token_hex(4)}")
                stack.callback(folder.close)
                options = _local_options(folder.path / "ray")
            else:
                head = _own_head() if address == "auto" else address
                _check_answers(address, head)
                options = {"address": head}
            stack.callback(ray.shutdown)
            # Else what raylets and workers print comes to this terminal. What engines print does not go that way.
            ray.init(logging_level="ERROR", log_to_driver=False, namespace="meltcore", **options)
        except (ConnectionError, RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"--ray {address}: the cluster cannot be used: {reason}") from error
        yield


def _own_head() -> str:
    """Return HOST:PORT of the head of this node's cluster. Raises ConnectionError if this machine is in no cluster."""
    from ray._private.services import canonicalize_bootstrap_address  # what ray.init uses: there is no public function

    found: str = canonicalize_bootstrap_address("auto")
    return found


def _local_options(folder: Path) -> dict[str, Any]:
    """Return the settings of a cluster of this machine, with the memory of its GPUs as resources.

    `folder` holds the cluster's files, which Ray lets all users read. Ray's `auto` searches another folder, so it does
    not find this cluster.
    """
    gpus = read_machine().checked().gpus
    return {
        "address": "local",
        "include_dashboard": False,
        "num_gpus": len(gpus),
        "resources": {gpu_resource(gpu.number): gpu.total_bytes / 2**30 for gpu in gpus},
        "object_store_memory": STORE_BYTES,
        "_temp_dir": str(folder),
    }


def _check_answers(address: str, head: str) -> None:
    """Raise ConfigError if no head of a cluster answers at HOST:PORT, or if the head refuses the token.

    Ray itself would try for minutes, and would abort this process if there is no token.
    """
    host, _, port = head.rpartition(":")
    if not host or not is_number(port):
        raise ConfigError(f"--ray {address}: must be auto, local or HOST:PORT of the head node (6379 by default)")
    where = "there" if head == address else f"at {head}, its head node"
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_LIMIT_S).close()
    except OSError as error:
        raise ConfigError(f"--ray {address}: nothing answers {where}: {error.strerror or error}") from error
    import ray
    from ray._raylet import GcsClient  # what `ray health-check` asks with: there is no public class

    how = "set RAY_AUTH_MODE=token, and copy ~/.ray/auth_token from the head node with its mode"
    if os.environ.get("RAY_AUTH_MODE") == "token" and not _has_token():
        raise ConfigError(f"--ray {address}: RAY_AUTH_MODE is token, and there is no token: {how}")
    try:
        call_with_timeout(_ANSWER_LIMIT_S, lambda: GcsClient(address=head))
    except TimeoutError:
        reason = f"what listens {where} has not answered as a head node of Ray within {_ANSWER_LIMIT_S:g} s"
        raise ConfigError(f"--ray {address}: {reason}") from None
    except ray.exceptions.AuthenticationError as error:
        raise ConfigError(f"--ray {address}: the cluster asks for a token, and this one is not it: {how}") from error
    except ray.exceptions.RayError as error:
        raise ConfigError(f"--ray {address}: nothing answers {where}: {' '.join(str(error).split())}") from error


def _has_token() -> bool:
    """Return whether Ray finds a token for authentication."""
    names = {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys()
    return bool(names) or (Path.home() / ".ray" / "auth_token").exists()


def living_nodes(used: Collection[str] | None = None) -> list[tuple[str, dict[str, Any]]]:
    """Return (name, Ray's description) of each living node, in the order of the names.

    Nodes with engines, whose names are in `used`, keep their names. Without `used` all nodes keep their names.
    """
    import ray

    return [(node["name"], node) for node in names.living(ray.nodes(), used)]


def free_resources() -> dict[str, dict[str, float]]:
    """Return the resources that Ray can give away now, by the id of the node."""
    from ray._private.state import available_resources_per_node  # Ray's public function adds up all nodes

    found: dict[str, dict[str, float]] = available_resources_per_node()
    return found


class NodeReader:
    """Reads the nodes repeatedly. A node that has not answered yet gets no second task."""

    def __init__(self) -> None:
        self._silent: dict[str, Any] = {}  # questions that have no answer yet, by the node's id

    def read(self, checkpoints: list[str], limit_s: float, used: Collection[str]) -> list[ClusterNode]:
        """Return all living nodes with their GPUs, their memory, and the checkpoints that they cannot load, by name.

        Nodes with engines, whose names are in `used`, keep their names. A node gets a `problem` if it does not answer
        within the limit, or if it has another version of Meltcore. It also gets one if Ray counts other GPUs there than
        NVML.
        """
        import ray

        nodes = living_nodes(used)
        unanswered = self._unanswered(self._silent)
        asked = {
            node["NodeID"]: _ask(node["NodeID"], checkpoints) for _, node in nodes if node["NodeID"] not in unanswered
        }
        if asked:
            ray.wait(list(asked.values()), num_returns=len(asked), timeout=limit_s)
        self._silent = unanswered | self._unanswered(asked)
        free = free_resources()
        return [_node(name, node, asked.get(node["NodeID"]), free.get(node["NodeID"], {})) for name, node in nodes]

    def _unanswered(self, questions: dict[str, Any]) -> dict[str, Any]:
        import ray

        if not questions:
            return {}
        _, unanswered = ray.wait(list(questions.values()), num_returns=len(questions), timeout=0)
        return {node_id: question for node_id, question in questions.items() if question in unanswered}


def _ask(node_id: str, checkpoints: list[str]) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    on_node = NodeAffinitySchedulingStrategy(node_id, soft=False)
    probe = ray.remote(num_cpus=0, max_retries=0)(_probe)
    return probe.options(scheduling_strategy=on_node, runtime_env={"env_vars": KEEP_VISIBLE}).remote(checkpoints)


def _node(name: str, node: dict[str, Any], question: Any, free: dict[str, float]) -> ClusterNode:
    """Return a node with the GPUs, memory and checkpoints that the task `question` has read there.

    If the task has not answered or has failed, the node has a `problem`. `free` are the resources of the node that Ray
    can give away. A resource that is used up is missing there.
    """
    import ray

    resources = node["Resources"]
    machine, missing = Machine((), "", 0), dict[str, str]()
    silent = "the task that reads its GPUs and memory does not answer"
    problem = silent if question is None else ""
    try:
        if question is not None:
            version, *found = ray.get(question, timeout=0)
            if problem := version_problem(version):
                found = [machine, missing]  # of another version: not to be read
            machine, missing = found
            problem = problem or machine.problem or _gpus_problem(int(resources.get("GPU", 0)), machine)
    except ray.exceptions.RayTaskError as error:
        problem = str(error.cause)
    except ray.exceptions.GetTimeoutError:
        problem = silent
    except ray.exceptions.RayError as error:
        problem = f"the task that reads its GPUs and memory failed: {' '.join(str(error).split())}"
    if problem:
        return ClusterNode(name, node["NodeID"], node["NodeManagerAddress"], Machine((), "", 0), problem=problem)
    numbers = [number for number in range(len(machine.gpus)) if gpu_resource(number) in resources]
    gib = {number: resources[gpu_resource(number)] for number in numbers}
    reserved = {number: size - free.get(gpu_resource(number), 0.0) for number, size in gib.items()}
    return ClusterNode(name, node["NodeID"], node["NodeManagerAddress"], machine, gib, missing, reserved)


def _gpus_problem(ray_gpus: int, machine: Machine) -> str:
    """Return why a node cannot be used if Ray and NVML count different GPUs. Returns "" if both agree."""
    if ray_gpus == len(machine.gpus):
        return ""
    return (
        f"Ray counts {ray_gpus} GPUs there and NVML shows {len(machine.gpus)}; "
        "start Ray on it with CUDA_VISIBLE_DEVICES naming those that Ray may use"
    )


def version_problem(version: Any) -> str:
    """Return why a node with this version of Meltcore cannot be used. Returns "" for the version of this process."""
    if version == code_version():
        return ""
    return f"it has Meltcore {version}, and the machine of this command {code_version()}: install the same on both"


def _probe(checkpoints: list[str]) -> tuple[str, Machine, dict[str, str]]:
    """Return Meltcore's version, GPUs, memory and missing checkpoints of the node on which this task runs."""
    return code_version(), read_machine(), unloadable(checkpoints)
