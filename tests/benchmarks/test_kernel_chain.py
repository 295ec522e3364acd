"""How much later each kernel of a layer ends than the one before it."""

from __future__ import annotations

import re

import pytest
from kernel_chain import Kernel, chains_of

BEGINS = re.compile("attend")


def layer(start_us: float, *, with_experts: bool) -> list[Kernel]:
    """Attention of 10 us, a product that starts with it and ends 4 us later, then experts or not."""
    kernels = [Kernel("attend", start_us, start_us + 10), Kernel("product", start_us, start_us + 14)]
    return [*kernels, Kernel("experts", start_us + 5, start_us + 20)] if with_experts else kernels


def test_layers_of_the_same_kernels_stand_together() -> None:
    kernels = [Kernel("embed", 0, 1)]
    for number in range(6):
        kernels += layer(1 + 30.0 * number, with_experts=number % 3 != 2)
    experts, dense = chains_of(reversed(kernels), BEGINS)
    assert [link.name for link in experts.links] == ["attend", "product", "experts"]
    assert (experts.layers, dense.layers) == (4, 1)  # what follows the last "attend" may belong to something else
    assert [link.lasts_us for link in experts.links] == [10, 14, 15]
    assert [link.later_us for link in experts.links[1:]] == [4, 6]
    assert [link.later_us for link in dense.links] == [20, 4]
    assert dense.time_us == 24


@pytest.mark.parametrize("kernels", [[], [Kernel("attend", 0, 1)], [Kernel("other", 0, 1), Kernel("other", 1, 2)]])
def test_without_two_beginnings_there_is_no_chain(kernels: list[Kernel]) -> None:
    assert chains_of(kernels, BEGINS) == []
