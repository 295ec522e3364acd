"""Gives the tensors of a GGUF file the names, shapes and layout that they have in published safetensors files.

Some tensors differ in more than their names:

- Rows of queries and keys of `llama` files are in the order of llama.cpp's rotary embeddings. There, dimension i of a
head is followed by dimension i + head_dim / 2.
- Norms of Gemma include the 1 that published files leave out.
- All experts of a layer are one tensor.
- Phi-3's merged matrices are read as separate matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

import torch

from meltcore.kernels.quant.ggml import pack
from meltcore.kernels.quant.ggml_decode import dequantize
from meltcore.kernels.quant.ggml_restore import dequantize_blocks, restore_blocks
from meltcore.kernels.quant.ggml_types import GgmlType
from meltcore.layers.weight_loader import (
    ConvertingLoader,
    Index,
    ShardLoader,
    WeightLoader,
    as_slice,
    permuted_loader,
    row_loader,
    split_rows,
)
from meltcore.models.checkpoints.gguf.gguf_config import ROPE_TENSORS
from meltcore.models.checkpoints.gguf.gguf_file import GGUFFile, GGUFTensor
from meltcore.models.checkpoints.gguf.gguf_formats import EMBEDDING, HEAD, QUANTIZED_TYPES
from meltcore.models.checkpoints.tensor_file import TensorEntry, TensorFile

_OUTER_TENSORS = {
    EMBEDDING: "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    HEAD: "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_POST_NORM_FAMILIES = ("gemma3_text", "olmo2")
_POST_NORM_LAYER = _LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
# The matrices that one tensor of a file merges.
_MERGED_TENSORS = {"attn_qkv": ("attn_q", "attn_k", "attn_v"), "ffn_up": ("ffn_gate", "ffn_up")}
_MERGING_FAMILIES = ("phi3",)
_PERMUTED_FAMILIES = ("granite", "llama", "mistral", "smollm3")
_PERMUTED_TENSORS = (".q_proj.weight", ".k_proj.weight", ".q_proj.bias", ".k_proj.bias")
_PART_VALUES = 2**22  # in float32, of a tensor that is loaded with its values


class GGUFWeights(TensorFile):
    """The tensors of an open GGUF file by their published names. Stacked experts have an entry each."""

    # A quantized tensor is read as its blocks: uint8 [..., bytes of a row].
    DTYPES: ClassVar = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16} | {
        quantized_type.name: torch.uint8 for quantized_type in QUANTIZED_TYPES
    }

    def __init__(self, file: GGUFFile, config: Mapping[str, Any]) -> None:
        """Open the file of a header that has been read. `config` is the checkpoint's configuration."""
        super().__init__(file.path)
        self._model_type, self._head_dim = config["model_type"], config["head_dim"]
        self._merged_rows = _merged_rows(config) if self._model_type in _MERGING_FAMILIES else {}
        self._stored_names: dict[str, str] = {}
        self.entries = {}
        for stored_name, tensor in file.tensors.items():
            if stored_name in ROPE_TENSORS:  # part of the configuration
                continue
            for name, entry in self._published_entries(stored_name, tensor):
                self.entries[name] = entry
                self._stored_names[name] = stored_name

    def stored_name(self, name: str) -> str:
        """Return the GGUF name of a tensor from its Hugging Face name, even if this file does not have the tensor."""
        if name in self._stored_names:
            return self._stored_names[name]
        try:
            return gguf_name(name, self._model_type)
        except KeyError:
            return name

    def adapt(self, name: str, target: WeightLoader, device: torch.device) -> WeightLoader:
        """Return a loader for the tensor as this file stores it. The loader writes to `target`.

        `target` is the loader of the published tensor. If it does not take blocks, it gets the values in float32, one
        tensor at a time. If it takes blocks of another format, the blocks are converted to that format.
        """
        if has_permuted_rows(name, self._model_type):
            target = _unpermuting_loader(target, self._head_dim)
        elif includes_one(name, self._model_type):
            dense = target
            return ConvertingLoader(target.shape, lambda source: dense.copy_(source.float() - 1))
        entry = self.entries[name]
        ggml_type = GgmlType.__members__.get(entry.dtype_name)
        if ggml_type is None or not target.shape:
            return target
        if target.shape[-1] == ggml_type.columns(entry.shape[-1]):
            return _converting_loader(target, ggml_type, ggml_type.block_size, partial(_dequantized, ggml_type, device))
        held_type = ggml_type.held.type
        if held_type == ggml_type:
            return target
        width = held_type.row_bytes(ggml_type.block_size)
        return _converting_loader(target, ggml_type, width, partial(_restore_blocks, ggml_type, device))

    def _published_entries(self, stored_name: str, tensor: GGUFTensor) -> Iterator[tuple[str, TensorEntry]]:
        """Yield the published names and the entries of a tensor. A tensor with an unknown name keeps this name."""
        dtype_name, shape, offset = tensor.type.name, tensor.shape, tensor.offset
        if tensor.type in QUANTIZED_TYPES:
            shape = (*shape[:-1], tensor.row_bytes)
        block, _, rest = stored_name.removeprefix("blk.").partition(".")
        part, _, kind = rest.rpartition(".")
        names = _POST_NORM_LAYER if self._model_type in _POST_NORM_FAMILIES else _LAYER
        if stored_name in _OUTER_TENSORS:
            yield _OUTER_TENSORS[stored_name], TensorEntry(dtype_name, shape, offset)
        elif part in _EXPERTS and len(shape) == 3:
            expert_bytes = tensor.num_bytes // shape[0]
            for expert in range(shape[0]):
                name = f"model.layers.{block}.mlp.experts.{expert}.{_EXPERTS[part]}.{kind}"
                yield name, TensorEntry(dtype_name, shape[1:], offset + expert * expert_bytes)
        elif stored_name.startswith("blk.") and sum(self._merged_rows.get(part, ())) == shape[0]:
            row_bytes, first_row = tensor.num_bytes // shape[0], 0
            for merged_part, rows in zip(_MERGED_TENSORS[part], self._merged_rows[part], strict=True):
                name = f"model.layers.{block}.{names[merged_part]}.{kind}"
                yield name, TensorEntry(dtype_name, (rows, *shape[1:]), offset + first_row * row_bytes)
                first_row += rows
        elif stored_name.startswith("blk.") and part in names:
            yield f"model.layers.{block}.{names[part]}.{kind}", TensorEntry(dtype_name, shape, offset)
        else:
            yield stored_name, TensorEntry(dtype_name, shape, offset)


