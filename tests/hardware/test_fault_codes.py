"""Fault codes are an interface: scripts go by their names, people by their actions."""

from meltcore.hardware import faults, xid

# A name may be added here. One that is changed or taken away breaks somebody's script.
STABLE = {
    *("ASYMMETRY", "BELOW_FLOOR", "BUSY", "DRIFT", "ECC_OFF", "ECC_UNCORRECTED", "GPU_LOST", "MIG_ON"),
    *("NEW_ECC_ERRORS", "NEW_NVLINK_ERRORS", "NEW_PCIE_REPLAYS", "NEW_XID", "NO_EXPECTATION", "NO_READING"),
    *("NVLINK_DOWN", "PCIE_GENERATION", "PCIE_WIDTH", "POWER_LIMIT_LOWERED", "PROBE_FAILED", "RECOVERY_ACTION"),
    *("ROWS_REMAPPED_MANY", "ROW_REMAP_FAILED", "ROW_REMAP_PENDING", "STATE_UNREADABLE", "STRAGGLER"),
    *("TELEMETRY_UNREADABLE", "THROTTLED", "TIMED_OUT", "WRONG_ANSWERS", "WRONG_RESULT"),
}


def test_codes_keep_their_names_and_each_has_an_action() -> None:
    codes = {name: value for name, value in vars(faults).items() if name.isupper() and isinstance(value, str)}
    codes = {name: value for name, value in codes.items() if not name.startswith("_")}
    assert set(codes) == STABLE
    assert all(name == value for name, value in codes.items())
    assert set(faults.ACTIONS) == STABLE
    assert all(faults.ACTIONS.values())


def test_every_xid_that_is_named_has_an_action() -> None:
    assert set(faults.XID_ACTIONS) == set(xid._MEANINGS)


def test_a_slow_link_is_looked_for_elsewhere_than_a_slow_gpu() -> None:
    assert "NVLinks" in faults.action("BELOW_FLOOR", "peers")
    assert "PCIe" in faults.action("BELOW_FLOOR", "host")
    assert "clocks" in faults.action("BELOW_FLOOR", "product")
    assert faults.action("TIMED_OUT", "peers") == faults.ACTIONS["TIMED_OUT"]
