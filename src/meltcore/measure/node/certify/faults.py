"""Fault codes, which are stable for scripts, and the action for each.

Actions follow NVIDIA's GPU debug guidelines and XID catalog (docs.nvidia.com/deploy/xid-errors).
"""

from typing import Literal

FaultCode = Literal[
    "BELOW_FLOOR",
    "STRAGGLER",
    "ASYMMETRY",
    "THROTTLED",
    "DRIFT",
    "NO_READING",
    "TIMED_OUT",
    "PROBE_FAILED",
    "NO_EXPECTATION",
    "TELEMETRY_UNREADABLE",
    "SLOW_DRIVER",
    "BUSY",
    "NEW_ECC_ERRORS",
    "NEW_XID",
    "NEW_PCIE_REPLAYS",
    "NEW_NVLINK_ERRORS",
    "GPU_LOST",
    "ECC_UNCORRECTED",
    "ECC_OFF",
    "ROW_REMAP_PENDING",
    "ROW_REMAP_FAILED",
    "ROWS_REMAPPED_MANY",
    "RECOVERY_ACTION",
    "PCIE_WIDTH",
    "PCIE_GENERATION",
    "NVLINK_DOWN",
    "POWER_LIMIT_LOWERED",
    "MIG_ON",
    "STATE_UNREADABLE",
    "FABRIC_NOT_REGISTERED",
    "FABRIC_UNHEALTHY",
    "FIRMWARE_DIFFERS",
    "ZOMBIE_PROCESS",
    "STUCK_PROCESS",
    "CLOCK_UNSYNCHRONIZED",
    "STORAGE_NOT_LIVE",
    "NETWORK_LINK_DOWN",
    "KERNEL_LOG_XID",
    "KERNEL_LOG_PCIE",
    "WRONG_RESULT",
    "WRONG_ANSWERS",
]

ACTIONS: dict[FaultCode, str] = {
    "BELOW_FLOOR": "check its clocks, power and temperature in this certificate; reseat, cool or replace the slow part",
    "STRAGGLER": "compare its power, temperature and clocks with the others'; check its cooling and its slot",
    "ASYMMETRY": "check the slower direction's link: NVLink errors, cable, switch port, PCIe slot",
    "THROTTLED": "check fans, airflow, inlet temperature and power supply; then certify again",
    "DRIFT": "run longer and watch the temperature: cooling is at its limit",
    "NO_READING": "repeat the check alone; give no work to a GPU whose results are zero or missing",
    "TIMED_OUT": "drain the node; check the kernel log for XID errors; reset the GPU",
    "PROBE_FAILED": "read the message; install torch with CUDA, free the GPU's memory, or check for XID errors",
    "NO_EXPECTATION": "certify a node known to be good, then pass its certificate.json as --baseline",
    "TELEMETRY_UNREADABLE": "update the driver, or let the job read the GPU's counters; without them nothing can pass",
    "SLOW_DRIVER": "drain the GPU and look in the kernel log: a failing GPU answers late before it reports an error",
    "BUSY": "stop the other program or exclude the GPU, then certify again",
    "NEW_ECC_ERRORS": "drain the GPU and reset it; if they recur, ask for a replacement",
    "NEW_XID": "look the number up in NVIDIA's XID catalog; drain the GPU",
    "NEW_PCIE_REPLAYS": "reseat the card or riser; if they recur, replace the slot's cable or board",
    "NEW_NVLINK_ERRORS": "reseat bridge or baseboard; check the switch's log; if they recur, replace",
    "GPU_LOST": "drain and reboot the node; if the GPU is lost again, replace it",
    "ECC_UNCORRECTED": "drain the GPU and reset it; if they recur, ask for a replacement",
    "ECC_OFF": "enable ECC with nvidia-smi -e 1 and reboot: without it wrong bits go unnoticed",
    "ROW_REMAP_PENDING": "drain the GPU and reset it, to remap the row",
    "ROW_REMAP_FAILED": "replace the GPU: it has no spare rows left",
    "ROWS_REMAPPED_MANY": "ask for a replacement: its memory wears out",
    "RECOVERY_ACTION": "follow the recovery action of the driver, then certify again",
    "PCIE_WIDTH": "reseat the card; check riser, cable and BIOS bifurcation",
    "PCIE_GENERATION": "check the slot's BIOS setting, riser and cable",
    "NVLINK_DOWN": "check Fabric Manager, bridge and baseboard; reset the GPU",
    "POWER_LIMIT_LOWERED": "raise it with nvidia-smi -pl, or certify against a baseline taken at this limit",
    "MIG_ON": "select MIG devices by UUID, or turn MIG off: expectations for whole GPUs do not apply",
    "STATE_UNREADABLE": "update the driver, or give the job access (of the host: root, no container, or docker's "
    "--privileged --pid host): an unreadable state cannot pass",
    "FABRIC_NOT_REGISTERED": "start Fabric Manager in the driver's version (systemctl status nvidia-fabricmanager)",
    "FABRIC_UNHEALTHY": "read Fabric Manager's log; check switches, baseboard and cables; reset all GPUs",
    "FIRMWARE_DIFFERS": "flash one version on all GPUs of the type, or ask the vendor which one",
    "ZOMBIE_PROCESS": "end or reap its parent process; if the GPU stays held, reset it",
    "STUCK_PROCESS": "look in the kernel log for the driver or file system that they wait for; reboot if they stay",
    "CLOCK_UNSYNCHRONIZED": "start chrony or systemd-timesyncd on the host",
    "STORAGE_NOT_LIVE": "look in the kernel log for its NVMe errors; reseat or replace the drive",
    "NETWORK_LINK_DOWN": "check cable, transceiver and switch port; disable a port that is not in use",
    "KERNEL_LOG_XID": "look the number up in NVIDIA's XID catalog; drain the GPU if it recurs",
    "KERNEL_LOG_PCIE": "reseat the device; check riser, cable and slot",
    "WRONG_RESULT": "take the GPU out of service immediately: it computes wrong results without an error",
    "WRONG_ANSWERS": "the hardware may be healthy: run the engine's own tests, then a corruption check (--tier full)",
}

