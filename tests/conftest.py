"""What all tests share: marks, and how they are dealt out where several processes run them (`pytest -n`)."""

from __future__ import annotations

import os

import pytest

GPU_GROUP = "gpu"
MOST_PROCESSES = 4  # each may hold torch, transformers and an engine


def pytest_configure(config: pytest.Config) -> None:
    """One thread a process where all cores have theirs; before torch is imported, which asks once."""
    if hasattr(config, "workerinput"):
        os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than cores: a fifth of the tests' time is spent waiting for clocks and for processes to start."""
    return min(len(os.sched_getaffinity(0)) + 1, MOST_PROCESSES)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip_without_gpu(items)
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(group_of(item)))
    slow_files_first(items)


def skip_without_gpu(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where torch sees no CUDA device, with that as the reason."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def group_of(item: pytest.Item) -> str:
    """Tests that one process runs in order: a file shares its servers and models; GPU tests share the GPU."""
    return GPU_GROUP if item.get_closest_marker("gpu") else item.nodeid.partition("::")[0]


def slow_files_first(items: list[pytest.Item]) -> None:
    """So that the last file to be dealt out is a short one."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
