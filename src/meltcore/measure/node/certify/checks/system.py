"""State of the host: its processes, clock, storage, network links and kernel log, as far as this job may read them."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pynvml import NVMLError

from meltcore.common.process import ProcessError
from meltcore.measure.documents.node import CertificateRow, CheckReport, Finding, Tier
from meltcore.measure.documents.verdicts import CheckVerdict
from meltcore.measure.node.certify import faults
from meltcore.measure.node.certify.check import HardwareCheck
from meltcore.measure.node.certify.context import CertifyContext
from meltcore.measure.node.certify.faults import FaultCode
from meltcore.measure.node.node import Node

_NVME, _INFINIBAND = Path("/sys/class/nvme"), Path("/sys/class/infiniband")
_IMEX_CHANNELS = Path("/dev/nvidia-caps-imex-channels")
_IMEX_QUERY, _IMEX_LIMIT_S = ("nvidia-imex-ctl", "-q"), 10.0
# A process waits uninterruptibly for milliseconds while it reads a disk. Twice at this distance means that it is stuck.
_STUCK_S = 2.0
_MAX_CLOCK_ERROR_S = 1.0
_MAX_NAMES = 5
_LOG_RECORD = re.compile(r"\d+,(\d+),\d+,")
_XID_LINE = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:]+)\S*\): (\d+)")
_AER_LINE = re.compile(r"(\S+): (?:PCIe Bus Error: severity=|AER: )(Uncorrect|Correct)")
_NO_HOST_PROCESSES = "this container does not see the processes of the host"

Outcome = tuple[CheckVerdict, FaultCode | None, str]  # verdict, fault code, note


class SystemCheck(HardwareCheck):
    """Judges what no GPU reports: stuck and zombie processes, clock, NVMe, InfiniBand and RoCE, IMEX, the kernel log.

    A row that this job may not read is UNKNOWN.
    """

    name = "system"
    title = "State of the host"
    required_from: Tier = "full"

    def measure(self, context: CertifyContext) -> CheckReport:
        """Return a report with one row per part of the host, and one per GPU for its XIDs in the kernel log."""
        rows: list[CertificateRow] = []
        findings: list[Finding] = []
        for key, gpus, (verdict, code, note) in _outcomes(context):
            subject = context.label(gpus) if len(gpus) == 1 and key in _GPU_KEYS else "node"
            rows.append(
                CertificateRow(
                    key=f"system/{key}", subject=subject, gpus=list(gpus), unit="", verdict=verdict, note=note
                )
            )
            if code:
                action = faults.ACTIONS[code]
                findings.append(
                    Finding(code=code, verdict=verdict, check=self.name, subject=subject, message=note, action=action)
                )
        return self.report(rows, findings)


_GPU_KEYS = ("xids", "zombies")


def _outcomes(context: CertifyContext) -> Iterator[tuple[str, tuple[int, ...], Outcome]]:
    """Yield (key, GPUs, outcome) of every row."""
    node = context.node
    log = node.kernel_log()
    context.busy()  # gives the processes of the previous check time to exit
    for gpu_index in context.gpu_indices:
        yield "zombies", (gpu_index,), _zombies(context, gpu_index)
        yield "xids", (gpu_index,), _xids(log, str(context.snapshot.gpus[gpu_index].facts.get("bus_id")))
    every_gpu = context.gpu_indices
    yield "pcie_errors", every_gpu, _pcie_errors(log)
    yield "stuck_processes", every_gpu, _stuck_processes(node)
    yield "clock", every_gpu, _clock(node.clock_error_s())
    yield "nvme", every_gpu, _nvme(node)
    yield "network", every_gpu, _network(node)
    yield "imex", every_gpu, _imex(node)


def _unreadable(what: str) -> Outcome:
    return "UNKNOWN", "STATE_UNREADABLE", f"unreadable: {what}"


def _names(names: Sequence[str]) -> str:
    more = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


# --- processes -------------------------------------------------------------------------------------------------------


def _process_state(node: Node, pid: int) -> tuple[str, str] | None:
    """Return (name, state letter) of a process, or None if it does not exist or cannot be read."""
    text = node.read(Path(f"/proc/{pid}/stat"))
    if text is None or ")" not in text:
        return None
    before, _, after = text.rpartition(")")
    return before.partition("(")[2], after.split()[0]


def _zombies(context: CertifyContext, gpu_index: int) -> Outcome:
    """Judge the processes that the driver lists on a GPU: one that has ended still holds the GPU."""
    node = context.node
    try:
        pids = node.nvml.processes(context.gpus[gpu_index].handle)
    except NVMLError:
        return _unreadable("the processes of the GPU")
    states = {pid: _process_state(node, pid) for pid in pids}
    ended = [str(pid) for pid, state in states.items() if state is None or state[1] in "ZX"]
    if not ended:
        return "PASS", None, ""
    if not node.sees_host_processes():
        return _unreadable(f"processes {_names(ended)} of the GPU; {_NO_HOST_PROCESSES}")
    return "FAIL", "ZOMBIE_PROCESS", f"processes that have ended hold it: {_names(ended)}"


def _stuck_processes(node: Node) -> Outcome:
    """Judge the processes in uninterruptible sleep (state D) at two times."""
    if not node.sees_host_processes():
        return _unreadable(_NO_HOST_PROCESSES)
    first = _waiting_processes(node)
    if first:
        node.sleep(_STUCK_S)
    second = _waiting_processes(node) if first else first
    if first is None or second is None:
        return _unreadable("the processes of the host")
    stuck = [f"{name} ({pid})" for pid, name in second.items() if pid in first]
    if stuck:
        return "WARN", "STUCK_PROCESS", f"processes wait uninterruptibly for {_STUCK_S:g} s: {_names(stuck)}"
    return "PASS", None, ""


def _waiting_processes(node: Node) -> dict[int, str] | None:
    """Return the names of processes in state D by process id, or None if the processes of others are hidden."""
    names = node.names(Path("/proc"))
    if names is None or _process_state(node, 1) is None:
        return None
    states = {int(name): _process_state(node, int(name)) for name in names if name.isdigit()}
    return {pid: state[0] for pid, state in states.items() if state is not None and state[1] == "D"}


# --- clock, storage, network, IMEX -----------------------------------------------------------------------------------


def _clock(error_s: float | None) -> Outcome:
    if error_s is None:
        return _unreadable("whether the clock is synchronized")
    if error_s > _MAX_CLOCK_ERROR_S:
        error = "is not synchronized" if error_s == float("inf") else f"may be wrong by {error_s:.1f} s"
        return "WARN", "CLOCK_UNSYNCHRONIZED", f"the clock {error}"
    return "PASS", None, f"wrong by at most {1e3 * error_s:.0f} ms"


def _nvme(node: Node) -> Outcome:
    names = node.names(_NVME)
    if names is None:
        return _unreadable(str(_NVME))
    states = {name: (node.read(_NVME / name / "state") or "").strip() for name in names}
    fault: Outcome = "FAIL", "STORAGE_NOT_LIVE", "NVMe controllers are not live"
    return _device_states("NVMe controller", states, ("live",), fault)


def _network(node: Node) -> Outcome:
    """Judge the ports of InfiniBand and RoCE. A port that is disabled, or that has no cable, is not in use."""
    adapters, states = node.names(_INFINIBAND), {}
    if adapters is None:
        return _unreadable(str(_INFINIBAND))
    for adapter in adapters:
        for port in node.names(_INFINIBAND / adapter / "ports") or ["?"]:
            folder = _INFINIBAND / adapter / "ports" / port
            words = [(node.read(folder / file) or "").strip() for file in ("state", "phys_state")]
            state, physical = (word.partition(": ")[2] for word in words)
            known = state if state == "ACTIVE" else physical if physical == "Disabled" else f"{state}, {physical}"
            states[f"{adapter} port {port}"] = known if state and physical else ""
    fault: Outcome = "WARN", "NETWORK_LINK_DOWN", "links are not active"
    return _device_states("InfiniBand or RoCE adapter", states, ("ACTIVE", "Disabled"), fault)


def _device_states(kind: str, states: Mapping[str, str], healthy: Sequence[str], fault: Outcome) -> Outcome:
    """Judge devices by their states, of which "" is one that cannot be read. The first of `healthy` is counted."""
    if not states:
        return "NOT_APPLICABLE", None, f"there is no {kind} here"
    if faulty := [f"{name} is {state}" for name, state in sorted(states.items()) if state and state not in healthy]:
        return *fault[:2], f"{fault[2]}: {_names(faulty)}"
    if unreadable := sorted(name for name, state in states.items() if not state):
        return _unreadable(f"the state of {_names(unreadable)}")
    return "PASS", None, f"{list(states.values()).count(healthy[0])} {healthy[0].lower()}"


def _imex(node: Node) -> Outcome:
    """Judge the daemon of NVLink between nodes. One that is idle is no fault: the registration of each GPU decides."""
    channels = node.names(_IMEX_CHANNELS)
    if channels is None:
        return _unreadable(str(_IMEX_CHANNELS))
    if not channels:
        return "NOT_APPLICABLE", None, "there is no IMEX channel here"
    try:
        completed = node.run(_IMEX_QUERY, b"", {}, _IMEX_LIMIT_S)
    except ProcessError as error:
        return _unreadable(f"IMEX: {error}")
    answer = completed.stdout.decode(errors="replace").strip().splitlines()
    if completed.returncode != 0 or not answer:
        return _unreadable(f"IMEX: {' '.join(_IMEX_QUERY)} gave status {completed.returncode}")
    return ("PASS" if answer[-1] == "READY" else "RECORDED"), None, f"IMEX is {answer[-1]}"


# --- kernel log ------------------------------------------------------------------------------------------------------


def _span(log: str) -> str:
    """Return what of the host's life a log covers: a record begins with its priority, its number and a time."""
    first = _LOG_RECORD.match(log)
    return f"since record {first[1]}; earlier ones are overwritten" if first and first[1] != "0" else "since the start"


