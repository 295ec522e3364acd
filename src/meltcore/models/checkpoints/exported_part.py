"""Reads the weights of a network that was exported to ONNX or TorchScript. An export may lose the checkpoint's names.

torch.onnx renames the weights that it transposes or folds (`onnx::MatMul_1234`). These are weights of linear layers of
sequences, of convolutions with a batch norm, and of LSTMs. A weight's position in the graph tells what it is. No code
of a file is executed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import torch

from meltcore.common.errors import ConfigError
from meltcore.models.checkpoints.onnx_file import OnnxGraph, OnnxNode
from meltcore.models.checkpoints.torch_archive import StoredTensor, TorchArchive, script_fields

_SCRIPT_DTYPES = {"FloatStorage": torch.float32, "HalfStorage": torch.float16, "BFloat16Storage": torch.bfloat16}
_LINEAR_OPS = ("MatMul", "Gemm", "Conv")
# ONNX has the gates of an LSTM in the order input, output, forget, cell; torch as input, forget, cell, output.
_GATE_ORDER = (0, 2, 3, 1)


class ExportedPart:
    """An exported network: its tensors by name, and the graph if the file is an ONNX file."""

    def __init__(self, path: Path) -> None:
        """Read the headers of an .onnx or a .ts file. Raises ConfigError if the file cannot be read."""
        self.path = path
        self.graph = OnnxGraph.read(path) if path.suffix == ".onnx" else None
        self.code = ""
        self._stored: dict[str, StoredTensor] = {}
        if self.graph is None:
            archive = TorchArchive(path)
            self.code = "\n".join(archive.code.values())
            self.fields = dict(script_fields(archive.root))
            self._stored = {name: value for name, value in self.fields.items() if isinstance(value, StoredTensor)}

    @classmethod
    def find_part(cls, folder: Path, name: str) -> ExportedPart | None:
        """Return the part called `name`, as ONNX or TorchScript. Returns None if the folder has no such file."""
        path = next((file for end in ("onnx", "ts") if (file := folder / f"{name}.{end}").is_file()), None)
        return None if path is None else cls(path)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors by the names that the file has for them."""
        tensors = self._stored if self.graph is None else self.graph.tensors
        return {name: tensor.shape for name, tensor in tensors.items()}

    def read(self, name: str) -> torch.Tensor:
        """Read a tensor by the file's name for it. Raises ConfigError if it is missing or cannot be read."""
        if name not in self.shapes:
            raise ConfigError(f"{self.path} has no tensor {name}, which its graph reads")
        if self.graph is not None:
            return self.graph.tensors[name].read()
        stored = self._stored[name]
        if stored.dtype_name not in _SCRIPT_DTYPES:
            raise ConfigError(f"{self.path}: {name} is stored as {stored.dtype_name}, which weights must not be")
        size = torch.Size(stored.shape).numel() * _SCRIPT_DTYPES[stored.dtype_name].itemsize
        with self.path.open("rb") as file:
            file.seek(stored.offset)
            content = bytearray(file.read(size))
        if len(content) < size:
            raise ConfigError(f"{self.path} has become shorter while it is read")
        return torch.frombuffer(content, dtype=_SCRIPT_DTYPES[stored.dtype_name]).view(stored.shape)

    def linear(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weight [outputs, inputs] and bias of the only linear layer or convolution of width 1.

        Raises ConfigError if the network has no such layer, or several.
        """
        if self.graph is None:
            matrices = [name for name, shape in self.shapes.items() if len(shape) > 1]
            vectors = [name for name, shape in self.shapes.items() if len(shape) == 1]
            num_linears = len(matrices) if len(vectors) == 1 else 0
            weight = self.read(matrices[0]) if num_linears == 1 else None
            bias = self.read(vectors[0]) if num_linears == 1 else None
        else:
            nodes = list(self.linear_nodes())
            num_linears = len(nodes)
            weight = self.linear_weight(nodes[0]) if num_linears == 1 else None
            bias_name = self.bias_name(nodes[0]) if num_linears == 1 else None
            bias = None if bias_name is None else self.read(bias_name)
        if weight is None or bias is None:
            raise ConfigError(f"{self.path} must have one linear layer with a bias; it has {num_linears}")
        if weight.dim() > 2 and weight.shape[2:].numel() == 1:
            weight = weight.flatten(1)
        if weight.dim() != 2 or bias.shape != weight.shape[:1]:
            raise ConfigError(f"{self.path}: a weight of shape {list(weight.shape)} has a bias of {list(bias.shape)}")
        return weight, bias

    def linear_nodes(self) -> Iterator[OnnxNode]:
        """Yield the nodes of linear layers and convolutions, which multiply by a tensor of the file."""
        assert self.graph is not None
        for node in self.graph.nodes:
            if node.op in _LINEAR_OPS and len(node.inputs) > 1 and node.inputs[1] in self.graph.tensors:
                yield node

    def linear_weight(self, node: OnnxNode) -> torch.Tensor:
        """Return the weight of a linear node in torch's layout."""
        weight = self.read(node.inputs[1])
        is_transposed = node.op == "MatMul" or (node.op == "Gemm" and not node.integers.get("transB", 0))
        return weight.T.contiguous() if is_transposed and weight.dim() == 2 else weight

    def bias_name(self, node: OnnxNode) -> str | None:
        """Return the name of the tensor that is added to the output of a linear node, or None if there is no bias."""
        assert self.graph is not None
        if node.op != "MatMul":
            return node.inputs[2] if len(node.inputs) > 2 else None
        for user in self.graph.users(node.outputs[0]):
            other_inputs = [name for name in user.inputs if name != node.outputs[0]]
            if user.op == "Add" and len(other_inputs) == 1 and other_inputs[0] in self.graph.tensors:
                return other_inputs[0]
        return None

    def embedding(self) -> torch.Tensor:
        """Return the weight of the only embedding, [rows, size].

        Raises ConfigError if there is no embedding, or several.
        """
        if self.graph is None:
            names = [name for name in self.shapes if "lstm" not in name and len(self.shapes[name]) == 2]
        else:
            read = [node.inputs[0] for node in self.graph.nodes if node.op == "Gather" and node.inputs]
            names = [name for name in dict.fromkeys(read) if len(self.shapes.get(name, ())) == 2]
        if len(names) != 1:
            raise ConfigError(f"{self.path} must have one embedding; it has {len(names)}")
        return self.read(names[0])

    def lstm(self) -> dict[str, torch.Tensor]:
        """Return the weights of the only LSTM by torch's names: weight_ih_l0 and so on.

        Raises ConfigError if there is no LSTM, or if the LSTM has two directions or peepholes.
        """
        named_weights = {name.rpartition(".")[2]: name for name in self.shapes if "_ih_l" in name or "_hh_l" in name}
        if named_weights:
            return {name: self.read(full_name) for name, full_name in sorted(named_weights.items())}
        nodes = [] if self.graph is None else [node for node in self.graph.nodes if node.op == "LSTM"]
        if not nodes:
            raise ConfigError(f"{self.path} must have an LSTM; it has none")
        weights: dict[str, torch.Tensor] = {}
        for layer, node in enumerate(nodes):
            names = dict(zip(("ih", "hh", "bias"), node.inputs[1:4], strict=False))
            missing = [name for name in names.values() if name not in self.shapes]
            is_plain = node.texts.get("direction", "forward") == "forward" and not node.integers.get("layout", 0)
            if missing or len(names) < 3 or any(node.inputs[7:]) or not is_plain:
                reason = f"its weight {missing[0]!r} is computed" if missing else "it is not a plain one with biases"
                raise ConfigError(f"{self.path}: the LSTM {node.name or layer} cannot be read: {reason}")
            for kind in ("ih", "hh"):
                weights[f"weight_{kind}_l{layer}"] = self._order_gates(names[kind], 1)
            biases = self._order_gates(names["bias"], 2)
            weights[f"bias_ih_l{layer}"], weights[f"bias_hh_l{layer}"] = biases.chunk(2)
        return weights

    def _order_gates(self, name: str, parts: int) -> torch.Tensor:
        """Read a tensor [1, parts * 4 * size, ...] and order the gates of each part as torch has them."""
        values = self.read(name)
        if values.dim() < 2 or not values.numel() or values.shape[0] != 1 or values.shape[1] % (4 * parts):
            raise ConfigError(
                f"{self.path}: {name} has shape {list(values.shape)}; an LSTM of one direction has others"
            )
        gates: torch.Tensor = values[0].unflatten(0, (parts, 4, -1))
        return gates[:, list(_GATE_ORDER)].flatten(0, 2)
