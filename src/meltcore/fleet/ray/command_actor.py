"""Runs a Meltcore command as a process on every node of a cluster, with one actor per node."""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from meltcore.common.code_version import code_version
from meltcore.common.process import end_group, run
from meltcore.fleet.ray.node_folder import NodeFolder
from meltcore.fleet.ray.nodes import KEEP_VISIBLE, living_nodes, version_problem
from meltcore.protocol.cluster import CommandEnded, CommandStarted, FromDriver, RunOnNodes, gpu_resource

_LEAST_START_S, _START_LIMIT_S = 15.0, 60.0  # for a worker process of Ray; there is none while other jobs have the GPUs
_ANSWER_LIMIT_S = 60.0  # beyond the limit of the command, which its actor keeps
_TERMINATE_LIMIT_S = 20.0  # for a command to end its engines or probes
_CALLS = 2  # of one actor that run together: run, and end
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_NVIDIA, _DISPLAY_CLASS = "0x10de", "0x03"


async def run_on_nodes(message: RunOnNodes, answer: Callable[[FromDriver], None]) -> None:
    """Run a command on all living nodes in parallel, and call `answer` for each node when its command ends."""
    nodes = living_nodes()
    answer(CommandStarted([name for name, _ in nodes]))

    async def run_on(name: str, node: dict[str, Any]) -> None:
        answer(await _run_on_node(message, name, node))

    await asyncio.gather(*(run_on(name, node) for name, node in nodes))


async def _run_on_node(message: RunOnNodes, name: str, node: dict[str, Any]) -> CommandEnded:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    resources = node["Resources"]
    gpus = int(resources.get("GPU", 0))
    taken = [gpu_resource(number) for number in range(gpus) if message.takes_gpus]
    actor = (
        ray.remote(CommandActor)
        .options(
            num_cpus=0,
            num_gpus=gpus if message.takes_gpus else 0,
            max_concurrency=_CALLS,
            resources={resource: resources[resource] for resource in taken if resource in resources},
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
            runtime_env={"env_vars": KEEP_VISIBLE},
        )
        .remote()
    )
    is_started = False
    start_limit_s = max(_LEAST_START_S, min(_START_LIMIT_S, message.limit_s))
    try:
        async with asyncio.timeout(start_limit_s):
            version, has_gpu = await actor.find_version_and_gpu.remote(gpus)
        is_started = True
        if problem := version_problem(version):
            return CommandEnded(name, "failed", problem)
        if message.needs_gpu and not has_gpu:
            return CommandEnded(name, "no GPU", "no NVIDIA GPU")
        async with asyncio.timeout(message.limit_s + _TERMINATE_LIMIT_S + _ANSWER_LIMIT_S):
            ended = msgspec.json.decode(await actor.run.remote(msgspec.json.encode(message)), type=CommandEnded)
        return msgspec.structs.replace(ended, node=name, has_gpu=has_gpu)
    except TimeoutError:
        if is_started:
            return CommandEnded(name, "late", f"it gave no answer within {message.limit_s:g} s")
        cause = "other Ray jobs have its GPUs, or no worker" if taken else "no worker"
        return CommandEnded(name, "failed", f"{cause} started within {start_limit_s:g} s")
    except ray.exceptions.RayTaskError as error:
        return CommandEnded(name, "failed", str(error.cause))
    except ray.exceptions.RayError as error:
        first_line = str(error).strip().partition("\n")[0]
        return CommandEnded(name, "failed", f"the node is gone, or its actor has died: {first_line}")
    finally:
        if is_started:
            with suppress(ray.exceptions.RayError, TimeoutError):
                async with asyncio.timeout(_TERMINATE_LIMIT_S):
                    await actor.end.remote()
        ray.kill(actor)


class CommandActor:
    """Runs one command as a process on its node.

    The process ends with the actor, and the actor with the driver process.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._is_done = threading.Event()

    def find_version_and_gpu(self, ray_gpus: int) -> tuple[str, bool]:
        """Return Meltcore's version on this node, and whether the node has a GPU.

        It has a GPU if Ray counts GPUs there, or if an NVIDIA GPU is on the PCI bus.
        """
        return code_version(), ray_gpus > 0 or any(map(_is_nvidia_gpu, _PCI_DEVICES.glob("*")))

    def run(self, encoded: bytes) -> bytes:
        """Run the command of a `RunOnNodes`, and return a `CommandEnded`. Both are encoded as JSON.

        A command that reaches its time limit is ended.
        """
        message = msgspec.json.decode(encoded, type=RunOnNodes)
        folder = NodeFolder(f"node-{secrets.token_hex(8)}")
        began_s = time.monotonic()
        try:
            done = run(
                [
                    *(sys.executable, "-m", "meltcore.cli.main", *message.command),
                    *(("--out", str(folder.path)) if message.has_folder else ()),
                ],
                limit_s=message.limit_s,
                # Ray sets one thread, which a benchmark of the CPU must not have.
                environment={name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"},
                terminate_limit_s=_TERMINATE_LIMIT_S,
                on_start=self._remember,
            )
        finally:
            folder.close()
            self._is_done.set()
        last_line = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        is_late = done.returncode is None
        reason = f"it did not end within {message.limit_s:g} s" + (f": {last_line}" if last_line else "")
        ended = CommandEnded(
            "",
            "late" if is_late else "ended",
            reason if is_late else last_line,
            done.returncode,
            b"" if is_late else done.stdout,
            duration_s=time.monotonic() - began_s,
        )
        return msgspec.json.encode(ended)

    def _remember(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def end(self) -> None:
        """End the process and its group, with SIGTERM first. Wait until the command's folder is removed."""
        if self._process is not None and not self._is_done.is_set():
            end_group(self._process, _TERMINATE_LIMIT_S / 2)
            self._is_done.wait(_TERMINATE_LIMIT_S / 4)


def _is_nvidia_gpu(device: Path) -> bool:
    try:
        vendor, device_class = ((device / name).read_text().strip() for name in ("vendor", "class"))
    except OSError:
        return False
    return vendor == _NVIDIA and device_class.startswith(_DISPLAY_CLASS)
