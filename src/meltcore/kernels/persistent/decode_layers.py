"""All layers of a dense decoder in one launch, for one new token of each of a few sequences, in CUDA C++.

A chain of kernels waits between any two of them, while the memory idles. Here the weights of later GEMVs are on their
way to shared memory while blocks wait for each other (docs/decisions/persistent-decode.md).
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
from meltcore.kernels.tensor_map import tensor_map


class Instance(NamedTuple):
    """How the kernel is compiled for up to `tokens` sequences.

    exchangers: warps that exchange values with other blocks; slots: of the ring, what is left of shared memory.
    """

    tokens: int
    exchangers: int
    slots: int
    max_tiles: int

    @property
    def kernel(self) -> CudaKernel:
        """Return the kernel of its sources."""
        return _ONE_TOKEN if self.tokens == 1 else _SEVERAL_TOKENS

    @property
    def threads(self) -> int:
        """Threads of a block: warps that compute, one that copies, and the exchangers."""
        return 32 * (_CONSUMERS + 1 + self.exchangers)


def _kernel(gemv: str) -> CudaKernel:
    names = ("sizes", "exchange", "exchanger", "warp", gemv, "attention", "consumer", "decode_layers")
    return CudaKernel([INSTRUCTIONS, *(Path(__file__).with_name(f"{name}.cu") for name in names)], "decode_layers")


_ONE_TOKEN, _SEVERAL_TOKENS = _kernel("one_token"), _kernel("several_tokens")
MAX_CONTEXT = 131_072  # tokens
SHARED_BYTES = 227 * 1024
_CAPABILITY = 90  # bulk copies; measured there
_CONSUMERS = 8
_TEAM, _TEAMS = 16, 8  # blocks of a team
_IN_FLIGHT = 2
_HEAD_DIM, _TILE_KEYS = 128, 16
_EXCHANGE_WORDS = 2**19
_BOX_BYTES = {"output": 16384, "down": 12288}  # of a part of the weight's columns, as in sizes.cu
_ALL_TILES = MAX_CONTEXT // (_TILE_KEYS * _TEAM)
INSTANCES = (
    Instance(1, 1, 12, _ALL_TILES),
    Instance(2, 2, 12, _ALL_TILES // 2),
    Instance(4, 2, 11, _ALL_TILES // 2),
)
MAX_TOKENS = INSTANCES[-1].tokens


class LayerSizes(NamedTuple):
    """The sizes of a layer whose parts each team holds in shared memory."""

    hidden: int
    heads: int
    kv_heads: int
    intermediate: int


# What fits into the sizes of sizes.cu: Qwen3-0.6B's.
SIZES = LayerSizes(1024, 16, 8, 3072)


class DecodeLayer(NamedTuple):
    """The weights of a layer, and its caches.

    qkv: [(heads + 2 * kv_heads) * head_dim, hidden]; output: [hidden, heads * head_dim]; gate_up:
    [2 * intermediate, hidden]; down: [hidden, intermediate]; the caches: [pages, page_size, kv_heads, head_dim].
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


def supports(layers: Sequence[DecodeLayer], max_context: int) -> bool:
    """Return whether the kernel supports these layers: on Hopper with an SM per block, in bfloat16, of SIZES.

    max_context: tokens of a sequence.
    """
    first = layers[0]
    return (
        first.qkv.is_cuda
        and capability(first.qkv.device) == _CAPABILITY
        and sm_count(first.qkv.device) >= _TEAM * _TEAMS
        and max_context <= MAX_CONTEXT
        and all(
            layer.sizes == SIZES
            and layer.keys.shape[3] == _HEAD_DIM
            and layer.keys.shape[1] % _TILE_KEYS == 0
            and all(tensor.dtype == torch.bfloat16 and tensor.is_contiguous() for tensor in layer.tensors)
            for layer in layers
        )
    )


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
def kernel_macros(instance: Instance, layers: int, page_size: int) -> tuple[tuple[str, int], ...]:
    """Return the constants that an instance is compiled with."""
    return (
        ("TOKENS", instance.tokens),
        ("EXCHANGERS", instance.exchangers),
        ("HIDDEN", SIZES.hidden),
        ("HEADS", SIZES.heads),
        ("KV_HEADS", SIZES.kv_heads),
        ("INTERMEDIATE", SIZES.intermediate),
        ("LAYERS", layers),
        ("PAGE_SIZE", page_size),
        ("TEAM", _TEAM),
        ("TEAMS", _TEAMS),
        ("SLOTS", instance.slots),
        ("IN_FLIGHT", _IN_FLIGHT),
        ("MAX_TILES", instance.max_tiles),
        ("EXCHANGE_WORDS", _EXCHANGE_WORDS),
    )


