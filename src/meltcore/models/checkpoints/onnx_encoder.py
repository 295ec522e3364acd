"""Reads NeMo's Conformer encoder from its ONNX export: the sizes, and the tensors by NeMo's names."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import torch

from meltcore.common.errors import ConfigError
from meltcore.models.checkpoints.exported_part import ExportedPart
from meltcore.models.checkpoints.onnx_file import OnnxNode
from meltcore.models.configs.task_configs import ConformerConfig

_LAYER = re.compile(r"layers\.(\d+)\.")
_OUT_LAYER = "pre_encode.out"
_PREFIX, _UNUSED = "encoder.", "pos_enc."  # the table of positions, which is computed here


class _Source(NamedTuple):
    """The location of a tensor of the encoder in the file: a name, or a linear node whose weight it is."""

    stored_name: str
    node: OnnxNode | None = None


class OnnxEncoder:
    """The encoder in an ONNX file.

    `has_batch_norm` says whether the file has batch norms as separate tensors, not folded into the convolutions.
    """

    def __init__(self, part: ExportedPart, num_mels: int) -> None:
        """Find all tensors and the sizes.

        Raises ConfigError if a tensor is missing, or if a weight cannot be identified.
        """
        self._part, self._num_mels = part, num_mels
        self._sources = self._find_sources()
        self.has_batch_norm = any(".batch_norm." in name for name in self._sources)
        self.config = self._read_config()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Read all tensors, by NeMo's names without the prefix `encoder.`."""
        return {
            name: self._part.read(source.stored_name) if source.node is None else self._part.linear_weight(source.node)
            for name, source in self._sources.items()
        }

    def _find_sources(self) -> dict[str, _Source]:
        """Return the location of each tensor. A linear layer is named by its bias, or by the module in its node's name.

        Exports before torch 1.13 do not name modules. In these files, layers without a bias are identified by their
        order: the linear layers of positions, and the convolutions into which batch norms are folded.
        """
        graph = self._part.graph
        assert graph is not None
        constants = {node.outputs[0] for node in graph.nodes if node.op == "Constant" and node.outputs}
        sources = {
            name.removeprefix(_PREFIX): _Source(name)
            for name in graph.tensors
            if not _is_anonymous(name) and name not in constants and not name.removeprefix(_PREFIX).startswith(_UNUSED)
        }
        orders = {"MatMul": 0, "Conv": 0}
        for node in self._part.linear_nodes():
            weight, bias = node.inputs[1], self._part.bias_name(node)
            if not _is_anonymous(weight) or weight in constants:
                continue
            module = bias.removesuffix(".bias") if bias is not None and not _is_anonymous(bias) else _module_name(node)
            if module is None and node.op in orders:
                part = "self_attn.linear_pos" if node.op == "MatMul" else "conv.depthwise_conv"
                module = f"layers.{orders[node.op]}.{part}"
                orders[node.op] += 1
            module = module and module.removeprefix(_PREFIX)
            if module is None or f"{module}.weight" in sources:
                name_text = "no name" if module is None else f"the name {module}, as another does"
                raise ConfigError(f"{self._part.path}: the weight {weight} has {name_text} (node {node.name!r})")
            sources[f"{module}.weight"] = _Source(weight, node)
            if bias is not None and _is_anonymous(bias):
                sources[f"{module}.bias"] = _Source(bias)
        return sources

    def _shape(self, name: str, dims: int) -> tuple[int, ...]:
        """Return the shape of a tensor in torch's layout. Raises ConfigError unless it has `dims` dimensions."""
        source = self._sources.get(name)
        if source is None:
            raise ConfigError(f"{self._part.path} lacks {name}")
        shape = self._part.shapes[source.stored_name]
        if len(shape) != dims or 0 in shape:
            raise ConfigError(f"{self._part.path}: {name} has shape {list(shape)}; it must have {dims} dimensions")
        is_transposed = source.node is not None and source.node.op == "MatMul"
        return shape[::-1] if is_transposed else shape

    def _read_config(self) -> ConformerConfig:
        layers = [int(match[1]) for match in map(_LAYER.match, self._sources) if match]
        if not layers:
            raise ConfigError(f"{self._part.path} lacks layers.0: it is not an encoder of NeMo")
        hidden_size, subsampled = self._shape(f"{_OUT_LAYER}.weight", 2)
        channels = self._shape("pre_encode.conv.0.weight", 4)[0]
        num_heads, head_size = self._shape("layers.0.self_attn.pos_bias_u", 2)
        kernel = self._shape("layers.0.conv.depthwise_conv.weight", 3)[2]
        convolutions = [name for name in self._sources if re.fullmatch(r"pre_encode\.conv\.\d+\.weight", name)]
        kernels = {name: self._shape(name, 4) for name in convolutions}
        strided = [name for name, shape in kernels.items() if shape[2:] != (1, 1)]
        is_depthwise = any(shape[1] == 1 for name, shape in kernels.items() if name != "pre_encode.conv.0.weight")
        factor = 2 ** len(strided)
        mels = self._num_mels
        for _ in strided:
            mels = -(-mels // 2)
        if num_heads * head_size != hidden_size or channels * mels != subsampled or kernel % 2 == 0:
            raise ConfigError(
                f"{self._part.path}: {num_heads} heads of {head_size}, {channels} channels of {mels} of "
                f"{self._num_mels} mels and a kernel of {kernel} do not make an encoder whose {_OUT_LAYER}.weight has "
                f"shape {[hidden_size, subsampled]}"
            )
        return ConformerConfig(
            num_mels=self._num_mels,
            num_layers=max(layers) + 1,
            hidden_size=hidden_size,
            num_heads=num_heads,
            feed_forward_size=self._shape("layers.0.feed_forward1.linear1.weight", 2)[0],
            conv_kernel=kernel,
            subsampling="dw_striding" if is_depthwise else "striding",
            subsampling_factor=factor,
            subsampling_channels=channels,
            scales_input=self._scales_input(hidden_size),
        )

    def _scales_input(self, hidden_size: int) -> bool:
        """Return whether the graph multiplies the subsampled frames by the square root of their size."""
        graph = self._part.graph
        assert graph is not None
        stored_name = self._sources[f"{_OUT_LAYER}.weight"].stored_name
        node = next(each for each in self._part.linear_nodes() if each.inputs[1] == stored_name)
        value = node.outputs[0]
        if node.op == "MatMul":
            value = next((user.outputs[0] for user in graph.users(value) if user.op == "Add"), value)
        for user in graph.users(value):
            other_inputs = [name for name in user.inputs if name != value]
            if user.op != "Mul" or len(other_inputs) != 1 or other_inputs[0] not in graph.tensors:
                continue
            factor = graph.tensors[other_inputs[0]].read()
            if factor.numel() == 1 and math.isclose(factor.item(), math.sqrt(hidden_size), rel_tol=1e-3):
                return True
            raise ConfigError(
                f"{self._part.path}: {user.name} scales the input by another factor than sqrt(hidden size)"
            )
        return False


def _is_anonymous(name: str) -> bool:
    """Return whether the export made the name up, such as `onnx::MatMul_1234` or `1234`."""
    return "::" in name or name.startswith(("/", "Constant_")) or name.isdecimal()


def _module_name(node: OnnxNode) -> str | None:
    """Return the module in a node's name.

    For `/layers.0/self_attn/linear_pos/MatMul` this is `layers.0.self_attn.linear_pos`.
    """
    if not node.name.startswith("/"):
        return None
    path: list[str] = []
    for name in node.name.split("/")[1:-1]:
        if path and name.startswith(f"{path[-1]}."):  # a member of a Sequential, which repeats the name
            path[-1] = name
        else:
            path.append(name)
    return ".".join(path) or None
