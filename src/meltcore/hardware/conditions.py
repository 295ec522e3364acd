"""What the GPUs did while a check ran, and what that says of its figures."""

from collections.abc import Sequence

from pynvml import NVMLError

from meltcore.hardware import faults
from meltcore.hardware.metrics import UNKNOWN
from meltcore.hardware.patient import at_once
from meltcore.hardware.recording import Sample
from meltcore.hardware.select import Gpu
from meltcore.hardware.site import Site
from meltcore.hardware.summary import GpuSummary, summarise
from meltcore.hardware.throttle import SLOWDOWNS
from meltcore.hardware.xid import describe
from meltcore.results.certificate import Conditions, Finding

_SLOWED = ("hw_thermal_slowdown_s", "hw_power_brake_s", "sw_thermal_slowdown_s")
# Counters whose growth is a fault, with the code for it.
_ERRORS = {
    "ecc_corrected": faults.NEW_ECC_ERRORS,
    "ecc_uncorrected": faults.NEW_ECC_ERRORS,
    "pcie_replays": faults.NEW_PCIE_REPLAYS,
}
_NVLINK = "nvlink_errors"
# A driver busy with a new process may keep the sampler waiting for a second or two; a hole of more hides things.
_GAP_S, _GAP_INTERVALS = 5.0, 3


class Watch:
    """Opened before a check and closed after it: conditions and findings of each GPU between the two."""

    def __init__(self, site: Site, check: str, uses: Sequence[str] = ()) -> None:
        """`uses`: of "pcie" and "nvlink", the links whose error counters must be readable for this check."""
        self._site, self._check, self._uses = site, check, uses
        self._began_s = site.node.now_s()
        self._links = self._link_errors()

    def close(self) -> tuple[list[Conditions], list[Finding], set[int]]:
        """(conditions of each GPU, findings, positions of the GPUs that were slowed down)."""
        samples = self._site.telemetry.since(self._began_s)
        links = self._link_errors()
        conditions, findings, slowed = [], [], set()
        for position in self._site.positions:
            mine = [] if samples is None else samples[position]
            found = self._conditions(position, mine, links[position])
            conditions.append(found)
            findings += [*self._findings(found), *self._link_trained_down(position, found)]
            if found.reasons.keys() & set(SLOWDOWNS) or found.new_errors.keys() & set(_SLOWED):
                slowed.add(position)
        return conditions, findings, slowed

    def _link_errors(self) -> list[int | None]:
        return at_once(lambda gpu: link_errors(self._site, gpu), self._site.gpus)

    def _conditions(self, position: int, samples: Sequence[Sample], link_errors_now: int | None) -> Conditions:
        subject = self._site.label((position,))
        found = Conditions(subject=subject, samples=len(samples))
        if not samples:
            found.unreadable = ["every reading: no sample was taken"]
            return found
        summary = summarise(samples)
        loaded = _loaded(samples)
        found.sm_clock_mhz = _mean(loaded, "sm_clock_mhz")
        found.power_w = _mean(loaded, "power_w")
        found.pcie_generation = _highest(samples, "pcie_generation")
        found.temperature_c = _highest(samples, "temperature_c")
        found.memory_temperature_c = _highest(samples, "memory_temperature_c")
        seen = summary.samples - summary.clock_reasons_unknown
        found.reasons = {reason: count / seen for reason, count in summary.clock_reasons.items()}
        found.new_errors = self._new_errors(position, summary, link_errors_now)
        found.unreadable = self._unreadable(position, summary)
        return found

    def _new_errors(self, position: int, summary: GpuSummary, after: int | None) -> dict[str, int]:
        grown = {key: summary.metrics[key].increase for key in (*_ERRORS, *_SLOWED)}
        new = {key: max(1, round(grew)) for key, grew in grown.items() if grew}
        for xid in summary.xids:
            new[f"xid {xid}"] = summary.xids.count(xid)
        before = self._links[position]
        if before is not None and after is not None and after > before:
            new[_NVLINK] = after - before
        if summary.lost:
            new["lost"] = 1
        return new

    def _unreadable(self, position: int, summary: GpuSummary) -> list[str]:
        """Only what was never readable: one reading of many that fails is no blindness."""
        needed = [
            "sm_clock_mhz",
            "ecc_corrected",
            "ecc_uncorrected",
            *(["pcie_replays"] if "pcie" in self._uses else []),
        ]
        missing = [key for key in needed if summary.metrics[key].absent == UNKNOWN]
        if summary.clock_reasons_unknown == summary.samples:
            missing.append("clock reasons")
        if summary.longest_gap_s > max(_GAP_S, _GAP_INTERVALS * self._site.interval_s):
            missing.append(f"anything for {summary.longest_gap_s:.0f} s")
        if summary.xids_unknown == summary.samples:
            missing.append("XID errors")
        if "nvlink" in self._uses and self._site.snapshot.gpus[position].links_up() and self._links[position] is None:
            missing.append("NVLink errors")
        return missing

    def _findings(self, found: Conditions) -> list[Finding]:
        findings = []
        slowing = [f"{reason} {100 * found.reasons[reason]:.0f} %" for reason in SLOWDOWNS if reason in found.reasons]
        if slowing or found.new_errors.keys() & set(_SLOWED):
            words = f"{', '.join(slowing)} of the time" if slowing else "for moments between two samples"
            findings.append(self._finding(found, faults.THROTTLED, f"its clocks were held down: {words}"))
        for key, count in found.new_errors.items():
            if key in _SLOWED:
                continue
            code, message = _error(key, count)
            findings.append(self._finding(found, code, message, _action(key, code)))
        if found.unreadable:
            message = f"not readable while the check ran: {', '.join(found.unreadable)}"
            findings.append(self._finding(found, faults.TELEMETRY_UNREADABLE, message))
        return findings

    def _link_trained_down(self, position: int, found: Conditions) -> list[Finding]:
        """Judged while data flows: at rest a GPU lowers its link's generation to save power."""
        most = self._site.snapshot.gpus[position].number("pcie_generation_max")
        seen = found.pcie_generation
        if "pcie" not in self._uses or most is None or seen is None or seen >= most:
            return []
        message = f"its PCIe link stayed at generation {seen:.0f} of {most:.0f} while data flowed"
        return [self._finding(found, faults.PCIE_GENERATION, message)]

    def _finding(self, found: Conditions, code: str, message: str, action: str = "") -> Finding:
        verdicts = {faults.THROTTLED: "WARN", faults.TELEMETRY_UNREADABLE: "UNKNOWN"}
        return Finding(
            code=code,
            verdict=verdicts.get(code, "FAIL"),  # type: ignore[arg-type]
            check=self._check,
            subject=found.subject,
            message=message,
            action=action or faults.ACTIONS[code],
        )


