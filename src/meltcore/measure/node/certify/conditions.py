"""Records the conditions of the GPUs during a check, and derives findings from the conditions."""

from collections.abc import Sequence

from pynvml import NVMLError

from meltcore.common.gpus.driver import map_concurrently
from meltcore.common.gpus.metrics import SLOWDOWN_COUNTERS, SLOWDOWNS, UNKNOWN
from meltcore.common.gpus.reader import Sample
from meltcore.common.gpus.xid import describe
from meltcore.measure.documents.node import Conditions, Finding
from meltcore.measure.documents.verdicts import CheckVerdict
from meltcore.measure.node.certify import faults
from meltcore.measure.node.certify.context import CertifyContext
from meltcore.measure.node.certify.faults import FaultCode
from meltcore.measure.node.monitor.summary import LOST_PROBLEM, GpuSummary, readable_values, summarize

# Counters whose growth is a fault: key, fault code, text.
_ERRORS: dict[str, tuple[FaultCode, str]] = {
    "ecc_corrected": ("NEW_ECC_ERRORS", "ECC errors, corrected"),
    "ecc_uncorrected": ("NEW_ECC_ERRORS", "ECC errors, uncorrected"),
    "pcie_replays": ("NEW_PCIE_REPLAYS", "PCIe replays"),
    "nvlink_errors": ("NEW_NVLINK_ERRORS", "NVLink errors (replays, recoveries, CRC)"),
}
_XID = "xid "
_VERDICTS: dict[FaultCode, CheckVerdict] = {
    "THROTTLED": "WARN",
    "SLOW_DRIVER": "WARN",
    "TELEMETRY_UNREADABLE": "UNKNOWN",
}
# A driver that is busy with a new process may delay the sampler by a second or two; a longer gap hides events.
_GAP_S, _GAP_INTERVALS = 5.0, 3


