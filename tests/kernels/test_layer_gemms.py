"""The kernel of all GEMMs between two attentions: selection, compilation, and on a GPU its results."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from test_decode_layers import PAGE_SIZE, as_float, random_layers

from meltcore.kernels.nvrtc import compile_source
from meltcore.kernels.persistent import decode_layers, layer_gemms
from meltcore.kernels.persistent.decode_layers import SIZES, DecodeLayer, decode_layers_reference
from meltcore.kernels.persistent.layer_gemms import KERNEL, MAX_TOKENS, LayerGemms, kernel_macros, supports
from meltcore.kernels.rotary import rotary_table

SCALE = 128**-0.5
COUNTS = pytest.mark.parametrize("count", [1, 5, 8, 9, 10, MAX_TOKENS])


def test_compiles() -> None:
    assert compile_source(KERNEL.source(), KERNEL.name, dict(kernel_macros()), 90)


@pytest.mark.parametrize(("layers", "supported"), [(27, False), (28, True)])
def test_needs_an_even_number_of_layers(layers: int, supported: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_layers, "supports", lambda layers, max_context: True)
    assert layer_gemms.supports([None] * layers, 4096) is supported  # type: ignore[list-item]


def test_interrupted_step_leaves_no_value_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = SimpleNamespace(head_norms=None, keys=None, values=None, qkv=None, attention_norm=None)
    kernel = LayerGemms([layer] * 4, torch.empty(0), SCALE)  # type: ignore[list-item]
    launched = []

    def launch(index: int, attention: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        if index == 3:
            raise KeyboardInterrupt
        launched.append(index)
        kernel._exchange[index] = 7
        return residual

    monkeypatch.setattr(layer_gemms, "linear", lambda hidden, *_: hidden)
    monkeypatch.setattr(layer_gemms, "decode_attention", lambda qkv, *_: qkv[:, None])
    monkeypatch.setattr(kernel, "launch", launch)
    unused = torch.empty(0)
    with pytest.raises(KeyboardInterrupt):
        kernel.run(torch.zeros(2, 4), unused, unused, unused)
    assert launched == [0, 1, 2]
    assert bool((kernel._exchange == -1).all())


class Step(NamedTuple):
    """A decode step of sequences of different lengths, and a kernel for its layers."""

    kernel: LayerGemms
    rotary: torch.Tensor
    hidden: torch.Tensor
    positions: torch.Tensor
    table: torch.Tensor
    rows: torch.Tensor

    def run(self) -> torch.Tensor:
        return self.kernel.run(self.hidden.clone(), self.positions, self.table, self.rows)


def step_of(count: int, layers: list[DecodeLayer], first_page: int = 0) -> Step:
    if not supports(layers, 1024):
        pytest.skip("this GPU does not support the kernel")
    device = torch.device("cuda")
    rotary = rotary_table(128, 1024, 1e6, device)
    table = first_page + torch.randperm(16 * count, device=device).view(count, 16)
    positions = torch.randint(0, 16 * PAGE_SIZE, (count,), device=device)
    hidden = torch.randn(count, SIZES.hidden, device=device, dtype=torch.bfloat16)
    rows = torch.arange(count, device=device).flip(0)
    return Step(LayerGemms(layers, rotary, SCALE), rotary, hidden, positions, table, rows)


@pytest.mark.gpu
@COUNTS
def test_computes_the_reference(count: int) -> None:
    layers = random_layers(4, 16 * count)
    step = step_of(count, layers)
    before = [(layer.keys.clone(), layer.values.clone()) for layer in layers]
    output = step.run()
    after = [(layer.keys.clone(), layer.values.clone()) for layer in layers]
    for layer, (keys, values) in zip(layers, before, strict=True):
        layer.keys.copy_(keys)
        layer.values.copy_(values)
    wide = [DecodeLayer(*map(as_float, layer)) for layer in layers]
    expected = decode_layers_reference(
        wide, step.hidden.float(), step.rotary, SCALE, step.positions, step.table, step.rows
    )

    assert ((output.float() - expected).norm(dim=1) / expected.norm(dim=1)).max() < 0.01
    for (keys, values), layer in zip(after, wide, strict=True):
        assert (keys.float() - layer.keys).norm() / layer.keys.norm() < 2e-3
        assert (values.float() - layer.values).norm() / layer.values.norm() < 2e-3


@pytest.mark.gpu
def test_repeats_have_the_same_bits() -> None:
    """Also when steps of other sizes run between them, in graphs."""
    counts = (5, MAX_TOKENS, 10, 8)
    layers = random_layers(2, 16 * sum(counts))
    steps = [step_of(count, layers, 16 * sum(counts[:index])) for index, count in enumerate(counts)]
    steps = [step._replace(kernel=steps[0].kernel) for step in steps]
    expected = [step.run() for step in steps]
    graph, outputs = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        outputs = [step.run() for step in steps]
    for _ in range(1000):
        graph.replay()
        assert all(torch.equal(output, other) for output, other in zip(outputs, expected, strict=True))


@pytest.mark.gpu
@COUNTS
def test_padding_changes_no_other_token(count: int) -> None:
    step = step_of(count, random_layers(2, 16 * count))
    everything = step.run()
    kept = count // 2
    step.positions[kept:], step.hidden[kept:], step.table[step.rows[kept:]] = -1, float("nan"), 10**9
    assert torch.equal(step.run()[:kept], everything[:kept])
