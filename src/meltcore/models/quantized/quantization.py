"""Selects the layers of a model that are quantized, and checks that the device supports the format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import torch

from meltcore.common.errors import ConfigError
from meltcore.kernels.fp8.fp8 import FP8_CAPABILITY
from meltcore.kernels.fp8.fp8_linear import SIZE_MULTIPLE
from meltcore.kernels.quant.ggml_experts import experts_per_slice
from meltcore.kernels.quant.ggml_linear import scratch_values, slice_rows
from meltcore.kernels.quant.ggml_types import GgmlType
from meltcore.layers.attention import Attention
from meltcore.layers.embedding import ParallelLMHead
from meltcore.layers.feed_forward import GatedMLP, SparseMoeBlock
from meltcore.layers.fp8_weights import FP8_PER_CHANNEL
from meltcore.layers.ggml_weights import GgmlExperts, GgmlWeight, PackedRows, ggml_method
from meltcore.layers.half_weights import HalfWeight
from meltcore.layers.linear import LinearBase
from meltcore.layers.merged_weight import merged_method
from meltcore.layers.quantization import UNQUANTIZED, QuantizationMethod
from meltcore.models.decoders.decoder import Decoder
from meltcore.models.decoders.model import Model
from meltcore.models.quantized.step_sizes import Slices


def require_fp8(option: str, device: torch.device) -> None:
    """Raise ConfigError if `device` is a GPU that cannot convert e4m3. `option` is named in the error."""
    if device.type != "cuda":
        return
    major, minor = torch.cuda.get_device_capability(device)
    if 10 * major + minor < FP8_CAPABILITY:
        raise ConfigError(
            f"{option} needs compute capability {FP8_CAPABILITY / 10} or later; "
            f"{torch.cuda.get_device_name(device)} has {major}.{minor}"
        )


def quantize_to_fp8(model: Model, device: torch.device) -> None:
    """Make every linear layer and expert of the blocks store its weight in FP8, with a scale per output channel.

    `model` must still be on the meta device. The embedding and the head keep their type, since an error in a logit
    directly changes a token. On a CPU the torch reference runs, which is slow but gives the same answers.

    Raises ConfigError if the GPU has no FP8, if the model is not bfloat16 on a GPU, or if a layer's size is not a
    multiple of SIZE_MULTIPLE.
    """
    option = "--quantization fp8"
    check_fp8_device(option, model, device)
    assert isinstance(model, Decoder)
    for layer, names in tensors_of_layers(model):
        if not isinstance(layer, ParallelLMHead):
            # Step sizes and decays of a recurrence stay as they are, as in published FP8 checkpoints.
            is_gate = [name.endswith(("in_proj_b.weight", "in_proj_a.weight")) for name in names]
            quantize_fp8_layer(layer, names, [UNQUANTIZED if kept else FP8_PER_CHANNEL for kept in is_gate], option)


def check_fp8_device(option: str, model: Model, device: torch.device) -> None:
    """Raise ConfigError if `device` has no FP8, or if its FP8 kernels do not support the model's type."""
    require_fp8(option, device)
    if device.type == "cuda" and model.dtype != torch.bfloat16:
        dtype = str(model.dtype).removeprefix("torch.")
        raise ConfigError(f"{option} computes with --dtype bfloat16 around it on CUDA; got {dtype}")


def quantize_fp8_layer(
    layer: LinearBase | SparseMoeBlock, names: Sequence[str], methods: Sequence[QuantizationMethod], option: str
) -> None:
    """Quantize a layer. Matrix i has the published name names[i] and is quantized by methods[i].

    Raises ConfigError, which begins with `option`, if a size is not a multiple of SIZE_MULTIPLE.
    """
    if isinstance(layer, LinearBase):
        sizes = zip(layer.output_sizes, methods, strict=True)
        shape = [sum(size for size, method in sizes if method is not UNQUANTIZED), layer.input_size]
    else:
        shape = [layer.local_width, layer.router.shape[1]]
    if any(size % SIZE_MULTIPLE for size in shape):
        raise ConfigError(f"{option} needs sizes that are multiples of {SIZE_MULTIPLE}; {names[0]} has {shape}")
    layer.quantize(merged_method(methods))


def quantize_as_stored(model: Model, dtype_names: Mapping[str, str], *, linear_layers: bool = True) -> None:
    """Make every layer of a model on the meta device hold its GGUF tensors in the formats of the file.

    Args:
        model: the model.
        dtype_names: the GGML type of each tensor, by the tensor's published name.
        linear_layers: False changes only the embedding and the head.

    If some experts of a layer are not quantized, all experts of the layer hold values.
    """
    assert isinstance(model, Decoder)
    for layer, names in tensors_of_layers(model):
        if not linear_layers and not isinstance(layer, ParallelLMHead):
            continue
        stored_types = [GgmlType.__members__.get(dtype_names.get(name, "")) for name in names]
        types = [each and each.held.type for each in stored_types]
        is_any = any(each is not None for each in types)
        if is_any and not (isinstance(layer, SparseMoeBlock) and None in types):
            layer.quantize(ggml_method(*types))