class DecodeLayers:
    """The layers of a model, ready to launch. It holds the addresses of all weights and caches."""

    def __init__(self, layers: Sequence[DecodeLayer], rotary: torch.Tensor, scale: float) -> None:
        """Take layers that `supports` returns True for. scale: of the scores; rotary: see `rotary_table`."""
        device = rotary.device
        self._layers, self._rotary, self._scale = layers, rotary, scale
        page_size = layers[0].keys.shape[1]
        self._macros = {each: kernel_macros(each, len(layers), page_size) for each in INSTANCES}
        self._pointers = torch.tensor([_pointers(layer) for layer in layers], dtype=torch.int64, device=device)
        maps = [word for layer in layers for word in _tensor_maps(layer)]
        self._maps = torch.tensor(maps, dtype=torch.uint64).view(torch.int64).to(device)
        self._exchange = torch.zeros(_EXCHANGE_WORDS, dtype=torch.int64, device=device)
        self._epoch = torch.zeros(1, dtype=torch.int32, device=device)

    def run(
        self, hidden: torch.Tensor, positions: torch.Tensor, page_table: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """Return the residual stream after all layers, and store the new tokens' keys and values in the caches.

        hidden: embeddings of up to MAX_TOKENS tokens [tokens, hidden]; positions: [tokens] int64, -1 for padding, which
        accesses no cache; rows: [tokens] int64, each sequence's row in the page table. Launches of one object must not
        run at the same time.
        """
        first, out = self._layers[0], torch.empty_like(hidden)
        instance = next(each for each in INSTANCES if each.tokens >= len(hidden))
        instance.kernel.launch(
            (_TEAM * _TEAMS,),
            instance.threads,
            self._macros[instance],
            [
                *(self._pointers, self._maps, hidden, out, positions, rows, page_table, self._rotary, self._exchange),
                *(self._epoch, len(hidden), page_table.stride(0), first.attention_norm.eps, first.head_norms.eps),
                self._scale * math.log2(math.e),
            ],
            hidden.device,
            shared_bytes=SHARED_BYTES,
            cooperative=True,
            pdl=False,
        )
        return out


def _pointers(layer: DecodeLayer) -> list[int]:
    """Return the addresses in the order of struct Layer (exchange.cu)."""
    norms = layer.attention_norm.weight, layer.mlp_norm.weight, layer.head_norms.query, layer.head_norms.key
    return [tensor.data_ptr() for tensor in (layer.qkv, layer.gate_up, *norms, layer.keys, layer.values)]


def _tensor_maps(layer: DecodeLayer) -> list[int]:
    """Return the tensor maps of what a block copies in parts of rows."""

    def words_of(matrix: torch.Tensor, columns: int, rows: int) -> list[int]:
        return [int(word) for word in tensor_map(matrix, columns, rows).opaque]

    words = []
    for weight, box_bytes in ((layer.output, _BOX_BYTES["output"]), (layer.down, _BOX_BYTES["down"])):
        columns = weight.shape[1] // _TEAMS
        words += words_of(weight, columns, box_bytes // (2 * columns))
    for cache_tensor in (layer.keys, layer.values):
        words += words_of(cache_tensor.flatten(2).flatten(0, 1), _HEAD_DIM, _TILE_KEYS)
    return words
