"""A Ray cluster of several raylets on this machine, whose NVML is scripted, and a fleet of scripted engines on it."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pynvml
import pytest
from places import program
from server_harness import MODEL, RunningServer, make_model
from waiting import WAIT_S, wait_until

import meltcore
from meltcore.common.process import start_ticks
from meltcore.fleet.admin.admin import call_admin
from meltcore.fleet.daemon import find_fleet
from meltcore.fleet.run.restart_policy import RestartAfterPause

POLICY = RestartAfterPause(first_pause_s=0.2, max_pause_s=0.5)
SAID = "a scripted engine starts"
SCRIPTED_ENGINE = str(program("scripted_engine.py")).encode()
STORE_BYTES = 80 * 2**20  # the least that Ray takes: nothing large travels through it
# The names of the real one, with answers of its own in place of a driver's.
PYNVML = (
    f"exec(open({pynvml.__file__!r}).read())\n"
    + """
import os, time
from types import SimpleNamespace

GIB = [int(size) for size in os.environ["SCRIPTED_GIB"].split(",") if size]
nvmlInit = lambda: time.sleep(float(os.environ["SCRIPTED_NVML_S"]))
nvmlShutdown = lambda: None
nvmlSystemGetDriverVersion = lambda: "570.1"
nvmlDeviceGetCount = lambda: len(GIB)
nvmlDeviceGetHandleByIndex = lambda index: SimpleNamespace(number=index, gib=GIB[index])
nvmlDeviceGetMemoryInfo = lambda gpu: SimpleNamespace(total=gpu.gib << 30, used=1 << 29)
nvmlDeviceGetName = lambda gpu: f"Scripted {gpu.gib}"


def nvmlDeviceGetMigMode(gpu):
    raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
"""
)


@contextmanager
def start_nodes(folder: Path, *gib: Sequence[int], settings: Mapping[str, str] | None = None) -> Iterator[Any]:
    """Start a raylet per entry, the head first, with GPUs of these sizes; yields Ray's cluster, with `address`.

    settings: environment of Ray's own processes.
    """
    from ray import cluster_utils

    (folder / "pynvml.py").write_text(PYNVML)
    with pytest.MonkeyPatch.context() as patch:  # what raylets and their workers inherit
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(meltcore.__file__).parents[1]), *sys.path]))
        for name, value in ({"RAY_USAGE_STATS_ENABLED": "0"} | dict(settings or {})).items():
            patch.setenv(name, value)
        cluster = cluster_utils.Cluster()
        try:
            for index, sizes in enumerate(gib):
                add_node(cluster, folder, sizes, is_head=index == 0)
            cluster.wait_for_nodes(60)
            cluster.temporary = folder
            yield cluster
        finally:
            cluster.shutdown()


def add_node(
    cluster: Any,
    folder: Path,
    sizes: Sequence[int],
    *,
    is_head: bool = False,
    ray_gpus: int | None = None,
    nvml_s: float = 0,
    packages: Path | None = None,
) -> None:
    """Start a raylet with GPUs of these sizes. ray_gpus: that Ray counts; nvml_s: that NVML takes.

    packages: a folder with a Meltcore that the node has in place of this one.
    """
    first = [] if packages is None else [str(packages)]
    cluster.add_node(
        wait=False,
        num_cpus=1,
        num_gpus=len(sizes) if ray_gpus is None else ray_gpus,
        resources={f"gpu{number}_gib": size for number, size in enumerate(sizes)},
        object_store_memory=STORE_BYTES,
        env_vars={
            "PYTHONPATH": os.pathsep.join([*first, str(folder), os.environ["PYTHONPATH"]]),
            "TMPDIR": str(folder),  # of actors and engines
            "SCRIPTED_GIB": ",".join(map(str, sizes)),
            "SCRIPTED_NVML_S": str(nvml_s),
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(len(sizes)))),
        },
        **({"include_dashboard": False} if is_head else {}),
    )


def write_fleet(folder: Path, *, step_s: float = 0.002) -> Path:
    """A fleet.yaml with two replicas on CPUs and a model on a GPU, all scripted. step_s: of their engines."""
    checkpoint = make_model(folder / "model")
    (checkpoint / "engine.json").write_bytes(msgspec.json.encode({"step_s": step_s, "say": SAID}))
    path = folder / "fleet.yaml"
    load = f"checkpoint: {checkpoint}, load_format: dummy"
    path.write_text(
        "server: {port: 0}\nmodels:\n"
        f"  {MODEL}: {{{load}, device: cpu, memory: 64MiB, replicas: 2}}\n  gpu: {{{load}, memory: 2.5GiB}}\n"
    )
    return path


def engine_pids() -> set[int]:
    """Processes of scripted engines that run under an actor."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_bytes()
        except OSError:
            continue
        if SCRIPTED_ENGINE in arguments and b"meltcore-engine-" in arguments:
            found.add(int(path.parent.name))
    return {pid for pid in found if start_ticks(pid) is not None}


def rows(server: RunningServer) -> list[dict[str, Any]]:
    return call_admin(find_fleet(server.port).admin, "GET", "/ps")


def sums_answers(server: RunningServer, model: str) -> list[tuple[str, list[str]]]:
    """What a bundled model answers greedily to four problems, each with its tokens."""
    found = []
    for number in range(4):
        body = {"model": model, "prompt": f"{number + 12} + {number * 7 + 20} = ", "max_tokens": 24, "temperature": 0}
        choice = server.post("/v1/completions", body | {"logprobs": 1}).json["choices"][0]
        found.append((choice["text"], choice["logprobs"]["tokens"]))
    return found


def is_on_gpu_node(pid: int) -> bool:
    """Whether an engine was started by a worker of the raylet with two GPUs of 40 GiB."""
    return b"SCRIPTED_GIB=40,40" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


class Stream:
    """An open answer over HTTP, read on a thread of its own: how it ended, and when something came of it."""

    def __init__(self, server: RunningServer, model: str, max_tokens: int, **fields: Any) -> None:
        body = {"model": model, "prompt": "ab", "max_tokens": max_tokens, "stream": True} | fields
        self._connection = server.open("/v1/completions", body)
        self._data = b""
        self.arrived_s: list[float] = []
        self.ended_s = 0.0
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        wait_until(lambda: self.arrived_s, f"the first token of {model}")

    def _read(self) -> None:
        with suppress(OSError):
            while b"0\r\n\r\n" not in self._data and (block := self._connection.recv(65_536)):
                self._data += block
                self.arrived_s.append(time.monotonic())
        self.ended_s = time.monotonic()

    def end(self) -> str:
        """Wait for the end; returns "done", or the message of its error."""
        self._thread.join(2 * WAIT_S)
        assert not self._thread.is_alive(), "the answer has not ended"
        self._connection.close()
        last = [line for line in self._data.decode().split("\n") if line.startswith("data: ")]
        if last[-1] == "data: [DONE]" and '"error"' not in last[-2]:
            return "done"
        (error,) = [line for line in last if '"error"' in line]
        return str(json.loads(error.removeprefix("data: "))["error"]["message"])


def children(pid: int, argument: bytes) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(each) for each in found if argument in Path(f"/proc/{each}/cmdline").read_bytes()]


def all_ready(server: RunningServer) -> bool:
    return [row["state"] for row in rows(server)] == ["ready"] * 3
