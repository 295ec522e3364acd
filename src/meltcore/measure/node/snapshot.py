"""Takes snapshots of a node: one reading of every GPU, its links and its topology.

Formats snapshots as text, and compares two snapshots.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from pynvml import NVMLError

from meltcore.common.gpus.driver import Nvml, map_concurrently
from meltcore.common.gpus.select import GpuDevice
from meltcore.common.sizes import GIB
from meltcore.measure.documents.fingerprint import take_fingerprint
from meltcore.measure.documents.node import UNKNOWN, Fact, GpuSnapshot, NvLinkState, Snapshot
from meltcore.measure.documents.values.formatting import fingerprint_rows
from meltcore.measure.node.facts import FACT_BY_KEY, FACTS, pcie_path, read_fact
from meltcore.measure.node.node import Node

# pip packages that come with torch; a torch built against the system's NCCL has none for it.
_LIBRARIES = ("torch", "nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-cublas", "nvidia-cuda-runtime", "nvidia-ml-py")
# Rows of a fingerprint that describe a run, or that the snapshot prints in more detail.
_OMITTED_ROWS = ("Arguments", "Seed", "GPU ")
# Fields of the fingerprint that describe the machine; the others say when and how it was taken.
_HOST = {"cpu": "CPU", "cores": "cores", "memory_bytes": "host memory, bytes", "kernel": "kernel", "python": "Python"}


def take_snapshot(node: Node, gpus: Sequence[GpuDevice]) -> Snapshot:
    """Read the GPUs that select_gpus returned. Values that the driver does not give are UNKNOWN, never empty."""
    nvml = node.nvml
    states = map_concurrently(lambda gpu: _gpu_snapshot(node, gpu), gpus)
    libraries = {}
    for package in _LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            libraries[package] = metadata.version(package)
    return Snapshot(
        fingerprint=take_fingerprint(),
        driver=_read_or_unknown(nvml.driver),
        cuda_driver=_read_or_unknown(nvml.cuda_driver),
        libraries=libraries,
        gpus=states,
        topology=[[_path(nvml, gpus, states, i, j) for j in range(len(gpus))] for i in range(len(gpus))],
    )


def _read_or_unknown(read: Callable[[], str]) -> str:
    try:
        return read()
    except NVMLError:
        return UNKNOWN


def _gpu_snapshot(node: Node, gpu: GpuDevice) -> GpuSnapshot:
    facts: dict[str, Fact] = {fact.key: read_fact(node.nvml, gpu, fact) for fact in FACTS}
    text = node.read(Path(f"/sys/bus/pci/devices/{facts['bus_id']}/numa_node"))
    # The kernel writes -1 where the firmware does not report the node.
    facts["numa_node"] = UNKNOWN if text is None or text.strip() == "-1" else int(text)
    count = facts["nvlinks"]
    return GpuSnapshot(
        index=gpu.info.index,
        name=gpu.info.name,
        uuid=gpu.info.uuid,
        mig=gpu.info.mig,
        facts=facts,
        links=[_link(node.nvml, gpu, link) for link in range(count)] if isinstance(count, int) else [],
    )


def _link(nvml: Nvml, gpu: GpuDevice, link: int) -> NvLinkState:
    try:
        if not nvml.nvlink_up(gpu.device, link):
            return NvLinkState(link=link, state="down")
    except NVMLError:
        return NvLinkState(link=link, state=UNKNOWN)
    # Checks derive no expectation from a link with an unreadable speed or peer.
    try:
        speed_gbps = nvml.nvlink_speed_mbps(gpu.device, link) / 1e3
    except NVMLError:
        speed_gbps = None
    peer = _read_or_unknown(lambda: nvml.nvlink_peer(gpu.device, link))
    return NvLinkState(link=link, state="up", speed_gbps=speed_gbps, peer=peer)


def links_between(gpus: Sequence[GpuSnapshot], first: int, second: int) -> list[NvLinkState]:
    """Return the links of GPU `first` (an index) that lead to GPU `second` or to a switch."""
    bus_id = gpus[second].facts.get("bus_id")
    return [link for link in gpus[first].links_up() if link.peer in ("switch", bus_id)]


def _path(nvml: Nvml, gpus: Sequence[GpuDevice], states: Sequence[GpuSnapshot], first: int, second: int) -> str:
    if first == second:
        return "X"
    links = links_between(states, first, second)
    return f"NV{len(links)}" if links else pcie_path(nvml, gpus[first], gpus[second])


# --- text ------------------------------------------------------------------------------------------------------------


def snapshot_lines(snapshot: Snapshot) -> list[str]:
    """Return the snapshot as text: host and versions, facts and links of each GPU, topology."""
    rows = [
        *(row for row in fingerprint_rows(snapshot.fingerprint) if not row[0].startswith(_OMITTED_ROWS)),
        ("GPU driver", snapshot.driver),
        ("CUDA of the driver", snapshot.cuda_driver),
        *snapshot.libraries.items(),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    lines += snapshot.notes
    for gpu in snapshot.gpus:
        lines += ["", f"{gpu.label}  {gpu.name}  {gpu.uuid}", *_fact_lines(gpu)]
    if len(snapshot.gpus) > 1:
        lines += ["", *_topology_lines(snapshot)]
    return lines


def _fact_lines(gpu: GpuSnapshot) -> list[str]:
    lines = []
    for key, value in gpu.facts.items():
        fact = FACT_BY_KEY.get(key)
        name, unit = (fact.name, fact.unit) if fact is not None else (key.replace("_", " "), "")
        text, unit = (f"{value / GIB:.0f}", "GiB") if unit == "bytes" and isinstance(value, int) else (value, unit)
        lines.append(f"  {name:<36}{text} {unit}".rstrip())
    groups = Counter((link.state, link.speed_gbps, link.peer) for link in gpu.links)
    for (state, speed, peer), count in groups.items():
        text = f"{count} x {state}" + (f", {speed:g} GB/s" if speed is not None else "")
        lines.append(f"  {'NVLinks':<36}{text}" + (f", to {peer}" if state == "up" else ""))
    return lines


def _topology_lines(snapshot: Snapshot) -> list[str]:
    names = [gpu.label for gpu in snapshot.gpus]
    width = max(map(len, names)) + 2
    rows = [["", *names], *([name, *row] for name, row in zip(names, snapshot.topology, strict=True))]
    return ["".join(f"{cell:<{width}}" for cell in row).rstrip() for row in rows]


# --- nodes of a cluster ----------------------------------------------------------------------------------------------


def shared_facts(snapshot: Snapshot) -> dict[str, str]:
    """Return the facts that equal nodes share, as text by name. Ids, readings and counters are left out.

    Host memory is in whole GiB, because kernels reserve different amounts.
    """
    facts = {"driver": snapshot.driver, "CUDA of the driver": snapshot.cuda_driver}
    for field, name in _HOST.items():
        value = getattr(snapshot.fingerprint, field)
        facts |= {"host memory, GiB": f"{value / GIB:.0f}"} if field == "memory_bytes" else {name: str(value)}
    facts |= snapshot.fingerprint.versions | snapshot.libraries
    for gpu in snapshot.gpus:
        for key, value in gpu.facts.items():
            fact = FACT_BY_KEY.get(key)
            if fact is not None and fact.type == "fixed" and key != "bus_id":
                facts[f"GPU {gpu.index} {fact.name}"] = str(value)
        facts[f"GPU {gpu.index} NVLinks up"] = str(len(gpu.links_up()))
    for gpu, row in zip(snapshot.gpus, snapshot.topology, strict=True):
        facts[f"paths of GPU {gpu.index}"] = " ".join(row)
    return facts


# --- differences -----------------------------------------------------------------------------------------------------


def diff_snapshots(old: Snapshot, new: Snapshot) -> list[str]:
    """Return one line per difference between two snapshots of a node. GPUs are matched by UUID.

    Readings such as clocks and temperature are never a difference. Counters are a difference if they grew.
    """
    return [*_node_changes(old, new), *_gpu_changes(old, new), *_topology_changes(old, new)]


def _node_changes(old: Snapshot, new: Snapshot) -> Iterator[str]:
    yield from _change_line("driver", old.driver, new.driver)
    yield from _change_line("CUDA of the driver", old.cuda_driver, new.cuda_driver)
    yield from _table_changes(old.libraries, new.libraries)
    for field, name in _HOST.items():
        yield from _change_line(name, getattr(old.fingerprint, field), getattr(new.fingerprint, field))
    old_versions, new_versions = (
        {name: version for name, version in snapshot.fingerprint.versions.items() if name not in snapshot.libraries}
        for snapshot in (old, new)
    )
    yield from _table_changes(old_versions, new_versions)


def _table_changes(old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(old.keys() | new.keys()):
        yield from _change_line(name, old.get(name, "absent"), new.get(name, "absent"))


def _change_line(name: str, old: object, new: object) -> Iterator[str]:
    if old != new:
        yield f"{name}: {old} -> {new}"


def _gpu_changes(old: Snapshot, new: Snapshot) -> Iterator[str]:
    old_gpus, new_gpus = ({gpu.uuid: gpu for gpu in snapshot.gpus} for snapshot in (old, new))
    for uuid, gpu in old_gpus.items():
        if uuid not in new_gpus:
            yield f"{gpu.label} {gpu.name} ({uuid}) is gone"
    for uuid, gpu in new_gpus.items():
        if uuid not in old_gpus:
            yield f"{gpu.label} {gpu.name} ({uuid}) is new"
        else:
            yield from _one_gpu_changes(old_gpus[uuid], gpu)


def _one_gpu_changes(old: GpuSnapshot, new: GpuSnapshot) -> Iterator[str]:
    yield from _change_line(f"{new.label} index", old.index, new.index)
    yield from _change_line(f"{new.label} name", old.name, new.name)
    for key in sorted(old.facts.keys() | new.facts.keys()):
        fact = FACT_BY_KEY.get(key)
        fact_type, name = (fact.type, fact.name) if fact is not None else ("fixed", key.replace("_", " "))
        old_value, new_value = old.number(key), new.number(key)
        # A counter that shrank restarted with the driver.
        has_restarted = (
            fact_type == "counter" and old_value is not None and new_value is not None and new_value < old_value
        )
        if fact_type != "reading" and not has_restarted:
            yield from _change_line(f"{new.label} {name}", old.facts.get(key, "absent"), new.facts.get(key, "absent"))
    links, new_links = (
        {nvlink.link: (nvlink.state, nvlink.speed_gbps, nvlink.peer) for nvlink in gpu.links} for gpu in (old, new)
    )
    for link in sorted(links.keys() & new_links.keys()):
        yield from _change_line(f"{new.label} NVLink {link} (state, GB/s, peer)", links[link], new_links[link])


def _topology_changes(old: Snapshot, new: Snapshot) -> Iterator[str]:
    """Yield one line per changed path between GPUs. Yields nothing if the GPUs or their order differ."""
    if [gpu.uuid for gpu in old.gpus] != [gpu.uuid for gpu in new.gpus]:
        return
    for first, gpu in enumerate(new.gpus):
        for second in range(first + 1, len(new.gpus)):
            name = f"path between {gpu.label} and {new.gpus[second].label}"
            yield from _change_line(name, old.topology[first][second], new.topology[first][second])
