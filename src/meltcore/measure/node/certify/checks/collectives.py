"""NCCL collectives: do the GPUs communicate as fast as the links allow, and are the results correct?

NVLink multicast (NVLS) is off in every group, so rings give the bandwidths. The probe starts one rank process per GPU,
as programs that use NCCL do: `python -m meltcore.measure.node.certify.checks.collectives`.
"""

import atexit
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from meltcore.common.process import ended_within, start, start_call
from meltcore.common.process_output import last_error, log_tail
from meltcore.common.sizes import GIB, KIB, MIB, size_text
from meltcore.measure.documents.node import Expectation
from meltcore.measure.node.certify import expectations
from meltcore.measure.node.certify.check import MeasuredCheck
from meltcore.measure.node.certify.checks.peers import link_gbps
from meltcore.measure.node.certify.context import CertifyContext
from meltcore.measure.node.certify.judge import Judgment
from meltcore.measure.node.certify.probe import ProbeRequest, ProbeResult, decode_request, decode_result, encode

_MIN_JUDGED_BYTES = GIB  # smaller ones are limited by latency, for which there is no expectation
_OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_ALL_SIZES = (*(4 * KIB * 4**step for step in range(9)), GIB, 4 * GIB)  # 4 KiB to 256 MiB, 1 GiB, 4 GiB
_SIZES = {"quick": (GIB,), "standard": (4 * KIB, MIB, 64 * MIB, 256 * MIB, GIB)}
_GROUP_S = 15.0  # starting the processes of a group and connecting them
_EXIT_LIMIT_S = 10.0
_POLL_S = 0.1

# Up to this size launching takes about as long as the collective, so a graph holds many of them.
_GRAPHED_BYTES = 16 * 2**20
_MAX_PER_GRAPH = 50
# By default NCCL records an event after every collective in a graph, for programs that run several graphs concurrently
# or launch beside one. In a graph of collectives alone each waits for that event: 4 KiB took 17.5 us, without it 5.0
# (two H200s). Here one graph runs at a time and is waited for, which is the condition for turning the events off.
_ENVIRONMENT = {"NCCL_GRAPH_MIXING_SUPPORT": "0"}
_ITEM_BYTES = 4  # float32, as in nccl-tests


class CollectivesCheck(MeasuredCheck):
    """Times collectives by operation, size and number of GPUs, and verifies their results."""

    name = "collectives"
    title = "NCCL collectives"
    unit = "GB/s bus"
    links = ("nvlink",)
    needs_peers = True
    seconds = (0.5, 0.2, 0.5)
    setup_s = 1.0
    is_recorded = True  # small messages and rings over PCIe have no expectation; a baseline judges them

    def requests(self, context: CertifyContext) -> list[ProbeRequest]:
        """Return one request per group size, operation and message size."""
        seconds = self.request_s(context)
        return [
            ProbeRequest(
                key=f"collectives/{operation}/{count}/{format_size(size)}",
                gpus=tuple(range(count)),
                settings={"op": operation, "bytes": size, "seconds": seconds},
            )
            for count in _group_sizes(context)
            for operation in (("all_reduce",) if context.tier == "quick" else _OPERATIONS)
            for size in _SIZES.get(context.tier, _ALL_SIZES)
        ]

    def probe_s(self, context: CertifyContext) -> float:
        """Return the expected number of seconds of the probe, including the start of each group."""
        return super().probe_s(context) + len(_group_sizes(context)) * _GROUP_S

    def topology(self, context: CertifyContext, request: ProbeRequest, gpus: Sequence[int]) -> Expectation | None:
        """Return the expectation of a ring from the number and speed of NVLinks, or None if a speed is unknown."""
        if int(request.settings["bytes"]) < _MIN_JUDGED_BYTES:
            return None
        speeds = [link_gbps(context, first, second) for first, second in pairwise(gpus)]
        known_speeds = [speed for speed in speeds if speed is not None]
        slowest_gbps = min(known_speeds) if len(known_speeds) == len(speeds) else None
        return expectations.collective_expectation(slowest_gbps, str(request.settings["op"]), len(gpus))

    def adjust(self, _context: CertifyContext, results: Sequence[ProbeResult], judgments: list[Judgment]) -> None:
        """Fail collectives with wrong elements."""
        num_wrong = {result.key: int(result.details.get("wrong", 0)) for result in results}
        for judgment in judgments:
            if num_wrong.get(judgment.row.key):
                judgment.set_verdict("FAIL", "WRONG_RESULT", f"{num_wrong[judgment.row.key]:,} elements are wrong")


def _group_sizes(context: CertifyContext) -> list[int]:
    """Return the group sizes: all GPUs, and from the standard tier on also two GPUs and four GPUs."""
    total = len(context.gpus)
    return [total] if context.tier == "quick" else sorted({count for count in (2, 4, total) if count <= total})


def format_size(size: int) -> str:
    """Format a number of bytes for keys, such as 64MiB."""
    return size_text(size).replace(" ", "")