# Actions for a link below its floor, by check.
_SLOW_LINKS = {
    "host": "check the slot's PCIe generation and width, its NUMA node, and other copies; reseat card or riser",
    "peers": "check the NVLinks between the two: state, errors, switch port; reseat bridge or baseboard",
    "collectives": "look for a slow pair in the peer copies (--tier standard), then in NCCL's log "
    "(NCCL_DEBUG=INFO NCCL_DEBUG_FILE=nccl.%p)",
}

# Immediate actions of the XID catalog, for the numbers that have one; others have the action of NEW_XID.
_PROGRAM = "usually a fault of the program: run it on another GPU; if the error stays with this GPU, drain and reset it"
_RESET = "drain the GPU and reset it; if it recurs, ask for a replacement"
_REBOOT = "drain and reboot the node; if it recurs, replace the GPU or its board"
XID_ACTIONS = {
    13: _PROGRAM,
    31: _PROGRAM,
    43: _PROGRAM,
    45: _PROGRAM,
    48: _RESET,
    62: _RESET,
    63: "drain and reset the GPU when convenient, to remap the row",
    64: "replace the GPU: it has no spare rows left",
    74: "check the NVLink bridge, baseboard and switch; drain and reset the GPU",
    79: _REBOOT,
    92: "drain the GPU when convenient and watch its ECC counters; if they keep growing, ask for a replacement",
    94: "restart the program that was hit; reset the GPU when convenient",
    95: _RESET,
    119: _REBOOT,
    120: _REBOOT,
    140: _RESET,
}

# Values of NVML_FI_DEV_GET_GPU_RECOVERY_ACTION.
RECOVERY_ACTIONS = {
    1: "reset the GPU",
    2: "reboot the node",
    3: "drain peer-to-peer work, then reset",
    4: "drain and reset the GPU",
    5: "recover the IMEX domain",
    6: "reset the bus",
    7: "reboot the system",
}


def fault_action(code: FaultCode, check: str) -> str:
    """Return the action for a fault that this check found."""
    return _SLOW_LINKS.get(check, ACTIONS[code]) if code == "BELOW_FLOOR" else ACTIONS[code]
