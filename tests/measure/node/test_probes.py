"""Logic of the probes without a GPU: every tensor is on the CPU, and events read the host's clock."""

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

import cuda.bindings
import pytest
import torch
import torch.distributed as dist
from cuda.bindings import runtime
from torch.overrides import TorchFunctionMode
from waiting import WAIT_S

from meltcore.common.process import call_with_timeout
from meltcore.measure.node.certify import gpu_timing
from meltcore.measure.node.certify.checks import (
    collectives,
    corruption,
    gemm,
    host,
    host_load,
    memory,
    patterns,
    peers,
    pulse,
    sustained,
)
from meltcore.measure.node.certify.checks.collectives import RankGroup
from meltcore.measure.node.certify.probe import ProbeJob, ProbeRequest, encode, read_results


class _OnTheCpu(TorchFunctionMode):
    """Removes the device and pinned memory from every call."""

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
    monkeypatch.setattr(gpu_timing, "_capture_graph", gpu_timing._launch_loop)
    monkeypatch.setattr(gpu_timing, "WARMUP_S", 0.01)
    monkeypatch.setattr(torch, "Generator", lambda device: torch._C.Generator())
    with _OnTheCpu():
        yield


def test_each_gpu_captures_in_its_own_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default stream of torch.cuda.graph stays on the GPU that captured first; captures of others are empty."""
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
        gpu_timing._capture_graph(gpu, lambda number: launched.append((number, current[0])), 2)
    assert launched == [(0, 0), (0, 0), (1, 1), (1, 1)]


def test_slow_gpu_does_not_affect_rate_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two streams on a scripted clock: the host waits for both before it launches more, and the fast one idles."""
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
    assert gpu_timing._time_groups((0, 1), groups, 5) == {0: [1.0] * 5, 1: [3.0] * 5}
    assert done_s[1] == 15.0, "the slow one never waits"


def request_of(key: str, gpus: tuple[int, ...] = (0,), **settings: Any) -> ProbeRequest:
    return ProbeRequest(key=key, gpus=gpus, per_gpu=len(gpus) > 1, settings={"seconds": 0.05, **settings})


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "tf32", "fp8"])
def test_gemm_probe_gives_result_for_every_gpu(on_the_cpu: None, dtype: str) -> None:
    results = list(gemm.probe(request_of("p", (0, 1), dtype=dtype, m=64, n=32, k=64)))
    assert [result.gpus for result in results] == [(0,), (1,)]
    assert all(len(result.samples) >= 4 and all(sample > 0 for sample in result.samples) for result in results)


def test_gemm_rotates_its_buffers_and_is_correct(on_the_cpu: None) -> None:
    once = gpu_timing.gemm_launcher("tf32", 8, 4, 16, 0)
    first, second = once().clone(), once().clone()
    assert not torch.equal(first, second), "the second reads other buffers"
    left, right = gpu_timing.random_matrix(8, 16, "tf32", 0, 0), gpu_timing.random_matrix(4, 16, "tf32", 0, 1000)
    torch.testing.assert_close(first, left @ right.t())


@pytest.mark.parametrize(("operation", "counted"), [("copy", 2), ("read", 1), ("write", 1)])
def test_memory_counts_every_byte_read_and_written(
    on_the_cpu: None, monkeypatch: pytest.MonkeyPatch, operation: str, counted: int
) -> None:
    works = []

    def rates(devices: Any, launch: Any, work: float, seconds: float) -> list[list[float]]:
        launch(0)
        works.append(work)
        return [[work]]

    monkeypatch.setattr(gpu_timing, "measure_rates", rates)
    list(memory.probe(request_of("m", op=operation, bytes=4096)))
    assert works == [pytest.approx(counted * 4096 / 1e9)]


@pytest.mark.parametrize("direction", ["host-to-device", "device-to-host"])
def test_host_copies_give_samples(on_the_cpu: None, direction: str) -> None:
    (result,) = host.probe(request_of("h", direction=direction, bytes=1 << 16, cpus=""))
    assert min(result.samples) > 0


