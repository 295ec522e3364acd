"""The processes that compile kernels end with their engine, and one that dies or hangs is given up."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from compile_tools import children, store_kernel
from waiting import WAIT_S

from meltcore.common.process import start_ticks
from meltcore.engine.worker import compile_workers, warm_up
from meltcore.engine.worker.compile_workers import CompileWorkers, worker_count
from meltcore.engine.worker.warm_up import CompileOrder, compile_ahead, make_compiler
from meltcore.kernels import nvrtc
from meltcore.kernels.nvrtc import Binary, CudaKernel
from meltcore.settings.config import DebugSwitch, EngineConfig


def wait_ended(pids: list[int]) -> None:
    end_s = time.monotonic() + WAIT_S
    while left := [pid for pid in pids if start_ticks(pid) is not None]:
        assert time.monotonic() < end_s, f"{left} of {pids} still run"
        time.sleep(0.01)


class Started(NamedTuple):
    """Two workers that have been forked, the first of which has compiled; their ids, and why they did not compile."""

    workers: CompileWorkers
    pids: list[int]
    reasons: list[str]
    kernel: CudaKernel

    def compile(self, size: int) -> bool:
        return self.workers.compile(Binary(self.kernel, (("SIZE", size),), 90))


def start(folder: Path) -> Started:
    reasons: list[str] = []
    before = set(children(os.getpid()))
    workers = CompileWorkers(2, report=reasons.append)
    (parent,) = set(children(os.getpid())) - before
    assert children(parent) == [], "none while no kernel is missing"
    started = Started(workers, [parent], reasons, store_kernel(folder))
    assert started.compile(1)
    end_s = time.monotonic() + WAIT_S
    while len(pids := children(parent)) < 2:
        assert time.monotonic() < end_s
    return started._replace(pids=[parent, *pids])


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    started = start(tmp_path)
    yield started
    started.workers.close()
    wait_ended(started.pids)


@pytest.mark.slow
def test_workers_compile_cuda_sources(started: Started) -> None:
    good, bad = Binary(started.kernel, (("SIZE", 3),), 90), Binary(started.kernel, (), 90)
    assert not good.is_compiled()
    assert started.workers.compile(good)
    assert good.is_compiled()
    assert started.kernel.cubin({"SIZE": 3}, 90)[:4] == b"\x7fELF"
    for _ in range(3):
        assert not started.workers.compile(bad), "SIZE is not defined"
    assert started.compile(4), "the workers go on"
    (reason,) = started.reasons
    assert "MeltcoreError: NVRTC cannot compile store.cu for sm_90" in reason
    started.workers.close()
    assert not started.workers.compile(good), "closed"
    assert len(started.reasons) == 1


@pytest.mark.slow
def test_dead_worker_is_reported_and_not_asked_again(started: Started) -> None:
    os.kill(started.pids[2], signal.SIGKILL)
    assert [started.compile(size) for size in (2, 3, 4)] == [False, True, True]
    assert started.reasons == ["a process that compiles kernels has ended"]


@pytest.mark.slow
def test_hanging_worker_is_given_up(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_workers, "_LIMIT_S", 0.2)
    os.kill(started.pids[2], signal.SIGSTOP)
    assert not started.compile(2)
    assert started.reasons == ["a process that compiles kernels has not answered within 0.2 s"]
    monkeypatch.undo()
    assert started.compile(3)


@pytest.mark.slow
def test_closing_ends_stopped_workers(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their parent ends them by itself: nothing else has to be killed."""
    monkeypatch.setattr(compile_workers, "_END_LIMIT_S", WAIT_S)
    killed: list[int] = []
    for pid in started.pids[1:]:
        os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(os, "kill", lambda pid, _: killed.append(pid))
    started.workers.close()
    assert killed == []
    assert [start_ticks(pid) for pid in started.pids] == [None] * 3


@pytest.mark.slow
def test_closing_ends_a_stopped_parent(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_workers, "_END_LIMIT_S", 0.1)
    os.kill(started.pids[0], signal.SIGSTOP)
    os.kill(started.pids[1], signal.SIGSTOP)
    started.workers.close()
    wait_ended(started.pids)


