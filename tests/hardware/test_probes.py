"""The probes' own logic, without a GPU: every tensor is on the CPU, and events read the host's clock."""

import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda.bindings import runtime
from torch.overrides import TorchFunctionMode

from meltcore.hardware.measures import Job, Question, encode, read_answers
from meltcore.hardware.probes import corruption, host, matrices, memory, peers, product, rank, sustained, timing


class _OnTheCpu(TorchFunctionMode):
    """Takes "cuda:0" out of every call, and pinned memory, which only CUDA has."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {key: value for key, value in (kwargs or {}).items() if key not in ("device", "pin_memory")}
        return func(*args, **kwargs)


class _Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.at_s = 0.0

    def record(self) -> None:
        self.at_s = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: "_Event") -> float:
        return 1e3 * (later.at_s - self.at_s)


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda first, second: True)
    monkeypatch.setattr(timing, "_captured", timing._loop)
    monkeypatch.setattr(timing, "WARM_S", 0.01)
    monkeypatch.setattr(torch, "Generator", lambda device: torch._C.Generator())
    with _OnTheCpu():
        yield


def test_each_gpu_captures_in_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda.graph's own stream stays on the GPU that captured first: on the others it would record nothing."""
    current = [0]

    @contextmanager
    def device(number: int) -> Iterator[None]:
        before, current[0] = current[0], number
        yield
        current[0] = before

    @contextmanager
    def graph(made: object, *, stream: int, **_: object) -> Iterator[None]:
        with device(stream):
            yield

    launched: list[tuple[int, int]] = []
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for gpu in (0, 1):
        timing._captured(gpu, lambda number: launched.append((number, current[0])), 2)
    assert launched == [(0, 0), (0, 0), (1, 1), (1, 1)]


def test_a_slow_gpu_does_not_lend_its_pace_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two streams on a clock of their own: the host waits for both before it launches more, and the fast one idles."""
    host_s, done_s, current = [0.0], {0: 0.0, 1: 0.0}, [0]
    takes_s = {0: 1.0, 1: 3.0}

    @contextmanager
    def device(number: int) -> Iterator[None]:
        current[0] = number
        yield

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at_s = 0.0

        def record(self) -> None:
            self.at_s = max(host_s[0], done_s[current[0]])

        def synchronize(self) -> None:
            host_s[0] = max(host_s[0], self.at_s)

        def elapsed_time(self, later: "Event") -> float:
            return 1e3 * (later.at_s - self.at_s)

    def group(number: int) -> None:
        done_s[number] = max(host_s[0], done_s[number]) + takes_s[number]

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda number: None)
    groups = {number: partial(group, number) for number in (0, 1)}
    assert timing._timed((0, 1), groups, 5) == {0: [1.0] * 5, 1: [3.0] * 5}
    assert done_s[1] == 15.0, "and the slow one never waits"


def question(key: str, gpus: tuple[int, ...] = (0,), **settings: Any) -> Question:
    return Question(key=key, gpus=gpus, each=len(gpus) > 1, settings={"seconds": 0.05, **settings})


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "tf32", "fp8"])
def test_product_answers_for_every_gpu(on_the_cpu: None, dtype: str) -> None:
    answers = list(product.measure(question("p", (0, 1), dtype=dtype, m=64, n=32, k=64)))
    assert [answer.gpus for answer in answers] == [(0,), (1,)]
    assert all(len(answer.samples) >= 4 and all(sample > 0 for sample in answer.samples) for answer in answers)


def test_a_product_rotates_its_buffers_and_is_right(on_the_cpu: None) -> None:
    once = matrices.products("tf32", 8, 4, 16, 0)
    first, second = once().clone(), once().clone()
    assert not torch.equal(first, second), "the second comes from other buffers"
    left, right = matrices.random_matrix(8, 16, "tf32", 0, 0), matrices.random_matrix(4, 16, "tf32", 0, 1000)
    torch.testing.assert_close(first, left @ right.t())


@pytest.mark.parametrize(("kind", "counted"), [("copy", 2), ("read", 1), ("write", 1)])
def test_memory_counts_every_byte_read_and_written(
    on_the_cpu: None, monkeypatch: pytest.MonkeyPatch, kind: str, counted: int
) -> None:
    works = []

    def rates(devices: Any, launch: Any, work: float, seconds: float) -> list[list[float]]:
        launch(0)
        works.append(work)
        return [[work]]

    monkeypatch.setattr(memory, "rates", rates)
    list(memory.measure(question("m", kind=kind, bytes=4096)))
    assert works == [pytest.approx(counted * 4096 / 1e9)]


@pytest.mark.parametrize("way", ["to-device", "to-host"])
def test_host_copies_answer(on_the_cpu: None, way: str) -> None:
    (answer,) = host.measure(question("h", way=way, bytes=1 << 16, cpus=""))
    assert min(answer.samples) > 0


def test_host_copies_run_on_the_gpus_own_socket(on_the_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    moves: list[set[int]] = []
    monkeypatch.setattr(host, "_MAY_USE", set(range(64)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cpus: moves.append(cpus))
    for cpus in ("0-3,8", "62-127", "96-127", ""):
        list(host.measure(question("h", way="to-host", bytes=1 << 16, cpus=cpus)))
    assert moves == [{0, 1, 2, 3, 8}, {62, 63}, set(range(64)), set(range(64))], "what the job may use, at any rate"


class _Stream:
    """One of a number of its own; the current one's is `current`."""

    current = 0
    made = 0

    def __init__(self, device: int = 0) -> None:
        _Stream.made += 1
        self.number = _Stream.made
        self.cuda_stream = _Stream.current

    def synchronize(self) -> None:
        pass

    def __enter__(self) -> None:
        _Stream.current = self.number

    def __exit__(self, *_: object) -> None:
        _Stream.current = 0


