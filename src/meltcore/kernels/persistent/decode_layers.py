"""All layers of a dense decoder in one launch, for one new token of each of up to 16 sequences, in CUDA C++.

In a chain of kernels the memory idles between any two kernels. Here the next weights, keys and values are loaded to
shared memory while blocks exchange values (docs/decisions/persistent-decode.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from meltcore.kernels.attention.decode import decode_attention_reference
from meltcore.kernels.attention.metadata import AttentionParams, HeadNorms
from meltcore.kernels.capability import capability, sm_count
from meltcore.kernels.norm import Norm, rms_norm_reference
from meltcore.kernels.nvrtc import INSTRUCTIONS, CudaKernel

KERNEL = CudaKernel([INSTRUCTIONS, Path(__file__).with_name("decode_layers.cu")], "decode_layers", suffix="a")
MAX_TOKENS = 16
# Of the batch sizes that are captured: from 8 on, one copy of several rows is faster than shorter code.
FEW_TOKENS = 4
SHARED_BYTES = 227 * 1024
_CAPABILITY = 90  # bulk copies; measured there
_BLOCKS, _THREADS, _SLOTS = 128, 12 * 32, 12
_IN_FLIGHT, _IN_FLIGHT_LONG, _MANY_TILES = 2, 4, 32
_HEAD_DIM, _TILE_KEYS = 128, 8
_SETS = 3  # of exchanged values, as in decode_layers.cu


class LayerSizes(NamedTuple):
    """The sizes of a layer."""

    hidden: int
    heads: int
    kv_heads: int
    intermediate: int


# Those whose rows the blocks share equally: Qwen3-0.6B's.
SIZES = LayerSizes(1024, 16, 8, 3072)
# A block has parts of the attention of at most two sequences that it shares: sums, maximum and total of each head.
_PART_BYTES = _BLOCKS * 2 * SIZES.heads * (4 * _HEAD_DIM + 16)
_QKV_ROWS = (SIZES.heads + 2 * SIZES.kv_heads) * _HEAD_DIM
_TOKEN_BYTES = 2 * (_QKV_ROWS + SIZES.heads * _HEAD_DIM + 2 * SIZES.hidden + SIZES.intermediate)
_SET_BYTES = MAX_TOKENS * _TOKEN_BYTES + _PART_BYTES


class DecodeLayer(NamedTuple):
    """The weights of a layer, and its caches.

    Args:
        qkv: [(heads + 2 * kv_heads) * head_dim, hidden].
        output: [hidden, heads * head_dim].
        gate_up: [2 * intermediate, hidden].
        down: [hidden, intermediate].
        keys: [pages, page_size, kv_heads, head_dim].
        values: [pages, page_size, kv_heads, head_dim].
    """

    attention_norm: Norm
    qkv: torch.Tensor
    head_norms: HeadNorms
    output: torch.Tensor
    mlp_norm: Norm
    gate_up: torch.Tensor
    down: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors of the layer."""
        norms = [self.attention_norm.weight, self.mlp_norm.weight, self.head_norms.query, self.head_norms.key]
        return [self.qkv, self.output, self.gate_up, self.down, *norms, self.keys, self.values]

    @property
    def sizes(self) -> LayerSizes:
        """The sizes of the layer."""
        return LayerSizes(
            self.qkv.shape[1], self.output.shape[1] // self.keys.shape[3], self.keys.shape[2], self.down.shape[1]
        )


def supports(layers: Sequence[DecodeLayer]) -> bool:
    """Return whether the kernel supports these layers: SIZES in bfloat16, on a Hopper GPU with an SM per block."""
    first = layers[0]
    return (
        first.qkv.is_cuda
        and capability(first.qkv.device) == _CAPABILITY
        and sm_count(first.qkv.device) >= _BLOCKS
        and all(
            layer.sizes == SIZES
            and layer.keys.shape[3] == _HEAD_DIM
            and layer.keys.shape[1] % _TILE_KEYS == 0
            and all(_can_be_copied(tensor) for tensor in layer.tensors)
            for layer in layers
        )
    )


def _can_be_copied(tensor: torch.Tensor) -> bool:
    """Return whether bulk copies of 16 bytes and more can read a tensor."""
    return tensor.dtype == torch.bfloat16 and tensor.is_contiguous() and tensor.data_ptr() % 16 == 0


