"""State of the GPUs: is every GPU able to work? Read from the driver before anything runs."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pynvml
from pynvml import NVMLError

from meltcore.common.gpus.metrics import SLOWDOWNS, clock_reason_names
from meltcore.measure.documents.node import (
    NOT_APPLICABLE,
    UNKNOWN,
    CertificateRow,
    CheckReport,
    Finding,
    GpuSnapshot,
)
from meltcore.measure.documents.verdicts import CheckVerdict
from meltcore.measure.node.certify import faults
from meltcore.measure.node.certify.check import HardwareCheck
from meltcore.measure.node.certify.context import CertifyContext
from meltcore.measure.node.certify.faults import FaultCode
from meltcore.measure.node.facts import FACT_BY_KEY

MAX_ROWS_REMAPPED = 512  # Azure's node health checks, H200 x 8, 2026-05
_POWER_ROUNDING_W = 1.0
# Problems in the health mask of the fabric: shift, bits, values that are a problem, text.
_FABRIC_PROBLEMS: tuple[tuple[int, int, Sequence[int], str], ...] = (
    (pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_DEGRADED_BW, 0x3, (1,), "degraded bandwidth"),
    (pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_RECOVERY, 0x3, (1,), "a route that recovers"),
    (pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_UNHEALTHY, 0x3, (1,), "an unhealthy route"),
    (pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ACCESS_TIMEOUT_RECOVERY, 0x3, (1,), "timeouts of access"),
    (pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_INCORRECT_CONFIGURATION, 0xF, range(2, 16), "a wrong configuration"),
)

Fault = tuple[CheckVerdict, FaultCode, str]  # verdict, fault code, message


def _pcie_width(gpu: GpuSnapshot, width: float) -> Fault | None:
    maximum = gpu.number("pcie_width_max")
    if maximum is None or width >= maximum:
        return None
    return "FAIL", "PCIE_WIDTH", f"its PCIe link has {width:.0f} lanes of {maximum:.0f}"


def _pcie_generation(gpu: GpuSnapshot, generation: float) -> Fault | None:
    gpu_generation = gpu.number("gpu_pcie_generation_max")
    if gpu_generation is None or generation >= gpu_generation:
        return None
    return "WARN", "PCIE_GENERATION", f"its slot supports PCIe {generation:.0f}, the GPU {gpu_generation:.0f}"


def _power_limit(gpu: GpuSnapshot, watts: float) -> Fault | None:
    default = gpu.number("power_limit_default_w")
    if default is None or watts >= default - _POWER_ROUNDING_W:
        return None
    return "WARN", "POWER_LIMIT_LOWERED", f"its power limit is {watts:.0f} W, below the default {default:.0f} W"


def _slowdown_fault(_gpu: GpuSnapshot, mask: float) -> Fault | None:
    reasons = [name for name in clock_reason_names(int(mask)) if name in SLOWDOWNS]
    return ("WARN", "THROTTLED", f"its clocks are held down at rest: {', '.join(reasons)}") if reasons else None


def _recovery_fault(_gpu: GpuSnapshot, action: float) -> Fault | None:
    text = faults.RECOVERY_ACTIONS.get(int(action), f"action {action:.0f}")
    return ("FAIL", "RECOVERY_ACTION", f"the driver requests: {text}") if action else None


def _fault_if(is_fault: bool, verdict: CheckVerdict, code: FaultCode, message: str) -> Fault | None:
    return (verdict, code, message) if is_fault else None


# Facts that must be readable for a PASS, each with its rule.
_RULES: dict[str, Callable[[GpuSnapshot, float], Fault | None]] = {
    "ecc_on": lambda _gpu, is_on: _fault_if(not is_on, "WARN", "ECC_OFF", "ECC is off"),
    "ecc_uncorrected": lambda _gpu, count: _fault_if(
        count > 0, "FAIL", "ECC_UNCORRECTED", f"{count:.0f} uncorrected ECC errors since the driver was loaded"
    ),
    "rows_remapped_uncorrected": lambda _gpu, count: _fault_if(
        count > MAX_ROWS_REMAPPED, "FAIL", "ROWS_REMAPPED_MANY", f"{count:.0f} memory rows remapped"
    ),
    "row_remap_pending": lambda _gpu, pending: _fault_if(
        pending > 0, "FAIL", "ROW_REMAP_PENDING", "a memory row waits to be remapped"
    ),
    "row_remap_failed": lambda _gpu, failed: _fault_if(
        failed > 0, "FAIL", "ROW_REMAP_FAILED", "a memory row could not be remapped"
    ),
    "recovery_action": _recovery_fault,
    "pcie_width": _pcie_width,
    "pcie_width_max": lambda _gpu, _width: None,
    "pcie_generation_max": _pcie_generation,
    "gpu_pcie_generation_max": lambda _gpu, _generation: None,
    "power_limit_w": _power_limit,
    "power_limit_default_w": lambda _gpu, _watts: None,
    "mig_on": lambda gpu, is_on: _fault_if(
        is_on > 0 and not gpu.mig, "WARN", "MIG_ON", "MIG is on, and the whole GPU was requested"
    ),
    "clock_reasons": _slowdown_fault,
    "slow_call_s": lambda _gpu, seconds: _fault_if(
        seconds > 0, "WARN", "SLOW_DRIVER", f"the driver took {seconds:.1f} s to answer a call about it"
    ),
    "processes": lambda _gpu, count: _fault_if(
        count > 0, "INVALID", "BUSY", f"{count:.0f} program{'s'[: count != 1]} computing on it"
    ),
}


class StateCheck(HardwareCheck):
    """Judges each GPU's state in the snapshot, such as PCIe width and remapped rows."""

    name = "state"
    title = "State of the GPUs"

    def measure(self, context: CertifyContext) -> CheckReport:
        """Return a report with one row per fact and GPU."""
        rows: list[CertificateRow] = []
        findings: list[Finding] = []
        has_several_gpus = len(context.gpus) > 1
        for gpu_index, gpu in enumerate(context.snapshot.gpus):
            subject = context.label((gpu_index,))
            for key, verdict, code, note in [
                *_judged_facts(gpu),
                _judge_links(gpu, has_several_gpus),
                _judge_fabric(gpu, has_several_gpus),
                *(_judge_firmware(gpu, context.snapshot.gpus, key) for key in ("vbios", "inforom")),
            ]:
                rows.append(
                    CertificateRow(
                        key=f"state/{key}",
                        subject=subject,
                        gpus=[gpu_index],
                        unit=FACT_BY_KEY[key].unit,
                        verdict=verdict,
                        measured=gpu.number(key),
                        note=note,
                    )
                )
                if code:
                    action = faults.ACTIONS[code]
                    finding = Finding(
                        code=code, verdict=verdict, check=self.name, subject=subject, message=note, action=action
                    )
                    findings.append(finding)
        return self.report(rows, findings)


