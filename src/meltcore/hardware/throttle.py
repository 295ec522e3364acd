"""Why the clocks are what they are: NVML's clock event reasons as words."""

GPU_IDLE = "GPU_IDLE"
SW_POWER_CAP = "SW_POWER_CAP"
HW_SLOWDOWN = "HW_SLOWDOWN"
SW_THERMAL_SLOWDOWN = "SW_THERMAL_SLOWDOWN"
HW_THERMAL_SLOWDOWN = "HW_THERMAL_SLOWDOWN"
HW_POWER_BRAKE = "HW_POWER_BRAKE"

# nvmlClocksEventReason*, in the API's order.
_WORDS: dict[int, str] = {
    0x1: GPU_IDLE,
    0x2: "APPLICATION_CLOCKS",
    0x4: SW_POWER_CAP,
    0x8: HW_SLOWDOWN,
    0x10: "SYNC_BOOST",
    0x20: SW_THERMAL_SLOWDOWN,
    0x40: HW_THERMAL_SLOWDOWN,
    0x80: HW_POWER_BRAKE,
    0x100: "DISPLAY_CLOCKS",
    0x200: "BOARD_LIMIT",
    0x400: "RELIABILITY",
}

# Reasons a healthy, well cooled and well fed GPU never gives. SW_POWER_CAP is not among them: any large matrix product
# meets the power limit, as designed.
SLOWDOWNS = (HW_SLOWDOWN, HW_THERMAL_SLOWDOWN, HW_POWER_BRAKE, SW_THERMAL_SLOWDOWN)


def words(mask: int) -> list[str]:
    """The reasons set in `mask`; a bit this table does not know comes out by its number."""
    named = [word for bit, word in _WORDS.items() if mask & bit]
    unnamed = [1 << place for place in range(mask.bit_length()) if mask & 1 << place and 1 << place not in _WORDS]
    return named + [f"REASON_{bit:#x}" for bit in unnamed]
