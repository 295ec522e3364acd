"""Products with float16 weights on a CPU: those of float32, and the same bits for any number of tokens and threads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meltcore.kernels.gemm.half_weight import PackedHalf, half_linear, supports_half_weights

pytestmark = pytest.mark.skipif(not supports_half_weights(), reason="this processor has no FBGEMM")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def drawn(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Values of any magnitude that weights have, those below float16's smallest normal number too."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-24, 1, (rows, columns), generator=generator)
    return torch.randn(rows, columns, generator=generator) * 2.0**exponents


@settings(deadline=None, max_examples=25)
@given(
    rows=st.integers(1, 70),
    columns=st.integers(1, 600),
    tokens=st.integers(0, 40),
    in_two_parts=st.booleans(),
    seed=st.integers(0, 99),
)
def test_product_is_that_of_the_held_values(
    rows: int, columns: int, tokens: int, in_two_parts: bool, seed: int
) -> None:
    values, hidden = drawn(rows, columns, seed), torch.randn(tokens, columns)
    held = values if in_two_parts else values.half()
    expected = hidden.double() @ held.double().T
    largest = (hidden.double().abs() @ held.double().abs().T).amax() if tokens else 1.0
    error = (half_linear(hidden, PackedHalf(values, in_two_parts=in_two_parts)) - expected).abs()
    # Of the largest sum of magnitudes: what sums in float32 round. One part alone would be 100 times as far.
    assert tokens == 0 or error.max() <= 1e-6 * largest


@pytest.mark.parametrize(("rows", "columns"), [(960, 576), (49, 1537)])
def test_a_token_has_the_same_bits_alone_and_in_a_batch(rows: int, columns: int) -> None:
    weight, hidden = PackedHalf(drawn(rows, columns, 1), in_two_parts=True), torch.randn(37, columns)
    together = half_linear(hidden, weight)
    torch.set_num_threads(3)
    for size in (1, 2, 5, 36):
        for start in range(0, 37 - size, 7):
            assert torch.equal(half_linear(hidden[start : start + size], weight), together[start : start + size])


@pytest.mark.parametrize("value", [65_520.0, -1e6, float("inf"), float("nan")])
def test_values_that_float16_cannot_hold_are_refused(value: float) -> None:
    values = torch.zeros(17, 20)
    values[16, 19] = value
    with pytest.raises(ValueError, match="float16 holds up to 65504"):
        PackedHalf(values)


MEASURE = """
import re, sys, torch
from meltcore.kernels.gemm.half_weight import PackedHalf

def anonymous_bytes():
    return int(re.search(r"RssAnon:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

for columns in map(int, sys.argv[1:]):
    values = torch.randn(16_384, columns).half().float()
    PackedHalf(values[:16])  # What the first call allocates once is not of the weight.
    before = anonymous_bytes()
    weight = PackedHalf(values)
    print(weight.nbytes, anonymous_bytes() - before)
    del weight
"""


@pytest.mark.slow
def test_planned_bytes_are_those_that_a_packed_weight_takes() -> None:
    # A process of its own, whose malloc maps every weight: elsewhere the heap may hold freed pages, and nothing grows.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", MEASURE, "576", "640", "1536"]
    printed = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=300).stdout
    measured = [tuple(map(int, line.split())) for line in printed.splitlines()]
    assert len(measured) == 3
    for planned, taken in measured:
        assert taken == pytest.approx(planned, abs=2**21)