class ConditionsWatch:
    """Watches each GPU from before a check until after it, for conditions and findings."""

    def __init__(self, context: CertifyContext, check: str, links: Sequence[str] = ()) -> None:
        """Start the watch.

        `links` names the kinds of link whose error counters the check needs: "pcie", "nvlink", both or none.
        """
        self._context, self._check, self._uses = context, check, links
        self._start_s = context.node.now_s()
        self._nvlink_errors = self._read_nvlink_errors()

    def close(self) -> tuple[list[Conditions], list[Finding], set[int]]:
        """End the watch. Return the conditions of each GPU, the findings, and the indices of throttled GPUs."""
        samples = self._context.telemetry.since(self._start_s)
        nvlink_errors = self._read_nvlink_errors()
        conditions, findings, throttled = [], [], set()
        for gpu_index in self._context.gpu_indices:
            gpu_samples = [] if samples is None else samples[gpu_index]
            conditions_of_gpu = self._conditions(gpu_index, gpu_samples, nvlink_errors[gpu_index])
            conditions.append(conditions_of_gpu)
            findings += self._findings(gpu_index, conditions_of_gpu)
            slowdowns = conditions_of_gpu.clock_reasons.keys() & set(SLOWDOWNS)
            if slowdowns or conditions_of_gpu.new_errors.keys() & set(SLOWDOWN_COUNTERS):
                throttled.add(gpu_index)
        return conditions, findings, throttled

    def _read_nvlink_errors(self) -> list[int | None]:
        return map_concurrently(lambda gpu_index: nvlink_errors(self._context, gpu_index), self._context.gpu_indices)

    def _conditions(self, gpu_index: int, samples: Sequence[Sample], nvlink_errors_now: int | None) -> Conditions:
        subject = self._context.label((gpu_index,))
        if not samples:
            return Conditions(subject=subject, samples=0, unreadable=["every metric: no sample was taken"])
        summary = summarize(samples)
        # Samples in which the GPU was not idle, or all where it always was.
        busy = [
            sample
            for sample in samples
            if isinstance(sample.clock_reasons, list) and "GPU_IDLE" not in sample.clock_reasons
        ]
        num_readable = summary.samples - summary.clock_reasons_unknown
        return Conditions(
            subject=subject,
            samples=len(samples),
            sm_clock_mhz=_mean(busy or samples, "sm_clock_mhz"),
            power_w=_mean(busy or samples, "power_w"),
            pcie_width=min(readable_values(samples, "pcie_width"), default=None),
            pcie_generation=max(readable_values(samples, "pcie_generation"), default=None),
            temperature_c=max(readable_values(samples, "temperature_c"), default=None),
            memory_temperature_c=max(readable_values(samples, "memory_temperature_c"), default=None),
            clock_reasons={reason: count / num_readable for reason, count in summary.clock_reasons.items()},
            new_errors=self._new_errors(gpu_index, summary, nvlink_errors_now),
            unreadable=self._unreadable_values(gpu_index, summary),
            slow_driver=summary.slow_driver(),
        )

    def _new_errors(self, gpu_index: int, summary: GpuSummary, nvlink_errors_now: int | None) -> dict[str, int]:
        keys = ("ecc_corrected", "ecc_uncorrected", "pcie_replays", *SLOWDOWN_COUNTERS)
        increases = {key: summary.metrics[key].increase for key in keys}
        new_errors = {key: max(1, round(increase)) for key, increase in increases.items() if increase}
        new_errors.update({f"{_XID}{xid}": summary.xids.count(xid) for xid in summary.xids})
        nvlink_errors_before = self._nvlink_errors[gpu_index]
        if (
            nvlink_errors_before is not None
            and nvlink_errors_now is not None
            and nvlink_errors_now > nvlink_errors_before
        ):
            new_errors["nvlink_errors"] = nvlink_errors_now - nvlink_errors_before
        if summary.lost:
            new_errors["lost"] = 1
        return new_errors

    def _unreadable_values(self, gpu_index: int, summary: GpuSummary) -> list[str]:
        """Return the names of values that were never readable. Values that were readable at times are left out."""
        required = ["sm_clock_mhz", "ecc_corrected", "ecc_uncorrected"]
        required += ["pcie_replays"] if "pcie" in self._uses else []
        missing_keys = [key for key in required if summary.metrics[key].absent == UNKNOWN]
        if summary.clock_reasons_unknown == summary.samples:
            missing_keys.append("clock reasons")
        if summary.longest_gap_s > max(_GAP_S, _GAP_INTERVALS * self._context.interval_s):
            missing_keys.append(f"every metric for {summary.longest_gap_s:.0f} s")
        if summary.xids_unknown == summary.samples:
            missing_keys.append("XID errors")
        links_up = "nvlink" in self._uses and self._context.snapshot.gpus[gpu_index].links_up()
        if links_up and self._nvlink_errors[gpu_index] is None:
            missing_keys.append("NVLink errors")
        return missing_keys

    def _findings(self, gpu_index: int, conditions_of_gpu: Conditions) -> list[Finding]:
        findings = []

        def add(code: FaultCode, message: str, action: str = "") -> None:
            findings.append(
                Finding(
                    code=code,
                    verdict=_VERDICTS.get(code, "FAIL"),
                    check=self._check,
                    subject=conditions_of_gpu.subject,
                    message=message,
                    action=action or faults.ACTIONS[code],
                )
            )

        reasons = conditions_of_gpu.clock_reasons
        slowdowns = [f"{reason} {100 * reasons[reason]:.0f} %" for reason in SLOWDOWNS if reason in reasons]
        if slowdowns or conditions_of_gpu.new_errors.keys() & set(SLOWDOWN_COUNTERS):
            duration_text = f"{', '.join(slowdowns)} of the time" if slowdowns else "briefly, between two samples"
            add("THROTTLED", f"its clocks were held down: {duration_text}")
        for key, count in conditions_of_gpu.new_errors.items():
            if key.startswith(_XID):
                xid = int(key.removeprefix(_XID))
                add("NEW_XID", f"{describe(xid)} x {count}", faults.XID_ACTIONS.get(xid, ""))
            elif key == "lost":
                add("GPU_LOST", LOST_PROBLEM)
            elif key in _ERRORS:
                code, text = _ERRORS[key]
                add(code, f"{count} new {text}")
        if conditions_of_gpu.slow_driver:
            add("SLOW_DRIVER", conditions_of_gpu.slow_driver)
        if conditions_of_gpu.unreadable:
            add("TELEMETRY_UNREADABLE", f"unreadable while the check ran: {', '.join(conditions_of_gpu.unreadable)}")
        # The PCIe generation counts under load only: an idle GPU lowers it to save power.
        maximum, observed = (
            self._context.snapshot.gpus[gpu_index].number("pcie_generation_max"),
            conditions_of_gpu.pcie_generation,
        )
        if "pcie" in self._uses and maximum is not None and observed is not None and observed < maximum:
            message = f"its PCIe link stayed at generation {observed:.0f} of {maximum:.0f} during copies"
            add("PCIE_GENERATION", message)
        lanes_max, lanes = self._context.snapshot.gpus[gpu_index].number("pcie_width_max"), conditions_of_gpu.pcie_width
        if "pcie" in self._uses and lanes_max is not None and lanes is not None and lanes < lanes_max:
            add("PCIE_WIDTH", f"its PCIe link fell to {lanes:.0f} lanes of {lanes_max:.0f} during copies")
        return findings


def nvlink_errors(context: CertifyContext, gpu_index: int) -> int | None:
    """Return the errors of all active links of a GPU since the driver was loaded. Returns None if unreadable."""
    try:
        links = context.snapshot.gpus[gpu_index].links_up()
        return sum(context.node.nvml.nvlink_errors(context.gpus[gpu_index].device, link.link) for link in links)
    except NVMLError:
        return None


def _mean(samples: Sequence[Sample], key: str) -> float | None:
    values = readable_values(samples, key)
    return sum(values) / len(values) if values else None
