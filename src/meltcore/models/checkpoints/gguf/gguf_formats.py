"""Says how a device holds each format of a GGUF file's tensors, and counts the bytes. It imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from math import prod
from typing import NamedTuple

from gguf.constants import GGMLQuantizationType

from meltcore.common.sizes import size_text
from meltcore.kernels.quant.ggml_types import GgmlType
from meltcore.models.checkpoints.gguf.gguf_file import GGUFModel, GGUFTensor

# Unquantized formats, and the types of their values.
DENSE_TYPES = {
    GGMLQuantizationType.F32: "float32",
    GGMLQuantizationType.F16: "float16",
    GGMLQuantizationType.BF16: "bfloat16",
}
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
# Formats that ggml has removed, and their numbers.
_REMOVED_FORMATS = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
_UNREADABLE_FORMATS = {"Q8_1", "Q8_K", "Q1_0", "I8", "I16", "I32", "I64", "F64"}  # also by `meltcore quantize`
EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
ROUTER = "ffn_gate_inp"
QUANTIZED_TYPES = tuple(GGMLQuantizationType[each.name] for each in GgmlType)


def unsupported_formats(model: GGUFModel, *, is_configured: bool) -> str | None:
    """Return why a file's formats cannot be served, with the numbers of tensors. Returns None if all can be served.

    `is_configured` says that the architecture and the metadata can be served. The text then suggests another format.
    """
    refused = {
        name: tensor.type.name
        for name, tensor in model.tensors.items()
        if tensor.type not in (*DENSE_TYPES, *QUANTIZED_TYPES)
    }
    is_readable = not model.unknown_types and _UNREADABLE_FORMATS.isdisjoint(refused.values())
    for name, type_id in model.unknown_types.items():
        refused[name] = (
            f"{_REMOVED_FORMATS[type_id]}, which ggml has removed"
            if type_id in _REMOVED_FORMATS
            else f"unknown type {type_id}"
        )
    if not refused:
        return None
    supported = ", ".join(each.name for each in (*DENSE_TYPES, *QUANTIZED_TYPES))
    remedy = "take a file of the model in one of these"
    if is_readable and is_configured:
        remedy += f", or write one: meltcore quantize {model.path} --to q8_0 --allow-requantize"
    return f"stores {count_formats(refused.values())} (first: {next(iter(refused))}); supported: {supported}; {remedy}"


def count_formats(labels: Iterable[str]) -> str:
    """Return the number of tensors in each format, the most frequent first. `labels` has the format of each tensor."""
    counts = Counter(labels).most_common()
    return ", ".join(f"{count} tensor{'s' if count > 1 else ''} as {label}" for label, count in counts)


def held_formats(tensors: Mapping[str, GGUFTensor]) -> dict[str, GgmlType | None]:
    """Return the format in which a device holds each tensor. None means unquantized, in the model's type.

    Routers are held as values. One kernel computes all experts of a layer, so if one expert is held as values, all
    experts are. A CPU may convert linear layers once more after they are loaded (`host_weights`).
    """

    def held(name: str) -> GgmlType | None:
        tensor = tensors[name]
        if tensor.type not in QUANTIZED_TYPES or ROUTER in name:
            return None
        return GgmlType(tensor.type).held.type

    return {
        name: None if any(held(each) is None for each in expert_group(tensors, name)) else held(name)
        for name in tensors
    }


def expert_group(tensors: Mapping[str, GGUFTensor], name: str) -> list[str]:
    """Return the expert tensors of the layer of `name`. Returns an empty list if `name` is not an expert tensor."""
    prefix, _, kind = name.rpartition(".")
    layer, _, part = prefix.rpartition(".")
    names = (f"{layer}.{each}.{kind}" for each in EXPERTS) if part in EXPERTS else ()
    return [each for each in names if each in tensors]


def held_bytes(tensor: GGUFTensor, held_type: GgmlType | None, element_size: int) -> int:
    """Return the bytes that a device takes for a tensor held as `held_type`.

    Values of the model's type take `element_size`.
    """
    *rows, columns = tensor.shape
    return prod(rows) * (columns * element_size if held_type is None else sum(held_type.array_bytes(columns)))


def describe_on_host(tensors: Mapping[str, GGUFTensor], form_text: str) -> str:
    """Describe the weights of a file and the form in which a CPU holds them."""
    return f"{size_text(sum(tensor.num_bytes for tensor in tensors.values()))} of the file, {form_text}"


class FormatUse(NamedTuple):
    """The tensors of a file in one quantized format, and the format in which a device holds them.

    `loss` says how much this conversion rounds values. It is empty if nothing is rounded.
    """

    stored: GgmlType
    held: GgmlType | None
    tensors: int
    stored_bytes: int
    held_bytes: int
    loss: str

    def describe(self) -> str:
        """Return a description of the format and its conversion in one line."""
        held = "values in the model's type" if self.held is None else self.held.name
        sizes = f"{size_text(self.stored_bytes)} of the file take {size_text(self.held_bytes)}"
        return f"{self.tensors} tensors of {self.stored.name} are held as {held}: {sizes}, loss: {self.loss or 'none'}"


def restored_formats(tensors: Mapping[str, GGUFTensor], element_size: int) -> list[FormatUse]:
    """Return the formats among `tensors` that a device holds as another format, in the order of the file."""
    uses: dict[tuple[GgmlType, GgmlType | None], FormatUse] = {}
    for name, held_type in held_formats(tensors).items():
        tensor = tensors[name]
        if tensor.type not in QUANTIZED_TYPES or held_type == (stored_type := GgmlType(tensor.type)):
            continue
        loss = "" if held_type is None else stored_type.held.loss
        use = uses.get((stored_type, held_type), FormatUse(stored_type, held_type, 0, 0, 0, loss))
        uses[stored_type, held_type] = use._replace(
            tensors=use.tensors + 1,
            stored_bytes=use.stored_bytes + tensor.num_bytes,
            held_bytes=use.held_bytes + held_bytes(tensor, held_type, element_size),
        )
    return list(uses.values())
