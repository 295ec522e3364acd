"""What each figure should be: from the topology, the shipped priors, and the user's own baseline. The strictest wins.

Topology needs no table of products: links times speed, SMs times clock, PCIe generation and width, bus width times
memory clock. The shares of these ceilings that healthy GPUs reach are written beside each.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from meltcore.errors import ConfigError
from meltcore.hardware.priors import PRIORS
from meltcore.results.certificate import Certificate, Expectation, Row
from meltcore.results.snapshot import GpuState

# A healthy reading of a product differs by a few percent between machines; cloud acceptance floors stand at 85 to 90 %.
PRIOR_FLOOR = 0.90
# Products run at the power limit, where cards of one kind differ more: most H200s gave 662 to 688 TFLOP/s at 8192^3,
# others 769 and 791-799, and a program of another make the same on those that it ran on (2026-11).
PRODUCT_FLOOR = 0.80
# Of one's own node, between runs.
BASELINE_FLOOR = 0.95

# Dense floating-point operations a clock and SM, with float32 sums (NVIDIA's architecture papers). GeForce parts sum
# in float32 at half the rate.

_BF16_PER_CLOCK: dict[str, int] = {"8.0": 2048, "9.0": 4096}
_GEFORCE_BF16_PER_CLOCK: dict[str, int] = {"8.6": 256, "8.9": 512, "12.0": 512}
_RELATIVE_RATE = {"bf16": 1.0, "fp16": 1.0, "tf32": 0.5, "fp8": 2.0}
# H200 SXM: 791-799 of 1,070 TFLOP/s at 8192^3 and 667-695 at model shapes; power keeps it off its highest clock.
_PRODUCT_SHARE = {"square": 0.70, "model": 0.60}
_FP8_SHARE = {"square": 0.66, "model": 0.50}

# H200 SXM: copy 4,270-4,290 and read 4,380-4,450 of 4,917 GB/s.
_MEMORY_SHARE = {"copy": 0.85, "read": 0.87, "write": 0.80}

# GB/s of a lane, one way, after line coding (PCI-SIG): 8, 16 and 32 GT/s with 128b/130b.
_PCIE_LANE = {3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
_PCIE_SHARE = 0.86  # H200 SXM: 53-55 of 63 GB/s

_PEER_SHARE = 0.81  # of links x speed: 386-396 of 478 by NVSwitch, 133 of 159 by a bridge
# Ring collectives, bus bandwidth: of links x speed, from 1 GiB on. Two H200 SXM: 328-330 of 478 GB/s, but 266 and 277
# where they gather or scatter; four 352-356, and 325-332.
_RING_SHARE = {("all_reduce", 2): 0.66, ("all_gather", 2): 0.55, ("reduce_scatter", 2): 0.57}
_RING_SHARE_OF_MORE = {"all_reduce": 0.74, "all_gather": 0.69, "reduce_scatter": 0.69}


def product_ceiling(gpu: GpuState, dtype: str) -> float | None:
    """TFLOP/s with every SM at the highest clock."""
    sms, clock_mhz = gpu.number("sm_count"), gpu.number("sm_clock_max_mhz")
    rates = _GEFORCE_BF16_PER_CLOCK if "GeForce" in gpu.name else _BF16_PER_CLOCK
    rate = rates.get(str(gpu.facts.get("compute_capability")))
    if sms is None or clock_mhz is None or rate is None:
        return None
    return sms * clock_mhz * 1e6 * rate * _RELATIVE_RATE[dtype] / 1e12


def product(gpu: GpuState, dtype: str, shape: str) -> Expectation | None:
    """`shape`: "square" or "model"."""
    ceiling = product_ceiling(gpu, dtype)
    share = (_FP8_SHARE if dtype == "fp8" else _PRODUCT_SHARE)[shape]
    return _topology(ceiling, share, "SMs x highest clock", PRODUCT_FLOOR)


def memory(gpu: GpuState, kind: str) -> Expectation | None:
    """GB/s of device memory."""
    bits, clock_mhz = gpu.number("memory_bus_bits"), gpu.number("memory_clock_max_mhz")
    ceiling = None if bits is None or clock_mhz is None else bits / 8 * clock_mhz * 2 / 1e3
    return _topology(ceiling, _MEMORY_SHARE[kind], "bus width x memory clock")


def host(gpu: GpuState) -> Expectation | None:
    """GB/s between host and device, one way."""
    generation, width = gpu.number("pcie_generation_max"), gpu.number("pcie_width_max")
    lane = None if generation is None else _PCIE_LANE.get(int(generation))
    ceiling = None if lane is None or width is None else lane * width
    return _topology(ceiling, _PCIE_SHARE, f"PCIe {generation:g} x {width:g}" if ceiling else "")


def peer(link_gbps: float | None, links: int, ways: int) -> Expectation | None:
    """GB/s between two GPUs; `link_gbps` is the sum over their links, one way."""
    ceiling = None if link_gbps is None else link_gbps * ways
    return _topology(ceiling, _PEER_SHARE, f"{links} NVLinks x speed")


def collective(link_gbps: float | None, operation: str, gpus: int) -> Expectation | None:
    """Bus bandwidth in GB/s of a ring; `link_gbps` of the GPU with the least."""
    share = _RING_SHARE.get((operation, gpus), _RING_SHARE_OF_MORE[operation])
    return _topology(link_gbps, share, "NVLinks x speed, ring")


def _topology(ceiling: float | None, share: float, why: str, floor_share: float = PRIOR_FLOOR) -> Expectation | None:
    if ceiling is None or ceiling <= 0:
        return None
    value = share * ceiling
    return Expectation(
        source="topology",
        value=value,
        floor=floor_share * value,
        why=f"{why} = {ceiling:.0f}, {100 * share:.0f} % of it",
    )


def prior(gpus: Sequence[GpuState], key: str) -> Expectation | None:
    """Only where all GPUs of the row are of the same known product, and whole."""
    names = {gpu.name for gpu in gpus}
    if len(names) != 1 or any(gpu.mig for gpu in gpus):
        return None
    found = PRIORS.get(names.pop(), {}).get(key)
    if found is None:
        return None
    floor = (PRODUCT_FLOOR if power_limited(key) else PRIOR_FLOOR) * found.value
    return Expectation(source="prior", value=found.value, floor=floor, why=found.source)


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """A node's own figures, from an earlier certificate: `figures[key][uuids]`, joined by "+", and a median for others.

    `medians[key]` serves GPUs that the baseline has not met, if they are of one of its products.
    """

    taken: str
    products: list[str]
    figures: dict[str, dict[str, float]]
    medians: dict[str, float]

    def expectation(self, gpus: Sequence[GpuState], key: str) -> Expectation | None:
        value = self.figures.get(key, {}).get("+".join(gpu.uuid for gpu in gpus))
        why = f"the same GPUs on {self.taken}"
        if value is None and {gpu.name for gpu in gpus} <= set(self.products):
            value, why = self.medians.get(key), f"median of the baseline's GPUs on {self.taken}"
        if value is None:
            return None
        return Expectation(source="baseline", value=value, floor=BASELINE_FLOOR * value, why=why)


def make_baseline(certificate: Certificate) -> Baseline:
    """From an earlier certificate: figures that passed, were recorded, or had nothing to be held against.

    Raises ConfigError for a certificate that FAILs: a node in that state is no measure for anything.
    """
    if certificate.verdict == "FAIL":
        raise ConfigError(
            f"the certificate of {certificate.started} says FAIL and makes no baseline: settle that first"
        )
    figures: dict[str, dict[str, float]] = {}
    for row in (row for check in certificate.checks for row in check.rows if _sound(row)):
        if row.measured is not None:
            uuids = "+".join(certificate.snapshot.gpus[gpu].uuid for gpu in row.gpus)
            figures.setdefault(row.key, {})[uuids] = row.measured
    return Baseline(
        taken=certificate.started,
        products=sorted({gpu.name for gpu in certificate.snapshot.gpus}),
        figures=figures,
        medians={key: median(values.values()) for key, values in figures.items()},
    )


def _sound(row: Row) -> bool:
    return row.verdict in ("PASS", "RECORDED") or (row.verdict == "UNKNOWN" and not row.expectations)


def power_limited(key: str) -> bool:
    """Whether a figure is of products, in which cards of one kind differ most."""
    return key.startswith(("product/", "sustained/"))


def strictest(expectations: Sequence[Expectation]) -> Expectation | None:
    """The one with the highest floor: a baseline taken from a slow node cannot excuse a slow node."""
    return max(expectations, key=lambda found: found.floor, default=None)


def usable(value: float | None) -> bool:
    """A reading to believe: zero, NaN and infinity are none."""
    return value is not None and math.isfinite(value) and value > 0