def tensors_of_layers(
    model: Decoder,
) -> Iterator[tuple[LinearBase | ParallelLMHead | SparseMoeBlock, tuple[str, ...]]]:
    """Yield each layer that can be quantized, and the published name of each matrix that the layer merges.

    For experts, these are the names of expert 0.
    """
    yield model.embedding, (f"{model.prefix}embed_tokens.weight",)
    if not model.config.tie_word_embeddings:
        yield model.lm_head, ("lm_head.weight",)
    for prefix, block in model.named_blocks():
        attention, mlp = block.attention, block.mlp
        if isinstance(attention, Attention):
            yield attention.qkv_proj, tuple(f"{prefix}self_attn.{name}_proj.weight" for name in "qkv")
            yield attention.o_proj, (f"{prefix}self_attn.o_proj.weight",)
        else:
            names = ("qkv", "qkv", "qkv", "z", "b", "a")
            yield attention.in_proj, tuple(f"{prefix}linear_attn.in_proj_{name}.weight" for name in names)
            yield attention.out_proj, (f"{prefix}linear_attn.out_proj.weight",)
        if isinstance(mlp, GatedMLP):
            yield mlp.gate_up_proj, (f"{prefix}mlp.gate_proj.weight", f"{prefix}mlp.up_proj.weight")
            yield mlp.down_proj, (f"{prefix}mlp.down_proj.weight",)
        else:
            yield mlp, tuple(f"{prefix}mlp.experts.0.{name}_proj.weight" for name in ("gate", "up", "down"))


def quantize_as_llama_cpp(model: Model, weight_format: Literal["q4_0", "q8_0"]) -> None:
    """Make every layer of a model on the meta device hold the blocks that llama.cpp's quantizer would write.

    With Q4_0 the head is in Q6_K, or in Q8_0 if its rows are not a whole number of Q6_K blocks. The head of Gemma 3 has
    16 bits.
    """
    assert isinstance(model, Decoder)
    block_type = GgmlType[weight_format.upper()]
    for layer, names in tensors_of_layers(model):
        layer_type = block_type
        if layer is model.lm_head and weight_format == "q4_0":
            if model.config.tie_word_embeddings and model.config.rounds_embedding_scale:
                continue
            layer_type = GgmlType.Q8_0 if model.config.hidden_size % GgmlType.Q6_K.block_size else GgmlType.Q6_K
        layer.quantize(ggml_method(*[layer_type] * len(names)))


def largest_slices(model: Model) -> Slices:
    """Return the largest numbers of values that a step on a GPU would dequantize together, by kind of layer.

    Weights may be on the meta device.
    """
    assert isinstance(model, Decoder)
    linear = head = experts = 0
    device = torch.device("cuda")
    for layer, _ in tensors_of_layers(model):
        if isinstance(layer, LinearBase):
            rows, columns = sum(layer.output_sizes), layer.input_size
            linear = max(linear, slice_rows(rows, columns, device) * columns)
        elif isinstance(layer, SparseMoeBlock):
            values, count = layer.local_width * layer.router.shape[1], layer.num_experts + layer.shared_expert
            experts = max(experts, *(experts_per_slice(count, each) * each for each in (values, 2 * values)))
        else:
            rows, columns = layer.local_vocab_size, layer.hidden_size
            head = max(head, slice_rows(rows, columns, device) * columns)
    return Slices(linear, head, experts)


def scratch_bytes(model: Model, device: torch.device) -> int:
    """Return the bytes of the largest slice of a weight that a step on `device` dequantizes.

    Returns 0 if the step dequantizes no weight. Weights may be on the meta device.
    """
    values, tables = 0, {weight.table for weight in model.modules() if isinstance(weight, HalfWeight)}
    for weight in model.modules():
        if weight in tables:  # of which a step dequantizes single rows
            continue
        if isinstance(weight, GgmlWeight):
            values = max(values, scratch_values(weight.blocks.tensor, device))
        elif isinstance(weight, GgmlExperts) and device.type == "cuda":
            values = max(values, weight.scratch_values)
    return values * model.dtype.itemsize


def modules_of_experts(layer: SparseMoeBlock, first_expert: Iterable[str]) -> list[str]:
    """Return the modules of all experts of a layer. `first_expert` has the modules of the first expert."""
    names = [f".experts.{expert}." for expert in range(layer.num_experts)]
    names += [".shared_expert."] if layer.shared_expert else []
    return [module.replace(".experts.0.", name) for module in first_expert for name in names]


def weight_dtypes(model: Model) -> list[str]:
    """Return the names of the types that the weights are stored in, sorted: torch's types, and formats of ggml."""
    names: set[str] = set()
    for module in model.modules():
        if isinstance(module, PackedRows):
            names.add(module.ggml_type.name.lower())
        elif isinstance(module, HalfWeight):
            names |= module.stored_types
        else:
            names |= {str(weight.dtype).removeprefix("torch.") for weight in module.parameters(recurse=False)}
    return sorted(names)