def _merged_rows(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the number of rows of each matrix in a merged tensor, by tensor name."""
    queries, keys = (config[heads] * config["head_dim"] for heads in ("num_attention_heads", "num_key_value_heads"))
    return {"attn_qkv": (queries, keys, keys), "ffn_up": (config["intermediate_size"],) * 2}


def gguf_name(name: str, model_type: str) -> str:
    """Return the GGUF name of a published tensor. All experts of a layer share the name of their stacked tensor.

    Raises KeyError if GGUF files have no such tensor.
    """
    outer = {published: stored for stored, published in _OUTER_TENSORS.items()}
    if name in outer:
        return outer[name]
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    part, _, kind = rest.rpartition(".")
    names = _POST_NORM_LAYER if model_type in _POST_NORM_FAMILIES else _LAYER
    if part.startswith("mlp.experts."):
        names, part = _EXPERTS, part.rpartition(".")[2]
    stored_parts = {published: stored for stored, published in names.items()}
    if model_type in _MERGING_FAMILIES:
        stored_parts |= {names[each]: merged for merged, parts in _MERGED_TENSORS.items() for each in parts}
    return f"blk.{layer}.{stored_parts[part]}.{kind}"


def _dequantized(ggml_type: GgmlType, device: torch.device, source: torch.Tensor) -> torch.Tensor:
    """Return the values of rows of blocks in float32, computed on `device`.

    Raises ValueError if a value is not finite.
    """
    blocks = source.to(device)
    if ggml_type.held.type == ggml_type:
        packed = pack(blocks, ggml_type)
        values = torch.empty(len(blocks), packed.columns, device=device, dtype=torch.float32)
        dequantize(packed, values)
    else:
        values = dequantize_blocks(blocks, ggml_type)
    if not values.isfinite().all():
        raise ValueError("has values that are not finite numbers")
    return values


def _restore_blocks(ggml_type: GgmlType, device: torch.device, source: torch.Tensor) -> torch.Tensor:
    """Convert rows of blocks to the format in which a device holds them."""
    return restore_blocks(source.to(device), ggml_type)


def _converting_loader(
    target: WeightLoader, ggml_type: GgmlType, width: int, convert: Callable[[torch.Tensor], torch.Tensor]
) -> WeightLoader:
    """Return a loader that takes rows of blocks [rows, bytes of a row] and writes `convert(blocks)` to `target`.

    One block yields `width` columns. To load a slice of columns, the loader reads every block that overlaps the slice.
    Returns `target` itself if its number of columns is not a multiple of `width`.
    """
    *rows, columns = target.shape
    if columns % width:
        return target

    def blocks(index: Index, part: WeightLoader) -> tuple[Index, WeightLoader]:
        start, stop, _ = (index[1] if len(index) > 1 else slice(None)).indices(columns)
        first, last = start // width, -(-stop // width)
        kept_columns = slice(start - first * width, stop - first * width)
        stored_bytes = slice(first * ggml_type.block_bytes, last * ggml_type.block_bytes)

        def loader(part: WeightLoader) -> WeightLoader:
            def store(source: torch.Tensor) -> None:
                for rows, part_rows in split_rows(part, max(1, _PART_VALUES // columns)):
                    part_rows.copy_(convert(source[as_slice(rows)])[:, kept_columns])

            def rows_loader(rows: range) -> WeightLoader | None:
                part_rows = row_loader(part, rows)
                return None if part_rows is None else loader(part_rows)

            return ConvertingLoader(
                torch.Size((part.shape[0], stored_bytes.stop - stored_bytes.start)), store, rows=rows_loader
            )

        return (*index[:1], stored_bytes), loader(part)

    if not isinstance(target, ShardLoader):
        return blocks((slice(None),), target)[1]
    shape = torch.Size((*rows, columns // width * ggml_type.block_bytes))
    return ShardLoader(shape, tuple(blocks(index, part) for index, part in target.slices))


def _unpermuting_loader(target: WeightLoader, head_dim: int) -> WeightLoader:
    """Return a loader of rows in llama.cpp's order into `target`, whose parts hold whole heads."""
    if isinstance(target, ShardLoader):
        return target._replace(
            slices=tuple((index, _unpermuting_loader(part, head_dim)) for index, part in target.slices)
        )
    return permuted_loader(target, stored_rows(target.shape[0], head_dim))


def stored_rows(num_rows: int, head_dim: int) -> torch.Tensor:
    """Return, for each row of a published tensor of queries or keys, its row in a `llama` file: [num_rows] int64.

    Row (head, half, i) of the published tensor is row (head, i, half) of the file.
    """
    return torch.arange(num_rows).view(-1, head_dim // 2, 2).transpose(1, 2).flatten()


def has_permuted_rows(name: str, model_type: str) -> bool:
    """Return whether a file has the rows of the tensor `name` in llama.cpp's order."""
    return model_type in _PERMUTED_FAMILIES and name.endswith(_PERMUTED_TENSORS)


def includes_one(name: str, model_type: str) -> bool:
    """Return whether a file has the tensor `name` with 1 added to its values."""
    return model_type == "gemma3_text" and name.endswith("norm.weight")