@pytest.mark.slow
def test_host_copies_run_on_gpu_socket(on_the_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    moves: list[set[int]] = []
    monkeypatch.setattr(host, "_ALLOWED_CPUS", set(range(64)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cpus: moves.append(cpus))
    for cpus in ("0-3,8", "62-127", "96-127", ""):
        list(host.probe(request_of("h", direction="device-to-host", bytes=1 << 16, cpus=cpus)))
    assert moves == [{0, 1, 2, 3, 8}, {62, 63}, set(range(64)), set(range(64))], (
        "CPUs that the job may use, in every case"
    )


class _Stream:
    """A numbered stream; `current` is the number of the current one."""

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
    """Copies the bytes and records (from GPU, to GPU, stream)."""

    cudaError_t = runtime.cudaError_t  # noqa: N815 - as in the CUDA runtime

    def __init__(self) -> None:
        self.copies: list[tuple[int, int, int]] = []
        self.status = runtime.cudaError_t.cudaSuccess

    def cudaMemcpyPeerAsync(  # noqa: N802 - as in the CUDA runtime
        self, target: int, to: int, source: int, gpu: int, count: int, stream: int
    ) -> tuple[runtime.cudaError_t]:
        ctypes.memmove(target, source, count)
        self.copies.append((gpu, to, stream))
        return (self.status,)


@pytest.fixture
def peer_runtime(on_the_cpu: None, monkeypatch: pytest.MonkeyPatch) -> _Runtime:
    fake = _Runtime()
    monkeypatch.setattr(cuda.bindings, "runtime", fake)
    monkeypatch.setattr(torch.cuda, "current_stream", _Stream)
    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    return fake


def peers_request(directions: int) -> ProbeRequest:
    return ProbeRequest(key="p", gpus=(0, 1), settings={"directions": directions, "bytes": 1 << 22, "seconds": 0.05})


def test_unidirectional_peer_copies(peer_runtime: _Runtime) -> None:
    (result,) = peers.probe(peers_request(1))
    assert result.gpus == (0, 1)
    assert min(result.samples) > 0
    assert set(peer_runtime.copies) == {(0, 1, 0)}


def test_bidirectional_peer_copies_have_a_stream_per_direction(peer_runtime: _Runtime) -> None:
    (result,) = peers.probe(peers_request(2))
    assert len(result.samples) == 6
    there, back = sorted(set(peer_runtime.copies))
    assert (there[:2], back[:2]) == ((0, 1), (1, 0))
    assert len({there[2], back[2], 0}) == 3


def test_failing_peer_copy_is_an_error(peer_runtime: _Runtime) -> None:
    peer_runtime.status = runtime.cudaError_t.cudaErrorPeerAccessUnsupported
    with pytest.raises(RuntimeError, match="from GPU 0 to GPU 1 gave cudaErrorPeerAccessUnsupported"):
        list(peers.probe(peers_request(1)))


def test_sustained_gives_one_sample_per_period(on_the_cpu: None) -> None:
    settings = {"dtype": "bf16", "m": 32, "n": 32, "k": 32, "seconds": 0.2, "every_s": 0.02}
    (result,) = sustained.probe(ProbeRequest(key="s", gpus=(0,), per_gpu=True, settings=settings))
    assert len(result.samples) >= 4


def test_days_of_samples_are_thinned_out() -> None:
    assert sustained.downsample([700.0, 690.0], 600) == [700.0, 690.0]
    thinned = sustained.downsample([600.0, 300.0] * 1000, 300)
    assert len(thinned) == 286, "seven samples each"
    assert thinned[0] == pytest.approx(7 / (4 / 600 + 3 / 300)), "work over time, not the mean of rates"


def test_corruption_finds_a_changed_bit(on_the_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    both = ProbeRequest(key="c", gpus=(0, 1), per_gpu=True, settings={"dtype": "bf16", "size": 32, "seconds": 0.05})
    first, second = corruption.probe(both)
    assert (first.details["wrong"], second.details["wrong"]) == (0, 0)
    assert first.details["digest"] == second.details["digest"]
    gemm = corruption.RepeatedGemm("bf16", 32, 0)
    gemm.enqueue()
    assert gemm.num_wrong() == 0
    gemm.left[0, 0] += 1
    gemm.enqueue()
    assert gemm.num_wrong() == 1


def test_pulsed_gemms_pause_and_compare_all_bits(on_the_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    now_s = iter(range(1000))
    monkeypatch.setattr(pulse, "time", SimpleNamespace(monotonic=lambda: next(now_s), sleep=pauses.append))
    settings = {"dtype": "bf16", "size": 32, "seconds": 5, "burst_s": 0.6, "pause_s": 0.25}
    first, second = pulse.probe(ProbeRequest(key="c", gpus=(0, 1), per_gpu=True, settings=settings))
    assert set(pauses) == {0.25}
    assert first.details == second.details
    assert (first.details["wrong"], first.details["compared"]) == (0, 10 + 3 * len(pauses)), "0.2 s a GEMM"


def test_patterns_cover_memory_and_find_a_stuck_bit(on_the_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * 4096, 12 * 4096), raising=False)
    request = ProbeRequest(
        key="p", gpus=(0, 1), per_gpu=True, settings={"share": 0.5, "chunk_bytes": 4096, "seconds": 0.0}
    )
    for result in patterns.probe(request):
        assert (result.details["wrong"], result.details["bytes"], result.details["passes"]) == (0, 4 * 4096, 1)
    memory = patterns.TestedMemory(0, 0.5, 4096)
    assert len(memory.chunks) == 4
    found = []
    for fill in patterns._patterns():
        before = memory.num_wrong()
        memory.write(fill, 0)
        memory.chunks[3][77] |= 1 << 5
        memory.verify(fill, 0)
        found.append(memory.num_wrong() - before)
    assert len(found) == 2 * 64 + 2
    assert sum(found[:128]) == 64, "each word of walking bits that has a zero there"
    distinct = {tuple(_filled(fill)) for fill in patterns._patterns()}
    assert len(distinct) == 130


def _filled(fill: Any) -> list[int]:
    chunk = torch.empty(4, dtype=torch.int64)
    fill(chunk, 2, 1)
    return chunk.tolist()


class _CopyStream(_Stream):
    def wait_stream(self, other: object) -> None:
        pass


def test_host_copies_of_all_gpus_together_count_both_directions(
    on_the_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", _CopyStream)
    monkeypatch.setattr(torch.cuda, "Stream", _CopyStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cpus: None)
    request = request_of("h", (0, 1), bytes=1 << 16, **{"cpus/0": "0-1", "cpus/1": ""})
    results = list(host_load.probe(request))
    assert [result.gpus for result in results] == [(0,), (1,)]
    assert all(min(result.samples) > 0 for result in results)


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_wrong_elements_of_a_collective_are_counted(op: str, on_the_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 of 2, whose peer is scripted; `bad` changes what one element receives."""
    bad = [0.0]

    def receive(target: torch.Tensor, values: torch.Tensor) -> None:
        target.copy_(values)
        target[0] += bad[0]

    def all_reduce(tensor: torch.Tensor, op: object = None) -> None:
        if tensor.dtype == torch.float32:
            receive(tensor, torch.full_like(tensor, 3.0))

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(
        dist, "all_gather_into_tensor", lambda out, shard: receive(out, torch.tensor([1.0, 1.0, 2.0, 2.0]))
    )
    monkeypatch.setattr(dist, "reduce_scatter_tensor", lambda out, whole: receive(out, torch.full_like(out, 3.0)))

    def all_to_all(out: torch.Tensor, sent: torch.Tensor) -> None:
        assert sent.tolist() == [3.0, 3.0, 4.0, 4.0], "what rank 1 sends to ranks 0 and 1"
        receive(out, torch.tensor([2.0, 2.0, 4.0, 4.0]))

    monkeypatch.setattr(dist, "all_to_all_single", all_to_all)
    assert collectives._collective(op, 4, 1, 0, 2)[1] == 0
    bad[0] = 1.0
    assert collectives._collective(op, 4, 1, 0, 2)[1] == 1


@pytest.mark.slow
def test_probe_without_gpu_returns_an_error_per_request() -> None:
    requests = [
        request_of("memory/copy", (0,), op="copy", bytes=1 << 20),
        request_of("memory/read", (0,), op="read", bytes=1 << 20),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "meltcore.measure.node.certify.probe", "memory"],
        input=encode(ProbeJob(requests=requests)),
        capture_output=True,
        timeout=WAIT_S,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    results = read_results(done.stdout)
    assert [result.key for result in results] == ["memory/copy", "memory/read"]
    assert all(result.error and not result.samples for result in results)


def test_library_output_between_results_is_ignored() -> None:
    lines = b'NCCL version 2.29\n{"key":"a","gpus":[0],"samples":[1.0]}\n{"key":"b","gpus":[0],"sam'
    assert [result.key for result in read_results(lines)] == ["a"]
    assert json.loads(lines.splitlines()[1])


_DIES = "import sys; print('ValueError: no memory', file=sys.stderr); sys.exit(1)"
_WAITS = "import sys; sys.stdin.read()"
_ANSWERS = f"""print('noise\\n{{"key": "a", "gpus": [0, 1], "samples": [1.0]}}', flush=True); {_WAITS}"""


@pytest.mark.parametrize(
    ("programs", "error"),
    [
        ((_WAITS, _DIES), "rank 1 ended without a result: ValueError: no memory"),
        ((_DIES, _WAITS), "rank 0 ended without a result: ValueError: no memory"),
        ((_ANSWERS, _WAITS), None),
    ],
)
def test_rank_that_ends_fails_its_request_immediately(
    programs: tuple[str, str], error: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dead rank other than 0 held up the probe to its limit, and the next request got the same group."""

    def start_rank(group: RankGroup, rank: int, *_: str) -> "subprocess.Popen[bytes]":
        with group._log_path(rank).open("wb") as log:
            command = [sys.executable, "-c", programs[rank]]
            return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, bufsize=0)

    monkeypatch.setattr(RankGroup, "_start_rank", start_rank)
    monkeypatch.setattr(collectives, "_EXIT_LIMIT_S", 0.1)
    request = ProbeRequest(key="a", gpus=(0, 1), settings={})
    try:
        if error is None:
            (result,) = collectives.probe(request)
            assert (result.key, result.samples) == ("a", [1.0])
            assert collectives._group is not None
        else:
            with pytest.raises(RuntimeError, match=error):
                call_with_timeout(WAIT_S, lambda: list(collectives.probe(request)))
            assert collectives._group is None
    finally:
        if collectives._group is not None:
            collectives._group.close()
            collectives._group = None


def test_rank_turns_off_nccl_graph_events_before_init(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "NCCL_GRAPH_MIXING_SUPPORT"
    monkeypatch.setenv(name, "1")
    seen: list[str | None] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "FileStore", lambda *arguments: None)
    monkeypatch.setattr(dist, "init_process_group", lambda *backend, **settings: seen.append(os.environ.get(name)))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: seen.append("destroyed"))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=[]))
    collectives.run_rank(0, [0, 1], "nowhere")
    assert seen == ["0", "destroyed"]
