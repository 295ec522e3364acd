"""Is every GPU in a state to work at all? Read from the driver, before anything runs."""

from collections.abc import Callable, Iterator

from meltcore.hardware import faults
from meltcore.hardware.checks.base import Check
from meltcore.hardware.facts import FACT_BY_KEY
from meltcore.hardware.site import Site
from meltcore.hardware.throttle import SLOWDOWNS, words
from meltcore.results.certificate import CheckReport, Finding, Row, RowVerdict, worst
from meltcore.results.snapshot import NOT_APPLICABLE, UNKNOWN, GpuState

ROWS_REMAPPED_MOST = 512  # Azure's node health checks, H200 x 8, 2026-05
_POWER_ROUNDING_W = 1.0

Complaint = tuple[RowVerdict, str, str]  # verdict, fault code, words

# Facts that must be readable for a pass, each with what may be wrong with it.
_JUDGED: dict[str, Callable[[GpuState, float], Complaint | None]] = {
    "ecc_on": lambda gpu, on: None if on else ("WARN", faults.ECC_OFF, "ECC is off"),
    "ecc_uncorrected": lambda gpu, count: (
        ("FAIL", faults.ECC_UNCORRECTED, f"{count:.0f} uncorrected ECC errors since the driver loaded")
        if count
        else None
    ),
    "rows_remapped_uncorrected": lambda gpu, count: (
        ("FAIL", faults.ROWS_REMAPPED_MANY, f"{count:.0f} memory rows remapped") if count > ROWS_REMAPPED_MOST else None
    ),
    "row_remap_pending": lambda gpu, pending: (
        ("FAIL", faults.ROW_REMAP_PENDING, "a memory row waits to be remapped") if pending else None
    ),
    "row_remap_failed": lambda gpu, failed: (
        ("FAIL", faults.ROW_REMAP_FAILED, "a memory row could not be remapped") if failed else None
    ),
    "recovery_action": lambda gpu, action: (
        (
            "FAIL",
            faults.RECOVERY_ACTION,
            f"the driver asks: {faults.RECOVERY_WORDS.get(int(action), f'action {action:.0f}')}",
        )
        if action
        else None
    ),
    "pcie_width": lambda gpu, width: _pcie_width(gpu, width),
    "pcie_width_max": lambda gpu, width: None,
    "pcie_generation_max": lambda gpu, generation: _pcie_generation(gpu, generation),
    "power_limit_w": lambda gpu, watts: _power_limit(gpu, watts),
    "mig_on": lambda gpu, on: (
        ("WARN", faults.MIG_ON, "MIG is on, and the whole GPU was asked for") if on and not gpu.mig else None
    ),
    "clock_reasons": lambda gpu, mask: _slowdown(int(mask)),
    "processes": lambda gpu, count: (
        ("INVALID", faults.BUSY, f"{count:.0f} program{'s'[: count != 1]} computing on it") if count else None
    ),
}


def _pcie_width(gpu: GpuState, width: float) -> Complaint | None:
    most = gpu.number("pcie_width_max")
    if most is None or width >= most:
        return None
    return "FAIL", faults.PCIE_WIDTH, f"its PCIe link has {width:.0f} lanes of {most:.0f}"


def _pcie_generation(gpu: GpuState, generation: float) -> Complaint | None:
    own = gpu.number("gpu_pcie_generation_max")
    if own is None or generation >= own:
        return None
    return "WARN", faults.PCIE_GENERATION, f"its slot gives PCIe {generation:.0f}, the GPU could do {own:.0f}"


def _power_limit(gpu: GpuState, watts: float) -> Complaint | None:
    default = gpu.number("power_limit_default_w")
    if default is None or watts >= default - _POWER_ROUNDING_W:
        return None
    return "WARN", faults.POWER_LIMIT_LOWERED, f"its power limit is {watts:.0f} W of the product's {default:.0f} W"


def _slowdown(mask: int) -> Complaint | None:
    held = [word for word in words(mask) if word in SLOWDOWNS]
    return ("WARN", faults.THROTTLED, f"its clocks are held down at rest: {', '.join(held)}") if held else None


class State(Check):
    name = "state"
    title = "State of the GPUs"

    def run(self, site: Site) -> CheckReport:
        began_s = site.node.now_s()
        rows: list[Row] = []
        findings: list[Finding] = []
        several = len(site.gpus) > 1
        for position, gpu in enumerate(site.snapshot.gpus):
            for key, verdict, code, note in [*_facts(gpu), *_links(gpu, several)]:
                subject = site.label((position,))
                measured = gpu.number(key)
                rows.append(
                    Row(key=f"state/{key}", subject=subject, gpus=[position], unit=_unit(key), verdict=verdict,
                        measured=measured, note=note)
                )  # fmt: skip
                if code:
                    findings.append(
                        Finding(code=code, verdict=verdict, check=self.name, subject=subject, message=note,
                                action=faults.ACTIONS[code])
                    )  # fmt: skip
        return CheckReport(
            name=self.name,
            title=self.title,
            verdict=worst(row.verdict for row in rows),
            rows=rows,
            findings=findings,
            duration_s=site.node.now_s() - began_s,
        )


def _unit(key: str) -> str:
    return FACT_BY_KEY[key].unit if key in FACT_BY_KEY else ""


def _facts(gpu: GpuState) -> Iterator[tuple[str, RowVerdict, str, str]]:
    """(key, verdict, fault code, note)."""
    for key, judge in _JUDGED.items():
        value = gpu.number(key)
        name = FACT_BY_KEY[key].name
        if gpu.facts.get(key) == NOT_APPLICABLE:
            yield key, "NOT_APPLICABLE", "", f"this product has no such thing: {name}"
        elif value is None:
            yield key, "UNKNOWN", faults.STATE_UNREADABLE, f"not readable: {name}"
        else:
            complaint = judge(gpu, value)
            yield (key, *complaint) if complaint else (key, "PASS", "", "")


def _links(gpu: GpuState, several: bool) -> Iterator[tuple[str, RowVerdict, str, str]]:
    count = gpu.facts.get("nvlinks")
    down = [str(link.link) for link in gpu.links if link.state == "down"]
    unreadable = [str(link.link) for link in gpu.links if link.state == UNKNOWN]
    if count == NOT_APPLICABLE or count == 0:
        yield "nvlinks", "NOT_APPLICABLE", "", "this product has no NVLink"
    elif not several and not gpu.links_up():
        yield "nvlinks", "NOT_APPLICABLE", "", "no link is up, and a GPU alone needs none"
    elif count == UNKNOWN or unreadable:
        yield (
            "nvlinks",
            "UNKNOWN",
            faults.STATE_UNREADABLE,
            f"not readable: NVLinks {', '.join(unreadable) or 'at all'}",
        )
    elif down:
        yield "nvlinks", "FAIL", faults.NVLINK_DOWN, f"NVLinks down: {', '.join(down)} of {count}"
    else:
        yield "nvlinks", "PASS", "", f"{count} up"
