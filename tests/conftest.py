"""What all tests share: marks, and how files are dealt out where several processes run them (`pytest -n`)."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from places import HELPERS

sys.path += [folder for folder in HELPERS if folder not in sys.path]
MOST_PROCESSES = 4  # each may hold torch, transformers and an engine


def pytest_configure() -> None:
    """One thread a process where all cores have theirs; before torch is imported, which asks once.

    The Hub's library, too, reads its variable once. And Ctrl-C and hang-up as ever: a shell that starts the tests in
    the background has the one ignored, nohup the other, and some tests send them to themselves or to what they start.
    And bytecode is kept: without it, hundreds of child processes would each compile the package anew.
    """
    gc.disable()  # until all tests are collected, which takes 7.0 s of CPU time in each process instead of 9.2 s
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test needs the Hub, and a lookup without a network takes long
    if os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") != "1":
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


# How long an example takes says nothing where other processes have the cores.
settings.register_profile("busy", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Two more than cores: some of the tests' time is spent waiting for clocks and for processes to start.

    One where there is an NVIDIA GPU, which tests have to themselves.
    """
    if Path("/dev/nvidiactl").exists():
        return 1
    return min(len(os.sched_getaffinity(0)) + 2, MOST_PROCESSES)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip_without_gpu(items)
    skip_without_ray(items)
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


def skip_without_ray(items: list[pytest.Item]) -> None:
    """Skip tests marked `ray` where Ray is not installed, with that as the reason."""
    if importlib.util.find_spec("ray") is None:
        for item in items:
            if item.get_closest_marker("ray"):
                item.add_marker(pytest.mark.skip(reason="needs ray: pip install 'meltcore[cluster]'"))


def slow_files_first(items: list[pytest.Item]) -> None:
    """Files with the most slow tests first, so that the last file to be dealt out is a short one."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


def pytest_collection_finish() -> None:
    """Set aside what is loaded by now: ten thousand tests, torch, transformers. A collection of it takes seconds."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Set aside what a file leaves, such as the modules that its tests have imported."""
    if nextitem is None or nextitem.path != item.path:
        set_aside()


def set_aside() -> None:
    """Let later collections of garbage leave all objects alone that there are.

    Every level of the load generator collects first. With these objects that is most of the CPU time of its tests.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def temporary_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """TMPDIR of this test's processes alone; short enough for sockets, as tmp_path may not be."""
    with tempfile.TemporaryDirectory(prefix="m") as name:
        monkeypatch.setenv("TMPDIR", name)
        yield Path(name)
