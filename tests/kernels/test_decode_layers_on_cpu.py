"""The persistent kernel of all decode layers without a GPU: compilation, and its results.

Its CUDA C++ is compiled for the CPU too, where cuda_emulation.h runs all threads of all blocks.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cuda_emulation import COMPILER, emulate_launches
from decode_layers import as_float
from test_decode_layers import PAGE_SIZE, random_layers

from meltcore.kernels.nvrtc import compile_source
from meltcore.kernels.persistent import decode_layers
from meltcore.kernels.persistent.decode_layers import (
    FEW_TOKENS,
    KERNEL,
    MAX_TOKENS,
    SIZES,
    DecodeLayer,
    DecodeLayers,
    decode_layers_reference,
    kernel_macros,
)
from meltcore.kernels.rotary import rotary_table

LAYERS, PAGES, SCALE = 2, 40, 128**-0.5


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [FEW_TOKENS, MAX_TOKENS])
def test_compiles(tokens: int) -> None:
    assert compile_source(KERNEL.source(), KERNEL.name, dict(kernel_macros(tokens, 28, PAGE_SIZE)), "90a")


@pytest.fixture
def launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Makes launches of the kernel run on the CPU. The seeds of those that ran."""
    return emulate_launches(KERNEL, Path(decode_layers.__file__).with_suffix(".cu"), tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_computes_the_reference_on_a_cpu(launches: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Several launches of one object, also of both forms: a launch meets what those before it have left.

    With MANY_TILES at 1, the last two have as many copying warps as steps of long contexts, and the first two one.
    """
    layers = random_layers(LAYERS, PAGES, "cpu")
    rotary = rotary_table(128, PAGES * PAGE_SIZE, 1e6, torch.device("cpu"))
    kernel = DecodeLayers(layers, rotary, SCALE)
    of_16 = [3, 64, 129, 8, 0, -1, 17, 300, 1, 63, 250, 7, 65, 2, 9, 31]  # 128 tiles of keys, one for each block
    monkeypatch.setattr(decode_layers, "_MANY_TILES", 1)
    kernel_macros.cache_clear()
    for positions in ([700, -1, 0], of_16, [1500], [300, 900, 20, 7, 640, 5]):
        count = len(positions)
        hidden = torch.randn(count, SIZES.hidden).bfloat16()
        table, rows = torch.full((count, PAGES), 10**9), torch.randperm(count)  # other pages would be an illegal access
        free = torch.randperm(PAGES)
        for row, position in zip(rows, positions, strict=True):
            used = position // PAGE_SIZE + 1
            table[row, :used], free = free[:used], free[used:]
            for each in (each for layer in layers for each in (layer.keys, layer.values)):
                each[table[row, used - 1 : used], max(position, 0) % PAGE_SIZE :] = float("nan")
        wide = [DecodeLayer(*map(as_float, layer)) for layer in layers]
        arguments = torch.tensor(positions), table, rows
        output = kernel.run(hidden, *arguments)
        expected = decode_layers_reference(wide, hidden.float(), rotary, SCALE, *arguments)

        assert ((output.float() - expected).norm(dim=1) / expected.norm(dim=1)).max() < 0.01
        for layer, other in zip(layers, wide, strict=True):
            for each, wide_cache in ((layer.keys, other.keys), (layer.values, other.values)):
                torch.testing.assert_close(each.float(), wide_cache, rtol=0.02, atol=0.02, equal_nan=True)
                each.copy_(torch.randn_like(each))
    assert len(launches) == 4
    kernel_macros.cache_clear()
