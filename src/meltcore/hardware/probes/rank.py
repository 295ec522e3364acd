"""One rank of a collective: a process on one GPU that answers questions until its standard input ends."""

import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

from meltcore.hardware.measures import Answer, Question, encode
from meltcore.hardware.probes.timing import MOST_LAUNCHES, rates

# Up to here launching takes about as long as the collective itself, so a graph holds many.
_GRAPHED_BYTES = 16 * 2**20
_MOST_IN_A_GRAPH = 50
# NCCL records an event after every collective in a graph, for programs that run several graphs at once or launch past
# one. Where nothing but collectives is in the graph, each waits for that: 4 KiB took 17.5 us, without 5.0 (two H200s).
# Here one graph runs at a time, and is waited for before anything else is launched, as NCCL then wants it.
_ENVIRONMENT = {"NCCL_GRAPH_MIXING_SUPPORT": "0"}
_ITEM = 4  # float32, as nccl-tests counts


def main(rank: int, devices: list[int], store: str) -> None:
    import msgspec

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
    decode = msgspec.json.Decoder(Question).decode
    for line in sys.stdin.buffer:
        question = decode(line)
        answer = _answer(question, rank, devices[rank], world)
        if rank == 0:
            sys.stdout.buffer.write(encode(answer) + b"\n")
            sys.stdout.buffer.flush()
    dist.destroy_process_group()


def _answer(question: Question, rank: int, device: int, world: int) -> Answer:
    ask = question.settings
    op, size = str(ask["op"]), int(ask["bytes"])
    count = max(world, size // _ITEM // world * world)
    launch, wrong = _collective(op, count, rank, device, world)
    factor = 2 * (world - 1) / world if op == "all_reduce" else (world - 1) / world
    graphed = size <= _GRAPHED_BYTES
    samples = rates(
        (device,),
        lambda _: launch(),
        factor * count * _ITEM / 1e9,
        float(ask["seconds"]),
        graph=graphed,
        agree=lambda seconds: _slowest(seconds, device),
        most=_MOST_IN_A_GRAPH if graphed else MOST_LAUNCHES,
    )[0]
    return Answer(key=question.key, gpus=question.gpus, samples=samples, marks={"wrong": wrong})


def _collective(op: str, count: int, rank: int, device: int, world: int) -> tuple[Callable[[], None], int]:
    """(enqueue it once, elements that came out wrong on any rank). Each rank gives its number plus one.

    `count` elements are the larger buffer. Timed on zeros, since an in-place sum would soon overflow.
    """
    place = f"cuda:{device}"
    part = count // world
    if op == "all_reduce":
        whole = torch.full((count,), float(rank + 1), device=place)
        dist.all_reduce(whole)
        wrong = (whole != world * (world + 1) / 2).sum()
        whole.zero_()

        def launch() -> None:
            dist.all_reduce(whole)

    elif op == "all_gather":
        mine = torch.full((part,), float(rank + 1), device=place)
        whole = torch.zeros(count, device=place)
        dist.all_gather_into_tensor(whole, mine)
        expected = torch.arange(1, world + 1, device=place, dtype=torch.float32)
        wrong = (whole.view(world, part) != expected[:, None]).sum()

        def launch() -> None:
            dist.all_gather_into_tensor(whole, mine)

    else:
        whole = torch.full((count,), float(rank + 1), device=place)
        mine = torch.zeros(part, device=place)
        dist.reduce_scatter_tensor(mine, whole)
        wrong = (mine != world * (world + 1) / 2).sum()

        def launch() -> None:
            dist.reduce_scatter_tensor(mine, whole)

    dist.all_reduce(wrong)
    return launch, int(wrong)


def _slowest(seconds: float, device: int) -> float:
    value = torch.tensor(seconds, device=f"cuda:{device}", dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)


if __name__ == "__main__":
    main(int(sys.argv[1]), [int(device) for device in sys.argv[2].split(",")], sys.argv[3])