@pytest.mark.slow
def test_compilers_that_a_worker_has_started_end_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ptxas and the C compiler, which inherit what a worker does with signals."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    started = start(tmp_path)
    started.workers.close()
    # Forked after this: the second workers run a compiler that takes longer than any test.
    monkeypatch.setattr(Binary, "compile", lambda binary: subprocess.run(["sleep", "97"], check=True))
    before = set(children(os.getpid()))
    workers = CompileWorkers(1)
    (parent,) = set(children(os.getpid())) - before
    asking = threading.Thread(target=workers.compile, args=(Binary(started.kernel, (("SIZE", 7),), 90),))
    asking.start()
    end_s = time.monotonic() + WAIT_S
    while not (compilers := [pid for worker in children(parent) for pid in children(worker)]):
        assert time.monotonic() < end_s
        time.sleep(0.01)
    status = Path(f"/proc/{compilers[0]}/status").read_text()
    ignored = int(status.split("SigIgn:")[1].split()[0], 16)
    assert not ignored & (1 << (signal.SIGTERM - 1) | 1 << (signal.SIGINT - 1))
    workers.close()
    asking.join(WAIT_S)
    wait_ended([parent, *compilers])


@pytest.mark.slow
def test_workers_end_when_they_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    started = start(tmp_path)
    pids = started.pids
    del started
    wait_ended(pids)


def serve_for_ever(folder: Path, ids: Connection) -> None:
    started = start(folder)
    os.kill(started.pids[2], signal.SIGSTOP)
    ids.send(started.pids)
    time.sleep(600)


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["engine", "parent of the workers"])
def test_workers_end_with_the_process_that_needs_them(
    killed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    ours, theirs = multiprocessing.Pipe()
    engine = multiprocessing.get_context("fork").Process(target=serve_for_ever, args=(tmp_path, theirs), daemon=True)
    engine.start()
    try:
        assert ours.poll(WAIT_S)
        pids = ours.recv()
        os.kill(engine.pid if killed == "engine" else pids[0], signal.SIGKILL)
        wait_ended(pids)
    finally:
        engine.kill()
        engine.join(WAIT_S)


def rehearsal_of(kernel: CudaKernel, then: Callable[[], None]) -> Callable[[], None]:
    def rehearse() -> None:
        for size in (2, 3, 4):
            kernel.launch((1,), 32, (("SIZE", size),), [torch.zeros(1)], torch.device("cuda", 0), pdl=False)
        then()

    return rehearse


@pytest.mark.slow
def test_interrupted_start_ends_the_workers_and_compiles_no_more(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvrtc, "capability", lambda device: 90)
    for pid in started.pids[1:]:
        os.kill(pid, signal.SIGSTOP)  # as if each compiled for a minute

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile_ahead(rehearsal_of(started.kernel, interrupt), lambda: None, started.workers)
    assert [start_ticks(pid) for pid in started.pids] == [None] * 3
    assert not any(Binary(started.kernel, (("SIZE", size),), 90).is_compiled() for size in (2, 3, 4))
    assert started.reasons == []


def test_engine_compiles_where_no_process_can_be_forked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(nvrtc, "capability", lambda device: 90)

    def refuse() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    reasons: list[str] = []
    workers, kernel = CompileWorkers(2, report=reasons.append), store_kernel(tmp_path)
    assert compile_ahead(rehearsal_of(kernel, lambda: None), lambda: None, workers) == 3
    assert all(Binary(kernel, (("SIZE", size),), 90).is_compiled() for size in (2, 3, 4))
    assert reasons == ["no process that compiles kernels can be started: Resource temporarily unavailable"]
    workers.close()


def test_processes_that_compile_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for cores in (1, 2, 4, 16, 64):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        counts.append((worker_count(1), worker_count(8)))
    assert counts == [(1, 1), (1, 1), (3, 3), (15, 4), (16, 7)]


@pytest.mark.parametrize(("node_ranks", "expected"), [(0, 7), (2, 7), (6, 4)])
@pytest.mark.parametrize("debug", [(), ("reference-kernels",)])
def test_ranks_and_engines_on_gpus_share_the_cores(
    debug: tuple[DebugSwitch, ...], node_ranks: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(warm_up, "CompileWorkers", lambda count: count)
    config = EngineConfig(model="m", tensor_parallel_size=2, debug=debug, node_ranks=node_ranks)
    made = make_compiler(config, torch.device("cuda:1"), rank=1)
    if "reference-kernels" in debug:
        assert made is None
    else:
        assert made is not None
        assert (made.order, made.workers) == (CompileOrder(1, 2), expected)
    assert make_compiler(config, torch.device("cpu")) is None
