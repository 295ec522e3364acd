"""Rates by CUDA events: groups of launches, each group one sample, on several devices at once."""

from collections.abc import Callable, Sequence

import torch

GROUP_S = 0.05
WARM_S = 0.3  # clocks rise and settle; the first collectives and copies set things up
MOST_LAUNCHES = 1000

Launch = Callable[[int], None]


def rates(
    devices: Sequence[int],
    launch: Launch,
    work: float,
    seconds: float,
    group_s: float = GROUP_S,
    graph: bool = False,
    warm_s: float | None = None,
    agree: Callable[[float], float] | None = None,
    most: int = MOST_LAUNCHES,
) -> list[list[float]]:
    """Work a second of each device: a sample for every `group_s`, over `seconds`.

    `launch(device)` enqueues `work` once on the device's current stream. `graph`: a group is captured once and
    replayed, so that launching cannot be what is measured; `launch` must then allocate nothing. `agree`: turns the time
    of one launch into what all ranks of a collective take it for, since all must launch equally often. `most`: launches
    in a group.
    """
    launch_s = max(_seconds_of_one(device, launch) for device in devices)
    if agree is not None:
        launch_s = agree(launch_s)
    count = max(1, min(most, round(group_s / launch_s)))
    groups = {device: _captured(device, launch, count) if graph else _loop(device, launch, count) for device in devices}
    _timed(devices, groups, max(1, round((WARM_S if warm_s is None else warm_s) / (count * launch_s))))
    times = _timed(devices, groups, max(4, round(seconds / (count * launch_s))))
    return [[count * work / time_s for time_s in times[device]] for device in devices]


def _seconds_of_one(device: int, launch: Launch) -> float:
    with torch.cuda.device(device):
        for _ in range(3):
            launch(device)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(5):
            launch(device)
        end.record()
        end.synchronize()
        return max(1e-6, begin.elapsed_time(end) / 5e3)


def _loop(device: int, launch: Launch, count: int) -> Callable[[], None]:
    def group() -> None:
        for _ in range(count):
            launch(device)

    return group


def _captured(device: int, launch: Launch, count: int) -> Callable[[], None]:
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # In a stream of this GPU: torch's own is of the one that captured first, and would record nothing of another.
        # The threads of NCCL's process group go on asking about events while this one captures.
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
            for _ in range(count):
                launch(device)
        return graph.replay


def _timed(devices: Sequence[int], groups: dict[int, Callable[[], None]], count: int) -> dict[int, list[float]]:
    """Seconds of each of `count` groups on each device, from its start to its end there: what a device waits for the
    others, which are launched side by side, does not count. No more than two groups are under way, so a stop is quick.
    """
    marks: dict[int, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {device: [] for device in devices}
    for place in range(count):
        for device in devices:
            with torch.cuda.device(device):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                groups[device]()
                end.record()
                marks[device].append((begin, end))
        if place >= 1:
            for device in devices:
                marks[device][place - 1][1].synchronize()
    for device in devices:
        torch.cuda.synchronize(device)
    return {device: [begin.elapsed_time(end) / 1e3 for begin, end in found] for device, found in marks.items()}
