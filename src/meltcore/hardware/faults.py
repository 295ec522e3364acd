"""Fault codes: stable names that scripts may rely on, and what to do about each.

Actions follow NVIDIA's GPU debug guidelines and its XID catalogue (docs.nvidia.com/deploy/xid-errors).
"""

from typing import Final

BELOW_FLOOR: Final = "BELOW_FLOOR"
STRAGGLER: Final = "STRAGGLER"
ASYMMETRY: Final = "ASYMMETRY"
THROTTLED: Final = "THROTTLED"
DRIFT: Final = "DRIFT"
NO_READING: Final = "NO_READING"
TIMED_OUT: Final = "TIMED_OUT"
PROBE_FAILED: Final = "PROBE_FAILED"
NO_EXPECTATION: Final = "NO_EXPECTATION"
TELEMETRY_UNREADABLE: Final = "TELEMETRY_UNREADABLE"
BUSY: Final = "BUSY"
NEW_ECC_ERRORS: Final = "NEW_ECC_ERRORS"
NEW_XID: Final = "NEW_XID"
NEW_PCIE_REPLAYS: Final = "NEW_PCIE_REPLAYS"
NEW_NVLINK_ERRORS: Final = "NEW_NVLINK_ERRORS"
GPU_LOST: Final = "GPU_LOST"
ECC_UNCORRECTED: Final = "ECC_UNCORRECTED"
ECC_OFF: Final = "ECC_OFF"
ROW_REMAP_PENDING: Final = "ROW_REMAP_PENDING"
ROW_REMAP_FAILED: Final = "ROW_REMAP_FAILED"
ROWS_REMAPPED_MANY: Final = "ROWS_REMAPPED_MANY"
RECOVERY_ACTION: Final = "RECOVERY_ACTION"
PCIE_WIDTH: Final = "PCIE_WIDTH"
PCIE_GENERATION: Final = "PCIE_GENERATION"
NVLINK_DOWN: Final = "NVLINK_DOWN"
POWER_LIMIT_LOWERED: Final = "POWER_LIMIT_LOWERED"
MIG_ON: Final = "MIG_ON"
STATE_UNREADABLE: Final = "STATE_UNREADABLE"
WRONG_RESULT: Final = "WRONG_RESULT"
WRONG_ANSWERS: Final = "WRONG_ANSWERS"

ACTIONS: dict[str, str] = {
    BELOW_FLOOR: "look at its clocks, power and temperature in this certificate; reseat, cool or replace what is slow",
    STRAGGLER: "compare its power, temperature and clocks with the others'; check its cooling and its slot",
    ASYMMETRY: "check the slower direction's link: NVLink errors, cable, switch port, PCIe slot",
    THROTTLED: "check fans, airflow, inlet temperature and power supply; then certify again",
    DRIFT: "let it run longer and watch temperature: cooling is at its limit",
    NO_READING: "run the check again alone; a GPU that answers zero or nothing should take no work",
    TIMED_OUT: "drain the node; look in the kernel log for XID errors; reset the GPU",
    PROBE_FAILED: "read the message; install torch with CUDA, free the GPU's memory, or look for XID errors",
    NO_EXPECTATION: "certify a node known to be good, then pass its certificate.json as --baseline",
    TELEMETRY_UNREADABLE: "update the driver, or let the job read the GPU's counters; no pass can be vouched for",
    BUSY: "stop the other program, or take the GPU away from this job, and certify again",
    NEW_ECC_ERRORS: "drain the GPU and reset it; if they come again, ask for a replacement",
    NEW_XID: "look the number up in NVIDIA's XID catalogue; drain the GPU",
    NEW_PCIE_REPLAYS: "reseat the card or riser; if they come again, replace the slot's cable or board",
    NEW_NVLINK_ERRORS: "reseat bridge or baseboard; look at the switch's log; if they come again, replace",
    GPU_LOST: "drain and reboot the node; if it is lost again, replace the GPU",
    ECC_UNCORRECTED: "drain the GPU and reset it; if they come again, ask for a replacement",
    ECC_OFF: "turn ECC on with nvidia-smi -e 1 and reboot: without it wrong bits stay unseen",
    ROW_REMAP_PENDING: "drain the GPU and reset it, so that the row is remapped",
    ROW_REMAP_FAILED: "replace the GPU: it has no spare rows left for an error",
    ROWS_REMAPPED_MANY: "ask for a replacement: its memory wears out",
    RECOVERY_ACTION: "do what the driver asks for, then certify again",
    PCIE_WIDTH: "reseat the card; check riser, cable and BIOS bifurcation",
    PCIE_GENERATION: "check the slot's BIOS setting, riser and cable",
    NVLINK_DOWN: "check Fabric Manager, bridge and baseboard; reset the GPU",
    POWER_LIMIT_LOWERED: "raise it with nvidia-smi -pl, or certify against a baseline taken at this limit",
    MIG_ON: "name the slices by UUID, or turn MIG off: whole-GPU figures do not hold",
    STATE_UNREADABLE: "update the driver, or give the job access; what cannot be read cannot be vouched for",
    WRONG_RESULT: "take the GPU out of service at once: it computes wrongly without an error",
    WRONG_ANSWERS: "the hardware may be sound: run the engine's own tests, then a corruption check (--tier full)",
}

# Where a figure under its floor is of a link, by check.
_SLOW_LINKS = {
    "host": "check the slot's PCIe generation and width, its NUMA node, and what else copies; reseat card or riser",
    "peers": "check the NVLinks between the two: state, errors, switch port; reseat bridge or baseboard",
    "collectives": "look for a slow pair among the peer copies (--tier standard), then at NCCL's log (NCCL_DEBUG=INFO)",
}

# Immediate actions of the XID catalogue, for the numbers that name one; others have NEW_XID's.
_PROGRAM = (
    "a program's own fault more often than the GPU's: run it elsewhere; if it follows the GPU, drain and reset it"
)
_RESET = "drain the GPU and reset it; if it comes again, ask for a replacement"
_REBOOT = "drain and reboot the node; if it comes again, replace the GPU or its board"
XID_ACTIONS = {
    13: _PROGRAM,
    31: _PROGRAM,
    43: _PROGRAM,
    45: _PROGRAM,
    48: _RESET,
    62: _RESET,
    63: "drain the GPU when convenient and reset it, so that the row is remapped",
    64: "replace the GPU: it has no spare rows left for an error",
    74: "check the NVLink bridge, baseboard and switch; drain and reset the GPU",
    79: _REBOOT,
    92: "drain the GPU when convenient and watch its ECC counters; if they go on growing, ask for a replacement",
    94: "restart the program that was hit; reset the GPU when convenient",
    95: _RESET,
    119: _REBOOT,
    120: _REBOOT,
    140: _RESET,
}

# nvmlDeviceGetFieldValues, NVML_FI_DEV_GET_GPU_RECOVERY_ACTION.
RECOVERY_WORDS = {
    1: "reset the GPU",
    2: "reboot the node",
    3: "drain peer-to-peer work, then reset",
    4: "drain and reset the GPU",
    5: "recover the IMEX domain",
    6: "reset the bus",
    7: "reboot the system",
}


def action(code: str, check: str) -> str:
    """What to do about a fault that this check found."""
    return _SLOW_LINKS.get(check, ACTIONS[code]) if code == BELOW_FLOOR else ACTIONS[code]