def decode_layers_reference(
    layers: Sequence[DecodeLayer],
    hidden: torch.Tensor,
    rotary: torch.Tensor,
    scale: float,
    positions: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
) -> torch.Tensor:
    """Compute `DecodeLayers.run` in PyTorch, as its specification."""
    residual = hidden.clone()
    for layer in layers:
        qkv = rms_norm_reference(residual, *layer.attention_norm) @ layer.qkv.T
        params = AttentionParams(layer.head_norms, rotary, layer.keys, layer.values, scale)
        attention = params.empty_output(qkv)
        decode_attention_reference(qkv, params, positions, page_table, rows, attention)
        residual += attention.flatten(1) @ layer.output.T
        gate, up = (rms_norm_reference(residual, *layer.mlp_norm) @ layer.gate_up.T).chunk(2, dim=1)
        residual += (torch.nn.functional.silu(gate) * up) @ layer.down.T
    return residual


@cache
def kernel_macros(tokens: int, layers: int, page_size: int) -> tuple[tuple[str, int], ...]:
    """Return the constants that the kernel is compiled with, for a number of sequences."""
    return (
        ("HIDDEN", SIZES.hidden),
        ("HEADS", SIZES.heads),
        ("KV_HEADS", SIZES.kv_heads),
        ("INTERMEDIATE", SIZES.intermediate),
        ("LAYERS", layers),
        ("PAGE_SIZE", page_size),
        ("BLOCKS", _BLOCKS),
        ("SLOTS", _SLOTS),
        ("IN_FLIGHT", _IN_FLIGHT),
        ("IN_FLIGHT_LONG", _IN_FLIGHT_LONG),
        ("MANY_TILES", _MANY_TILES),
        ("ROW_PADDING", 64 if tokens <= FEW_TOKENS else 0),
    )


class DecodeLayers:
    """The layers of a model, ready to launch. It holds the addresses of all weights and caches."""

    def __init__(self, layers: Sequence[DecodeLayer], rotary: torch.Tensor, scale: float) -> None:
        """Store layers for which `supports` returns True.

        `scale` multiplies the scores. `rotary` is the result of `rotary_table`.
        """
        device = rotary.device
        self._layers, self._rotary, self._scale = layers, rotary, scale
        self._page_size = layers[0].keys.shape[1]
        addresses = [
            [each.data_ptr() for each in (layer.qkv, layer.output, layer.gate_up, layer.down, layer.keys, layer.values)]
            for layer in layers
        ]
        self._pointers = torch.tensor(addresses, dtype=torch.int64, device=device)
        # Copies, next to each other: an address that must be loaded first would delay every layer.
        norms = [
            (layer.attention_norm.weight, layer.mlp_norm.weight, layer.head_norms.query, layer.head_norms.key)
            for layer in layers
        ]
        self._norms = torch.cat([weight for of_layer in norms for weight in of_layer])
        # -1 is EMPTY: no block has written it yet.
        self._exchange = torch.full((_SETS * _SET_BYTES // 2,), -1, dtype=torch.int16, device=device)
        self._first_set = torch.zeros(1, dtype=torch.int32, device=device)

    def run(
        self, hidden: torch.Tensor, positions: torch.Tensor, page_table: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """Return the residual stream after all layers, and store the new tokens' keys and values in the caches.

        Launches of one object must not run at the same time.

        Args:
            hidden: the embeddings of up to MAX_TOKENS tokens, [tokens, hidden].
            positions: the position of each token, [tokens] int64. Padding has -1, and accesses no cache.
            page_table: the pages of each sequence, [rows, pages of a sequence] int64.
            rows: the row of each token's sequence in the page table, [tokens] int64.
        """
        first, out = self._layers[0], torch.empty_like(hidden)
        KERNEL.launch(
            (_BLOCKS,),
            _THREADS,
            kernel_macros(len(hidden), len(self._layers), self._page_size),
            [
                *(self._pointers, self._norms, hidden, out, positions, rows, page_table, self._rotary),
                *(self._exchange, self._first_set, len(hidden), page_table.stride(0)),
                *(first.attention_norm.eps, first.head_norms.eps, self._scale * math.log2(math.e)),
            ],
            hidden.device,
            shared_bytes=SHARED_BYTES,
            cooperative=True,
            pdl=False,
        )
        return out
