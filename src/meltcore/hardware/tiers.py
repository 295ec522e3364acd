"""The tiers: which checks each one requires, in the order they run."""

from meltcore.hardware.checks.base import Check
from meltcore.hardware.checks.collectives import Collectives
from meltcore.hardware.checks.corruption import Corruption
from meltcore.hardware.checks.host import Host
from meltcore.hardware.checks.inference import Inference
from meltcore.hardware.checks.memory import Memory
from meltcore.hardware.checks.peers import Peers
from meltcore.hardware.checks.product import Product
from meltcore.hardware.checks.state import State
from meltcore.hardware.checks.sustained import Sustained
from meltcore.results.certificate import Tier

_QUICK: tuple[type[Check], ...] = (State, Product, Memory, Host, Collectives)
_ALL: tuple[type[Check], ...] = (
    State,
    Product,
    Memory,
    Host,
    Peers,
    Collectives,
    Sustained,
    Corruption,
    Inference,
)


def required(tier: Tier) -> list[Check]:
    return [check() for check in (_QUICK if tier == "quick" else _ALL)]
