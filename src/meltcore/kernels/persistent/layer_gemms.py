"""What a dense decoder computes between two attentions, in one launch for up to 16 decoding sequences, in CUDA C++.

Six kernels of a few microseconds would wait for each other. Here the weights of all four GEMMs are on their way to
shared memory while blocks exchange values (docs/decisions/persistent-decode.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from meltcore.kernels.attention.decode import decode_attention
from meltcore.kernels.attention.metadata import AttentionParams
from meltcore.kernels.gemm.linear import linear
from meltcore.kernels.nvrtc import INSTRUCTIONS, CudaKernel
from meltcore.kernels.persistent import decode_layers
from meltcore.kernels.persistent.decode_layers import SIZES, DecodeLayer

KERNEL = CudaKernel([INSTRUCTIONS, Path(__file__).with_name("layer_gemms.cu")], "layer_gemms")
SHARED_BYTES = 227 * 1024
MAX_TOKENS = 16
_BLOCKS, _THREADS = 128, 9 * 32
_IN_FLIGHT = 2


@cache
def kernel_macros() -> tuple[tuple[str, int], ...]:
    """Return the constants that the kernel is compiled with."""
    head_dim = 128
    return (
        ("HIDDEN", SIZES.hidden),
        ("ATTENTION", SIZES.heads * head_dim),
        ("INTERMEDIATE", SIZES.intermediate),
        ("QKV", (SIZES.heads + 2 * SIZES.kv_heads) * head_dim),
        ("BLOCKS", _BLOCKS),
        ("IN_FLIGHT", _IN_FLIGHT),
    )


def supports(layers: Sequence[DecodeLayer], max_context: int) -> bool:
    """Return whether the kernel supports these layers: those of the persistent kernel, in an even number.

    Launches take two sets of memory in turn, also from the last layer of a step to the first of the next.
    """
    return len(layers) % 2 == 0 and decode_layers.supports(layers, max_context)


class LayerGemms:
    """The layers of a model, ready for decode steps of up to MAX_TOKENS sequences, with their weights and caches."""

    def __init__(self, layers: Sequence[DecodeLayer], rotary: torch.Tensor, scale: float) -> None:
        """Take layers that `supports` returns True for. scale: of the scores; rotary: see `rotary_table`."""
        self._layers = layers
        self._params = [
            AttentionParams(layer.head_norms, rotary, layer.keys, layer.values, scale, None) for layer in layers
        ]
        # Two sets, which hold what the kernel takes for values that have not been written.
        values = 2 * MAX_TOKENS * (2 * SIZES.hidden + SIZES.intermediate)
        self._exchange = torch.full((values,), -1, dtype=torch.int16, device=rotary.device)

    def run(
        self, hidden: torch.Tensor, positions: torch.Tensor, page_table: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """Add all layers to the residual stream `hidden` [tokens, hidden_size] in place, and return it.

        It computes what `decode_layers_reference` does.

        Stores the new tokens' keys and values in the caches. Arguments as those of `decode_attention`. Launches of one
        object must not run at the same time.
        """
        first = self._layers[0]
        try:
            qkv = linear(hidden, first.qkv, first.attention_norm)
            for index, params in enumerate(self._params):
                attention = decode_attention(qkv, params, positions, page_table, rows)
                qkv = self.launch(index, attention.flatten(1), hidden)
        except BaseException:  # the next step would begin with the set that the last launch has filled
            self._exchange.fill_(-1)
            raise
        return hidden

    def launch(self, index: int, attention: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Compute layer `index` after its attention, and QKV of the next layer, which is returned.

        attention: [tokens, heads * head_dim]; residual: [tokens, hidden_size], added to in place; after the last layer
        it is returned.
        """
        layer = self._layers[index]
        after = self._layers[index + 1] if index + 1 < len(self._layers) else None
        qkv = residual if after is None else residual.new_empty(len(residual), len(after.qkv))
        KERNEL.launch(
            (_BLOCKS,),
            _THREADS,
            kernel_macros(),
            [
                *(attention, residual, qkv, layer.output, layer.gate_up, layer.down, (after or layer).qkv),
                *(layer.mlp_norm.weight, (after or layer).attention_norm.weight, self._exchange),
                *(int(after is not None), index % 2, len(residual), layer.mlp_norm.eps),
            ],
            residual.device,
            shared_bytes=SHARED_BYTES,
            pdl=True,
        )
        return qkv