class _Runtime:
    """Moves the bytes, and notes from which GPU to which in which stream."""

    cudaError_t = runtime.cudaError_t

    def __init__(self) -> None:
        self.copies: list[tuple[int, int, int]] = []
        self.status = runtime.cudaError_t.cudaSuccess

    def cudaMemcpyPeerAsync(
        self, target: int, to: int, source: int, gpu: int, count: int, stream: int
    ) -> tuple[runtime.cudaError_t]:
        ctypes.memmove(target, source, count)
        self.copies.append((gpu, to, stream))
        return (self.status,)


@pytest.fixture
def peer_runtime(on_the_cpu: None, monkeypatch: pytest.MonkeyPatch) -> _Runtime:
    fake = _Runtime()
    monkeypatch.setattr(peers, "runtime", fake)
    monkeypatch.setattr(torch.cuda, "current_stream", _Stream)
    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    return fake


def ask_peers(ways: int) -> Question:
    return Question(key="p", gpus=(0, 1), settings={"ways": ways, "bytes": 1 << 22, "seconds": 0.05})


def test_peer_copies_go_one_way(peer_runtime: _Runtime) -> None:
    (answer,) = peers.measure(ask_peers(1))
    assert answer.gpus == (0, 1)
    assert min(answer.samples) > 0
    assert set(peer_runtime.copies) == {(0, 1, 0)}


def test_peer_copies_go_both_ways_in_streams_of_their_own(peer_runtime: _Runtime) -> None:
    (answer,) = peers.measure(ask_peers(2))
    assert len(answer.samples) == 6
    there, back = sorted(set(peer_runtime.copies))
    assert (there[:2], back[:2]) == ((0, 1), (1, 0))
    assert len({there[2], back[2], 0}) == 3


def test_a_peer_copy_that_fails_is_an_error(peer_runtime: _Runtime) -> None:
    peer_runtime.status = runtime.cudaError_t.cudaErrorPeerAccessUnsupported
    with pytest.raises(RuntimeError, match="from GPU 0 to GPU 1 gave cudaErrorPeerAccessUnsupported"):
        list(peers.measure(ask_peers(1)))


def test_sustained_gives_a_sample_a_period(on_the_cpu: None) -> None:
    settings = {"dtype": "bf16", "m": 32, "n": 32, "k": 32, "seconds": 0.2, "every_s": 0.02}
    (answer,) = sustained.measure(Question(key="s", gpus=(0,), each=True, settings=settings))
    assert len(answer.samples) >= 4


def test_days_of_samples_become_as_many_as_were_asked_for() -> None:
    assert sustained.thinned([700.0, 690.0], 600) == [700.0, 690.0]
    thinned = sustained.thinned([600.0, 300.0] * 1000, 300)
    assert len(thinned) == 286, "seven together"
    assert thinned[0] == pytest.approx(7 / (4 / 600 + 3 / 300)), "work over time, not the mean of rates"


def test_corruption_finds_a_bit_that_changed(on_the_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = Question(key="c", gpus=(0, 1), each=True, settings={"dtype": "bf16", "size": 32, "seconds": 0.05})
    first, second = corruption.measure(ask)
    assert (first.marks["wrong"], second.marks["wrong"]) == (0, 0)
    assert first.marks["digest"] == second.marks["digest"]
    job = corruption._Repeated("bf16", 32, 0)
    job.once()
    assert job.wrong() == 0
    job._left[0, 0] += 1
    job.once()
    assert job.wrong() == 1


def test_a_probe_without_a_gpu_answers_every_question_with_its_error() -> None:
    asked = [
        question("memory/copy", (0,), kind="copy", bytes=1 << 20),
        question("memory/read", (0,), kind="read", bytes=1 << 20),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "meltcore.hardware.probes", "memory"],
        input=encode(Job(questions=asked)),
        capture_output=True,
        timeout=120,
        env={"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    answers = read_answers(done.stdout)
    assert [answer.key for answer in answers] == ["memory/copy", "memory/read"]
    assert all(answer.error and not answer.samples for answer in answers)


def test_what_libraries_print_between_answers_is_no_answer() -> None:
    lines = b'NCCL version 2.29\n{"key":"a","gpus":[0],"samples":[1.0]}\n{"key":"b","gpus":[0],"sam'
    assert [answer.key for answer in read_answers(lines)] == ["a"]
    assert json.loads(lines.splitlines()[1])


def test_a_rank_tells_nccl_to_leave_out_events_between_collectives_before_it_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "NCCL_GRAPH_MIXING_SUPPORT"
    monkeypatch.setenv(name, "1")
    seen: list[str | None] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(rank.dist, "FileStore", lambda *place: None)
    monkeypatch.setattr(rank.dist, "init_process_group", lambda *backend, **settings: seen.append(os.environ.get(name)))
    monkeypatch.setattr(rank.dist, "destroy_process_group", lambda: seen.append("left"))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=[]))
    rank.main(0, [0, 1], "nowhere")
    assert seen == ["0", "left"]
