"""A Ray cluster of several raylets on this machine, whose NVML is scripted: `start_nodes`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import meltcore

STORE_BYTES = 80 * 2**20  # the least that Ray takes: nothing large travels through it
PYNVML = """
import os
from types import SimpleNamespace

class NVMLError(Exception):
    pass

GIB = [int(size) for size in os.environ["SCRIPTED_GIB"].split(",") if size]
nvmlInit = nvmlShutdown = lambda: None
nvmlSystemGetDriverVersion = lambda: "570.1"
nvmlDeviceGetHandleByIndex = lambda index: GIB[index]
nvmlDeviceGetMemoryInfo = lambda size: SimpleNamespace(total=size << 30, used=1 << 29)
nvmlDeviceGetName = lambda size: f"Scripted {size}"
"""


@contextmanager
def start_nodes(folder: Path, *gib: Sequence[int]) -> Iterator[Any]:
    """Start a raylet per entry, the head first, with GPUs of these sizes; yields Ray's cluster, with `address`."""
    cluster_utils = pytest.importorskip("ray.cluster_utils", reason="needs ray: pip install 'meltcore[cluster]'")
    (folder / "pynvml.py").write_text(PYNVML)
    with pytest.MonkeyPatch.context() as patch:  # what raylets and their workers inherit
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(meltcore.__file__).parents[1]), *sys.path]))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        cluster = cluster_utils.Cluster()
        try:
            for index, sizes in enumerate(gib):
                cluster.add_node(
                    wait=False,
                    num_cpus=1,
                    num_gpus=len(sizes),
                    resources={f"gpu{number}_gib": size for number, size in enumerate(sizes)},
                    object_store_memory=STORE_BYTES,
                    env_vars={
                        "PYTHONPATH": os.pathsep.join([str(folder), os.environ["PYTHONPATH"]]),
                        "SCRIPTED_GIB": ",".join(map(str, sizes)),
                        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(len(sizes)))),
                    },
                    **({"include_dashboard": False} if index == 0 else {}),
                )
            cluster.wait_for_nodes(60)
            yield cluster
        finally:
            cluster.shutdown()
