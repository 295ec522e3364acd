"""Chooses how a CPU holds the weights of linear layers and of the head, whatever the formats of the checkpoint.

A GPU decodes blocks in registers. A CPU has no such kernel and would dequantize all weights again in every step. The
smaller the file, the slower such a step would be. So the weights are converted once while loading. They become float16
if the processor can multiply float32 tokens by float16 weights (kernels/gemm/half_weight.py), otherwise float32.

Values of blocks are rounded by float16, by at most 2^-12 of a value. That moved the perplexity of SmolLM2-135M in Q8_0
by 0.022 %. Therefore these weights keep the rounding error in a second part, and the result equals the result in
float32. Checkpoints of 16 bits need no second part, and checkpoints in float32 stay as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from typing import NamedTuple

import torch
from torch import nn

from meltcore.kernels.gemm.half_weight import packed_half_bytes, supports_half_weights
from meltcore.kernels.launch import use_triton
from meltcore.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from meltcore.layers.ggml_weights import GgmlWeight
from meltcore.layers.half_weights import HalfWeight, half_weight, stored_values
from meltcore.layers.linear import LinearBase
from meltcore.layers.merged_weight import MergedWeight
from meltcore.layers.quantization import DenseWeight
from meltcore.models.checkpoints.checkpoint import Progress
from meltcore.models.decoders.decoder import Decoder
from meltcore.models.decoders.model import Model
from meltcore.models.quantized.quantization import tensors_of_layers

_HALF_TYPES = {"F16", "BF16", "float16", "bfloat16"}  # of safetensors and GGUF, and of config.json


class HostWeights(NamedTuple):
    """The layers of a model whose weights a CPU converts after it has loaded them.

    Args:
        layers: the layers that are converted.
        in_half: whether their weights become float16. False makes them float32.
        total_bytes: the size of all weights of the model after the conversion.
    """

    layers: list[LinearBase | ParallelLMHead]
    in_half: bool
    total_bytes: int

    @property
    def note(self) -> str:
        """A description, for the user, of the form in which these weights are held."""
        parts = " in two parts" if any(map(_in_two_parts, self.layers)) else ""
        return f"held in float16{parts} for the CPU" if self.in_half else "held in float32 for the CPU"

    def convert(self, progress: Progress) -> None:
        """Convert the loaded weights, layer by layer, so that two forms of one layer exist at a time."""
        for index, layer in enumerate(self.layers):
            progress("converting weights", index / len(self.layers))
            if not self.in_half:
                layer.weight = _dense(layer)
                continue
            try:
                layer.weight = half_weight(
                    _module(layer),
                    _stored_types(layer),
                    in_two_parts=_in_two_parts(layer),
                    is_embedding=isinstance(layer, VocabParallelEmbedding),
                )
            except ValueError as error:
                print(f"meltcore: a weight stays as it is loaded, which is slower: it {error}", file=sys.stderr)


def weight_bytes(model: Model) -> int:
    """Return the bytes of a model's weights as they are held now."""
    packed = sum(module.packed.nbytes for module in model.modules() if isinstance(module, HalfWeight))
    return packed + sum(weight.nbytes for weight in model.parameters())


def host_weights(model: Model, dtype_names: Collection[str]) -> HostWeights | None:
    """Return the weights of `model` that a CPU should convert. Returns None if all stay as they are loaded.

    `dtype_names` are the types in which the checkpoint stores matrices. Weights may be on the meta device.
    """
    if not isinstance(model, Decoder) or model.dtype != torch.float32 or use_triton(torch.empty(0, device="cpu")):
        return None
    in_half = supports_half_weights()
    dense_in_half = in_half and bool(dtype_names) and _HALF_TYPES.issuperset(dtype_names)
    layers = [layer for layer in _layers(model) if _is_convertible(_module(layer), dense=dense_in_half)]
    if not layers:
        return None
    saved = sum(_held_bytes(layer, in_half) - _loaded_bytes(layer) for layer in layers)
    return HostWeights(layers, in_half, weight_bytes(model) + saved)


def _layers(model: Decoder) -> Iterator[LinearBase | ParallelLMHead]:
    """Yield the linear layers and the head. An embedding is yielded only if it is also the head."""
    for layer, _ in tensors_of_layers(model):
        if isinstance(layer, LinearBase) or layer is model.lm_head:
            yield layer


def _module(layer: LinearBase | ParallelLMHead) -> nn.Module:
    assert isinstance(layer.weight, nn.Module)
    return layer.weight


def _parts(weight: nn.Module) -> list[nn.Module]:
    return list(weight.parts) if isinstance(weight, MergedWeight) else [weight]


def _is_convertible(weight: nn.Module, *, dense: bool) -> bool:
    """Return whether a weight consists of blocks. With `dense`, a weight with values of 16 bits counts too."""
    types = (GgmlWeight, DenseWeight) if dense else (GgmlWeight,)
    return all(isinstance(part, types) for part in _parts(weight))


def _shape(layer: LinearBase | ParallelLMHead) -> tuple[int, int]:
    if isinstance(layer, LinearBase):
        return sum(layer.output_sizes), layer.input_size
    return layer.local_vocab_size, layer.hidden_size


def _loaded_bytes(layer: LinearBase | ParallelLMHead) -> int:
    return sum(values.nbytes for values in _module(layer).parameters())


def _held_bytes(layer: LinearBase | ParallelLMHead, in_half: bool) -> int:
    """Return the bytes of a layer's weight after the conversion.

    An embedding also needs rows to look up: it keeps its blocks, or its unpacked 16-bit values.
    """
    (rows, columns), in_blocks = _shape(layer), _in_two_parts(layer)
    if not in_half:
        return 4 * rows * columns
    table_bytes = _loaded_bytes(layer) if in_blocks else 2 * rows * columns
    is_embedding = isinstance(layer, VocabParallelEmbedding)
    return packed_half_bytes(rows, columns, in_two_parts=in_blocks) + (table_bytes if is_embedding else 0)


def _in_two_parts(layer: LinearBase | ParallelLMHead) -> bool:
    """Return whether a layer's weight keeps the rounding error of float16. Weights with values of 16 bits do not."""
    return any(isinstance(part, GgmlWeight) for part in _parts(_module(layer)))


def _stored_types(layer: LinearBase | ParallelLMHead) -> frozenset[str]:
    """Return the formats of a layer's checkpoint matrices, as the user knows them."""
    return frozenset(
        part.blocks.ggml_type.name.lower() if isinstance(part, GgmlWeight) else "float16"
        for part in _parts(_module(layer))
    )


def _dense(layer: LinearBase | ParallelLMHead) -> DenseWeight:
    rows, columns = _shape(layer)
    dense = DenseWeight((rows,), columns)
    dense.values.copy_(stored_values(_module(layer)))
    return dense