def _judged_facts(gpu: GpuSnapshot) -> Iterator[tuple[str, CheckVerdict, FaultCode | None, str]]:
    """Yield the judged facts of a GPU as (key, verdict, fault code, note)."""
    for key, rule in _RULES.items():
        value = gpu.number(key)
        name = FACT_BY_KEY[key].name
        if gpu.facts.get(key) == NOT_APPLICABLE:
            yield key, "NOT_APPLICABLE", None, f"this GPU type does not have it: {name}"
        elif value is None:
            yield key, "UNKNOWN", "STATE_UNREADABLE", f"unreadable: {name}"
        else:
            yield key, *(rule(gpu, value) or ("PASS", None, ""))


def _judge_links(gpu: GpuSnapshot, has_several_gpus: bool) -> tuple[str, CheckVerdict, FaultCode | None, str]:
    count = gpu.facts.get("nvlinks")
    links_down = [str(link.link) for link in gpu.links if link.state == "down"]
    unreadable = [str(link.link) for link in gpu.links if link.state == UNKNOWN]
    if count == NOT_APPLICABLE or count == 0:
        return "nvlinks", "NOT_APPLICABLE", None, "this GPU type has no NVLink"
    if not has_several_gpus and not gpu.links_up():
        return "nvlinks", "NOT_APPLICABLE", None, "no link is up, and a single GPU needs none"
    if count == UNKNOWN or unreadable:
        links = ", ".join(unreadable) or "all"
        return "nvlinks", "UNKNOWN", "STATE_UNREADABLE", f"unreadable NVLinks: {links}"
    if links_down:
        return "nvlinks", "FAIL", "NVLINK_DOWN", f"NVLinks down: {', '.join(links_down)} of {count}"
    return "nvlinks", "PASS", None, f"{count} up"


def _judge_fabric(gpu: GpuSnapshot, has_several_gpus: bool) -> tuple[str, CheckVerdict, FaultCode | None, str]:
    """Judge the registration of a GPU with Fabric Manager. Without it no GPU reaches another through NVSwitches."""
    state, status, health = (gpu.number(f"fabric_{name}") for name in ("state", "status", "health"))
    if state is None or status is None or health is None:
        return "fabric_state", "UNKNOWN", "STATE_UNREADABLE", "unreadable: registration with Fabric Manager"
    if not state:
        return "fabric_state", "NOT_APPLICABLE", None, "the driver registers this GPU with no fabric"
    if not has_several_gpus and not gpu.links_up():
        return "fabric_state", "NOT_APPLICABLE", None, "no link is up, and a single GPU needs no fabric"
    if state != pynvml.NVML_GPU_FABRIC_STATE_COMPLETED:
        reason = "has not started" if state == pynvml.NVML_GPU_FABRIC_STATE_NOT_STARTED else "is in progress"
        return "fabric_state", "FAIL", "FABRIC_NOT_REGISTERED", f"its registration with Fabric Manager {reason}"
    if status:
        return "fabric_state", "FAIL", "FABRIC_NOT_REGISTERED", f"its registration failed: {NVMLError(int(status))}"
    problems = [text for shift, width, bad, text in _FABRIC_PROBLEMS if int(health) >> shift & width in bad]
    if problems:
        return "fabric_state", "FAIL", "FABRIC_UNHEALTHY", f"its fabric has {', '.join(problems)}"
    return "fabric_state", "PASS", None, "registered"


def _judge_firmware(
    gpu: GpuSnapshot, gpus: Sequence[GpuSnapshot], key: str
) -> tuple[str, CheckVerdict, FaultCode | None, str]:
    """Judge whether a GPU has the firmware that most GPUs of its type have. After a tie each of them differs."""
    name, version = FACT_BY_KEY[key].name, gpu.facts.get(key, UNKNOWN)
    if version == UNKNOWN:
        return key, "UNKNOWN", "STATE_UNREADABLE", f"unreadable: {name}"
    counts = Counter(str(other.facts.get(key, UNKNOWN)) for other in gpus if other.name == gpu.name)
    others = {other: count for other, count in counts.items() if other != version and other != UNKNOWN}
    if others and max(others.values()) >= counts[str(version)]:
        usual = max(others, key=others.__getitem__)
        return key, "WARN", "FIRMWARE_DIFFERS", f"its {name} is {version}, and {usual} on others of its type"
    return key, "PASS", None, ""
