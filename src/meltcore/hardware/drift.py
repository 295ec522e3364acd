"""What changed between two snapshots of a node, in words. GPUs are matched by UUID, wherever they are now."""

from collections.abc import Iterator, Mapping

from meltcore.hardware.facts import FACT_BY_KEY
from meltcore.results.snapshot import GpuState, Snapshot

# Of the fingerprint; the rest is when and how it was taken.
_HOST = {"cpu": "CPU", "cores": "cores", "memory_bytes": "host memory, bytes", "kernel": "kernel", "python": "Python"}


def drift(old: Snapshot, new: Snapshot) -> list[str]:
    """One line a change; none where nothing drifted. Moments (clocks, temperature) never drift; counters only grow."""
    return [*_node(old, new), *_gpus(old, new), *_topology(old, new)]


def _node(old: Snapshot, new: Snapshot) -> Iterator[str]:
    yield from _changed("driver", old.driver, new.driver)
    yield from _changed("CUDA of the driver", old.cuda_driver, new.cuda_driver)
    yield from _table(old.libraries, new.libraries)
    for field, name in _HOST.items():
        yield from _changed(name, getattr(old.fingerprint, field), getattr(new.fingerprint, field))
    kept = {name: version for name, version in old.fingerprint.versions.items() if name not in old.libraries}
    now = {name: version for name, version in new.fingerprint.versions.items() if name not in new.libraries}
    yield from _table(kept, now)


def _table(old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(old.keys() | new.keys()):
        yield from _changed(name, old.get(name, "absent"), new.get(name, "absent"))


def _changed(name: str, old: object, new: object) -> Iterator[str]:
    if old != new:
        yield f"{name}: {old} -> {new}"


def _gpus(old: Snapshot, new: Snapshot) -> Iterator[str]:
    before, now = ({gpu.uuid: gpu for gpu in snapshot.gpus} for snapshot in (old, new))
    for uuid, gpu in before.items():
        if uuid not in now:
            yield f"{gpu.label} {gpu.name} ({uuid}) is gone"
    for uuid, gpu in now.items():
        if uuid not in before:
            yield f"{gpu.label} {gpu.name} ({uuid}) is new"
        else:
            yield from _gpu(before[uuid], gpu)


def _gpu(old: GpuState, new: GpuState) -> Iterator[str]:
    yield from _changed(f"{new.label} index", old.index, new.index)
    yield from _changed(f"{new.label} name", old.name, new.name)
    for key in sorted(old.facts.keys() | new.facts.keys()):
        fact = FACT_BY_KEY.get(key)
        kind, name = (fact.kind, fact.name) if fact is not None else ("fixed", key.replace("_", " "))
        if kind != "moment":
            yield from _fact(f"{new.label} {name}", old, new, key, kind)
    before, now = ({link.link: (link.state, link.speed_gbps, link.peer) for link in gpu.links} for gpu in (old, new))
    for link in sorted(before.keys() & now.keys()):
        yield from _changed(f"{new.label} NVLink {link} (state, GB/s, peer)", before[link], now[link])


def _fact(name: str, old: GpuState, new: GpuState, key: str, kind: str) -> Iterator[str]:
    before, now = old.number(key), new.number(key)
    if kind == "counter" and before is not None and now is not None and now < before:
        return  # the driver was loaded anew, and counts from nothing
    yield from _changed(name, old.facts.get(key, "absent"), new.facts.get(key, "absent"))


def _topology(old: Snapshot, new: Snapshot) -> Iterator[str]:
    """Only where the same GPUs stand in the same order."""
    if [gpu.uuid for gpu in old.gpus] != [gpu.uuid for gpu in new.gpus]:
        return
    for first, gpu in enumerate(new.gpus):
        for second in range(first + 1, len(new.gpus)):
            name = f"path between {gpu.label} and {new.gpus[second].label}"
            yield from _changed(name, old.topology[first][second], new.topology[first][second])