def _action(key: str, code: str) -> str:
    return faults.XID_ACTIONS.get(int(key.removeprefix("xid ")), "") if code == faults.NEW_XID else ""


def _error(key: str, count: int) -> tuple[str, str]:
    if key.startswith("xid "):
        return faults.NEW_XID, f"{describe(int(key.removeprefix('xid ')))} x {count}"
    if key == "lost":
        return faults.GPU_LOST, "the GPU was lost: it fell off the bus, or its driver gave it up"
    if key == _NVLINK:
        return faults.NEW_NVLINK_ERRORS, f"{count} new NVLink errors (replays, recoveries, CRC)"
    words = {"ecc_corrected": "ECC errors, corrected", "ecc_uncorrected": "ECC errors, uncorrected"}
    return _ERRORS[key], f"{count} new {words.get(key, 'PCIe replays')}"


def link_errors(site: Site, gpu: Gpu) -> int | None:
    """Of all links of a GPU that are up, since the driver was loaded; None where they cannot be read."""
    position = site.gpus.index(gpu)
    try:
        links = site.snapshot.gpus[position].links_up()
        return sum(site.node.nvml.nvlink_errors(gpu.board, link.link) for link in links)
    except NVMLError:
        return None


def _loaded(samples: Sequence[Sample]) -> Sequence[Sample]:
    """Samples in which the GPU was not idle, or all where it always was."""
    busy = [one for one in samples if isinstance(one.clock_reasons, list) and "GPU_IDLE" not in one.clock_reasons]
    return busy or samples


def _numbers(samples: Sequence[Sample], key: str) -> list[float]:
    return [value for one in samples if not isinstance(value := one.values[key], str)]


def _mean(samples: Sequence[Sample], key: str) -> float | None:
    found = _numbers(samples, key)
    return sum(found) / len(found) if found else None


def _highest(samples: Sequence[Sample], key: str) -> float | None:
    return max(_numbers(samples, key), default=None)