class RankGroup:
    """Runs one rank process per GPU, which waits for requests.

    The processes end when their standard input is closed, or when the process group of the probe is killed.
    """

    def __init__(self, gpus: tuple[int, ...]) -> None:
        self.gpus = gpus
        self._folder = tempfile.TemporaryDirectory(prefix="meltcore-ranks-")
        store = str(Path(self._folder.name) / "store")
        devices = ",".join(map(str, gpus))
        self._ranks = [self._start_rank(rank, devices, store) for rank in range(len(gpus))]

    def _start_rank(self, rank: int, devices: str, store: str) -> "subprocess.Popen[bytes]":
        with self._log_path(rank).open("wb") as log:
            return start(
                [sys.executable, "-m", "meltcore.measure.node.certify.checks.collectives", str(rank), devices, store],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stderr=log,
                new_session=False,
            )

    def _log_path(self, rank: int) -> Path:
        return Path(self._folder.name) / f"rank-{rank}.log"

    def measure(self, request: ProbeRequest) -> ProbeResult:
        """Return the result of rank 0. Raises RuntimeError if a rank has ended, for which the others would wait."""
        with suppress(BrokenPipeError):  # of a rank that has ended
            for rank in self._ranks:
                assert rank.stdin is not None
                rank.stdin.write(encode(request) + b"\n")
        answer = start_call(self._read_result)
        while not wait([answer], _POLL_S).done:
            for number, rank in enumerate(self._ranks[1:], 1):
                if rank.poll() is not None:
                    raise self._end_error(number)
        if (result := answer.result()) is None:
            raise self._end_error(0)
        return result

    def _read_result(self) -> ProbeResult | None:
        stdout = self._ranks[0].stdout
        assert stdout is not None
        while line := stdout.readline():
            if line.startswith(b'{"key"'):
                return decode_result(line)
        return None

    def _end_error(self, rank: int) -> RuntimeError:
        reason = last_error(log_tail(self._log_path(rank))) or "no message"
        return RuntimeError(f"rank {rank} ended without a result: {reason}")

    def close(self) -> None:
        """Close the standard input of all ranks, and kill the ranks that do not exit. A second call does nothing."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        for rank in self._ranks:
            if not ended_within(rank, _EXIT_LIMIT_S):
                rank.kill()
        self._ranks = []
        self._folder.cleanup()


_group: RankGroup | None = None


def probe(request: ProbeRequest) -> Iterator[ProbeResult]:
    """Yield the bus bandwidth of all GPUs of the request in GB/s. Settings: op, bytes, seconds.

    The rank processes stay for further requests on the same GPUs, unless one of them has ended.
    """
    global _group
    if _group is None or _group.gpus != request.gpus:
        if _group is not None:
            _group.close()
        _group = RankGroup(request.gpus)
        atexit.register(_group.close)
    group = _group
    try:
        yield group.measure(request)
    except RuntimeError:
        _group = None
        group.close()
        raise


def run_rank(rank: int, devices: list[int], store: str) -> None:
    """Run one rank until its standard input ends."""
    import torch
    import torch.distributed

    dist: Any = torch.distributed  # FileStore is not exported explicitly
    os.environ.update(_ENVIRONMENT)
    torch.cuda.set_device(devices[rank])
    world = len(devices)
    dist.init_process_group(
        "nccl",
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        device_id=torch.device("cuda", devices[rank]),
    )
    for line in sys.stdin.buffer:
        result = _measure(decode_request(line), rank, devices[rank], world)
        if rank == 0:
            sys.stdout.buffer.write(encode(result) + b"\n")
            sys.stdout.buffer.flush()
    dist.destroy_process_group()


def _measure(request: ProbeRequest, rank: int, device: int, world: int) -> ProbeResult:
    import torch
    import torch.distributed as dist

    from meltcore.measure.node.certify.gpu_timing import MAX_LAUNCHES, measure_rates

    def slowest_rank_s(seconds: float) -> float:
        value = torch.tensor(seconds, device=f"cuda:{device}", dtype=torch.float64)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return float(value)

    op, size = str(request.settings["op"]), int(request.settings["bytes"])
    count = max(world, size // _ITEM_BYTES // world * world)
    launch, num_wrong = _collective(op, count, rank, device, world)
    factor = 2 * (world - 1) / world if op == "all_reduce" else (world - 1) / world
    is_graphed = size <= _GRAPHED_BYTES
    samples = measure_rates(
        (device,),
        lambda _device: launch(),
        factor * count * _ITEM_BYTES / 1e9,
        float(request.settings["seconds"]),
        uses_graph=is_graphed,
        agree=slowest_rank_s,
        max_launches=_MAX_PER_GRAPH if is_graphed else MAX_LAUNCHES,
    )[0]
    return ProbeResult(key=request.key, gpus=request.gpus, samples=samples, details={"wrong": num_wrong})


def _collective(op: str, count: int, rank: int, device: int, world: int) -> tuple[Callable[[], object], int]:
    """Return a function that enqueues the collective, and the number of wrong elements on all ranks.

    For the check of the elements, rank r contributes r + 1, and in an all-to-all also the receiver's rank. The larger
    buffer has `count` elements. An all-reduce is
    timed on zeros, since repeated in-place sums overflow.
    """
    import torch
    import torch.distributed as dist

    cuda, shard_count = f"cuda:{device}", count // world
    gathered, shard = (torch.full((size,), float(rank + 1), device=cuda) for size in (count, shard_count))
    ranks = torch.arange(1, world + 1, device=cuda, dtype=torch.float32)
    sent = gathered if op != "all_to_all" else (rank * world + ranks).repeat_interleave(shard_count)
    launches: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(gathered),
        "all_gather": lambda: dist.all_gather_into_tensor(gathered, shard),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(shard, gathered),
        "all_to_all": lambda: dist.all_to_all_single(gathered, sent),
    }
    launches[op]()
    if op in ("all_gather", "all_to_all"):
        expected = ranks if op == "all_gather" else (ranks - 1) * world + rank + 1
        num_wrong = (gathered.view(world, shard_count) != expected[:, None]).sum()
    else:
        num_wrong = ((gathered if op == "all_reduce" else shard) != world * (world + 1) / 2).sum()
    if op == "all_reduce":
        gathered.zero_()
    dist.all_reduce(num_wrong)
    return launches[op], int(num_wrong)


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), [int(device) for device in sys.argv[2].split(",")], sys.argv[3])