def _xids(log: str | None, bus_id: str) -> Outcome:
    """Judge the XIDs of a GPU in what the kernel log still has."""
    if log is None:
        return _unreadable("the kernel log")
    address = bus_id.rpartition(".")[0].lower()  # the log leaves the function out
    counts = Counter(xid for where, xid in _XID_LINE.findall(log) if where.lower().endswith(address))
    if not counts:
        return "PASS", None, f"the kernel log {_span(log)} has none"
    found = ", ".join(f"XID {xid} x {count}" for xid, count in counts.items())
    return "WARN", "KERNEL_LOG_XID", f"the kernel log {_span(log)} has {found}"


def _pcie_errors(log: str | None) -> Outcome:
    """Judge the errors that PCIe's Advanced Error Reporting wrote."""
    if log is None:
        return _unreadable("the kernel log")
    errors = _AER_LINE.findall(log)
    if not errors:
        return "PASS", None, f"the kernel log {_span(log)} has none"
    devices = _names(list(dict.fromkeys(device for device, _ in errors)))
    is_uncorrected = any(severity == "Uncorrect" for _, severity in errors)
    kind = "uncorrected" if is_uncorrected else "corrected"
    note = f"the kernel log {_span(log)} has {len(errors)} PCIe errors, {kind}: {devices}"
    return ("FAIL" if is_uncorrected else "WARN"), "KERNEL_LOG_PCIE", note
