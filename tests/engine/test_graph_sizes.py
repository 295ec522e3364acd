"""The batch sizes that decode graphs are captured for."""

from __future__ import annotations

import pytest

from meltcore.engine.graphs import padded_sizes


@pytest.mark.parametrize("most", [1, 3, 8, 100, 256, 1000, 1024, 5000])
def test_every_batch_has_a_size_and_padding_stays_small(most: int) -> None:
    sizes = padded_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    for count in range(1, most + 1):
        size = next(size for size in sizes if size >= count)
        assert size - count <= max(4, count // 2)
