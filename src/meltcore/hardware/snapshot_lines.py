"""A snapshot as text: a table of the GPUs' facts, their links, and the topology."""

from collections import Counter

from meltcore.hardware.facts import FACT_BY_KEY
from meltcore.results.snapshot import GpuState, Snapshot
from meltcore.results.wording import fingerprint_rows

_GIB = 2**30
_OF_A_RUN_OR_TOLD_BELOW = ("Arguments", "Seed", "GPU ")


def snapshot_lines(snapshot: Snapshot) -> list[str]:
    rows = [
        *(row for row in fingerprint_rows(snapshot.fingerprint) if not row[0].startswith(_OF_A_RUN_OR_TOLD_BELOW)),
        ("GPU driver", snapshot.driver),
        ("CUDA of the driver", snapshot.cuda_driver),
        *snapshot.libraries.items(),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    lines += snapshot.notes
    for gpu in snapshot.gpus:
        lines += ["", f"{gpu.label}  {gpu.name}  {gpu.uuid}", *_facts(gpu)]
    if len(snapshot.gpus) > 1:
        lines += ["", *_topology(snapshot)]
    return lines


def _facts(gpu: GpuState) -> list[str]:
    lines = []
    for key, value in gpu.facts.items():
        fact = FACT_BY_KEY.get(key)
        name, unit = (fact.name, fact.unit) if fact is not None else (key.replace("_", " "), "")
        if unit == "bytes" and isinstance(value, int):
            value, unit = f"{value / _GIB:.0f}", "GiB"
        lines.append(f"  {name:<36}{value} {unit}".rstrip())
    kinds = Counter((link.state, link.speed_gbps, link.peer) for link in gpu.links)
    for (state, speed, peer), count in kinds.items():
        words = f"{count} x {state}" + (f", {speed:g} GB/s" if speed is not None else "")
        lines.append(f"  {'NVLinks':<36}{words}" + (f", to {peer}" if state == "up" else ""))
    return lines


def _topology(snapshot: Snapshot) -> list[str]:
    names = [gpu.label for gpu in snapshot.gpus]
    width = max(map(len, names)) + 2
    head = " " * width + "".join(f"{name:<{width}}" for name in names)
    cells = [
        f"{name:<{width}}" + "".join(f"{cell:<{width}}" for cell in line)
        for name, line in zip(names, snapshot.topology, strict=True)
    ]
    return [line.rstrip() for line in (head, *cells)]
