"""Takes a snapshot: one look at every GPU the job may use, its links, and how they are connected."""

from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from pynvml import NVMLError

from meltcore.hardware.facts import FACTS, ask, path_between
from meltcore.hardware.node import Node
from meltcore.hardware.nvml import Nvml
from meltcore.hardware.patient import at_once
from meltcore.hardware.select import Gpu
from meltcore.results.fingerprint import take_fingerprint
from meltcore.results.snapshot import UNKNOWN, Fact, GpuState, LinkState, Snapshot

# Of the pip packages that torch brings; a torch built against the system's NCCL has none.
_LIBRARIES = ("torch", "nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-cublas", "nvidia-cuda-runtime", "nvidia-ml-py")


def take_snapshot(node: Node, gpus: Sequence[Gpu]) -> Snapshot:
    """`gpus` as of select_gpus. A driver that answers nothing leaves UNKNOWN in every place, never an empty one."""
    nvml = node.nvml
    states = at_once(lambda gpu: _gpu_state(node, gpu), gpus)
    return Snapshot(
        fingerprint=take_fingerprint(),
        driver=_or_unknown(nvml.driver),
        cuda_driver=_or_unknown(nvml.cuda_driver),
        libraries=_libraries(),
        gpus=states,
        topology=[[_path(nvml, gpus, states, i, j) for j in range(len(gpus))] for i in range(len(gpus))],
    )


def _or_unknown(question: object) -> str:
    assert callable(question)
    try:
        return str(question())
    except NVMLError:
        return UNKNOWN


def _gpu_state(node: Node, gpu: Gpu) -> GpuState:
    facts: dict[str, Fact] = {fact.key: ask(node.nvml, gpu, fact) for fact in FACTS}
    facts["numa_node"] = _numa_node(node, facts["bus_id"])
    return GpuState(
        index=gpu.info.index,
        name=gpu.info.name,
        uuid=gpu.info.uuid,
        mig=gpu.info.mig,
        facts=facts,
        links=_links(node.nvml, gpu, facts["nvlinks"]),
    )


def _numa_node(node: Node, bus_id: Fact) -> Fact:
    """The kernel writes -1 where the firmware does not tell."""
    text = node.read(Path(f"/sys/bus/pci/devices/{bus_id}/numa_node"))
    return UNKNOWN if text is None or text.strip() == "-1" else int(text)


def _links(nvml: Nvml, gpu: Gpu, count: Fact) -> list[LinkState]:
    return [_link(nvml, gpu, link) for link in range(count)] if isinstance(count, int) else []


def _link(nvml: Nvml, gpu: Gpu, link: int) -> LinkState:
    try:
        if not nvml.nvlink_up(gpu.board, link):
            return LinkState(link=link, state="down")
    except NVMLError:
        return LinkState(link=link, state=UNKNOWN)
    # No expectation is made from what cannot be read of a link that is up.
    try:
        speed_gbps = nvml.nvlink_speed_mbps(gpu.board, link) / 1e3
    except NVMLError:
        speed_gbps = None
    try:
        peer = nvml.nvlink_peer(gpu.board, link)
    except NVMLError:
        peer = UNKNOWN
    return LinkState(link=link, state="up", speed_gbps=speed_gbps, peer=peer)


def links_between(states: Sequence[GpuState], first: int, second: int) -> list[LinkState]:
    """Links of `first` that reach `second` (positions): all that end in a switch, or those that end in that GPU."""
    bus_id = states[second].facts.get("bus_id")
    return [link for link in states[first].links_up() if link.peer in ("switch", bus_id)]


def _path(nvml: Nvml, gpus: Sequence[Gpu], states: Sequence[GpuState], first: int, second: int) -> str:
    if first == second:
        return "X"
    links = links_between(states, first, second)
    return f"NV{len(links)}" if links else path_between(nvml, gpus[first], gpus[second])


def _libraries() -> dict[str, str]:
    found = {}
    for package in _LIBRARIES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
