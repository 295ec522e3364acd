"""Fault codes are an interface: scripts use their names, people their actions."""

from typing import get_args

from meltcore.common.gpus import xid
from meltcore.measure.node.certify import faults

# Names may be added. Changing or removing one breaks users' scripts.
STABLE = {
    *("ASYMMETRY", "BELOW_FLOOR", "BUSY", "DRIFT", "ECC_OFF", "ECC_UNCORRECTED", "GPU_LOST", "MIG_ON"),
    *("NEW_ECC_ERRORS", "NEW_NVLINK_ERRORS", "NEW_PCIE_REPLAYS", "NEW_XID", "NO_EXPECTATION", "NO_READING"),
    *("NVLINK_DOWN", "PCIE_GENERATION", "PCIE_WIDTH", "POWER_LIMIT_LOWERED", "PROBE_FAILED", "RECOVERY_ACTION"),
    *("ROWS_REMAPPED_MANY", "ROW_REMAP_FAILED", "ROW_REMAP_PENDING", "SLOW_DRIVER", "STATE_UNREADABLE", "STRAGGLER"),
    *("CLOCK_UNSYNCHRONIZED", "FABRIC_NOT_REGISTERED", "FABRIC_UNHEALTHY", "FIRMWARE_DIFFERS", "KERNEL_LOG_PCIE"),
    *("KERNEL_LOG_XID", "NETWORK_LINK_DOWN", "STORAGE_NOT_LIVE", "STUCK_PROCESS", "ZOMBIE_PROCESS"),
    *("TELEMETRY_UNREADABLE", "THROTTLED", "TIMED_OUT", "WRONG_ANSWERS", "WRONG_RESULT"),
}


def test_codes_keep_their_names_and_each_has_an_action() -> None:
    assert set(get_args(faults.FaultCode)) == STABLE
    assert set(faults.ACTIONS) == STABLE
    assert all(faults.ACTIONS.values())


def test_every_described_xid_has_an_action() -> None:
    assert set(faults.XID_ACTIONS) == set(xid.MEANINGS)


def test_slow_link_and_slow_gpu_have_different_actions() -> None:
    assert "NVLinks" in faults.fault_action("BELOW_FLOOR", "peers")
    assert "PCIe" in faults.fault_action("BELOW_FLOOR", "host")
    assert "clocks" in faults.fault_action("BELOW_FLOOR", "gemm")
    assert faults.fault_action("TIMED_OUT", "peers") == faults.ACTIONS["TIMED_OUT"]
