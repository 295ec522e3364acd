"""Writes a checkpoint as a folder in the FP8 layout of compressed-tensors, as llm-compressor does.

Every matrix of attention, Gated DeltaNet, feed-forwards and experts becomes `weight` in e4m3 and `weight_scale`, one
float32 per output channel. Embedding, output head, routers and the step sizes and decays of a recurrence keep their
type, and so does the layer for multi-token prediction. Activations are quantized per token when the folder is served.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from meltcore.common.errors import ConfigError
from meltcore.common.files import atomic_output, check_disk_space, write_atomic
from meltcore.kernels.fp8.fp8 import FP8, FP8_MAX, quantize
from meltcore.models.checkpoints.checkpoint import Checkpoint, Progress
from meltcore.models.checkpoints.tensor_file import TensorFile
from meltcore.models.loader import build_meta_model
from meltcore.models.writers.rounding_loss import RoundingLoss
from meltcore.models.writers.source_tensors import SourceTensor, SourceTensors, open_tensors

_QUANTIZED = re.compile(r"\.(\w+_proj|in_proj_qkv|in_proj_z)\.weight$")
_MTP = r"re:mtp\."  # the modules of the layer for multi-token prediction, whose experts may be stacked
_LARGEST_VALUE = torch.finfo(torch.float32).max
_SHARD_BYTES = 2**30
_TEXT_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
    "vocab.json",
)


class _PlannedTensor(NamedTuple):
    """A tensor of the source and its name in the new folder. It gets scales if `is_quantized`.

    `source` is a tensor of the model, or the file that holds a tensor which the model does not read.
    """

    name: str
    source: SourceTensor | TensorFile
    shape: tuple[int, ...]
    num_bytes: int
    is_quantized: bool

    def tensors(self, rounding_loss: RoundingLoss) -> dict[str, torch.Tensor]:
        """Read the tensor. Returns the tensors that are stored for it, by name."""
        if isinstance(self.source, TensorFile):
            with safe_open(self.source.path, "pt") as file:
                return {self.name: file.get_tensor(self.name)}
        if not self.is_quantized:
            unquantized = self.source.read()
            self.source.check_largest(float(unquantized.abs().max()), _LARGEST_VALUE, "float32")
            return {self.name: unquantized}
        values, scales = torch.empty(self.shape, dtype=FP8), torch.empty(self.shape[0], 1)
        row = 0
        for part in self.source.parts():
            quantized = quantize(part.contiguous())
            self.source.check_largest(float(quantized.scales.max()) * FP8_MAX, _LARGEST_VALUE, "FP8")
            values[row : row + len(part)] = quantized.values
            scales[row : row + len(part), 0] = quantized.scales
            row += len(part)
            rounding_loss.add(part.float().numpy(), (quantized.values.float() * quantized.scales[:, None]).numpy())
        return {self.name: values, f"{self.name}_scale": scales}


def write_fp8(
    checkpoint: Checkpoint, path: Path, progress: Progress, *, overwrite: bool = False, allow_requantize: bool = False
) -> RoundingLoss:
    """Write the checkpoint as the folder `path`, with its tokenizer and chat template.

    Returns how much the values of the matrices were rounded. Raises ConfigError for a quantized checkpoint unless
    `allow_requantize`, and for an existing folder unless `overwrite`. Raises ConfigError also if the folder is the
    source, if the folder holds other files than a checkpoint, or if the disk is full.
    """
    if path.exists() and (not (path / "config.json").exists() or path.samefile(checkpoint.folder)):
        reason = "the source" if (path / "config.json").exists() else "no checkpoint folder"
        raise ConfigError(f"{path} is {reason}, so it is not replaced")
    rounding_loss = RoundingLoss()
    with (
        atomic_output(path, overwrite=overwrite) as folder,
        open_tensors(checkpoint, allow_requantize=allow_requantize) as source,
    ):
        planned = list(_plan(source))
        shards = _shards(planned)
        check_disk_space(path, sum(tensor.num_bytes for tensor in planned))
        config = source.checkpoint.config | {"quantization_config": _quantization_config(planned)}
        # Sizes that the format's kernels do not compute are refused now, and not when the folder is served.
        build_meta_model(source.checkpoint, torch.bfloat16, torch.device("meta"), "fp8")
        folder.mkdir()
        weight_map: dict[str, str] = {}
        total_bytes = 0
        for index, shard in enumerate(shards):
            file = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
            tensors: dict[str, torch.Tensor] = {}
            for tensor in shard:
                tensors |= tensor.tensors(rounding_loss)
                progress("quantizing", (len(weight_map) + len(tensors)) / _num_tensors(planned))
            save_file(tensors, folder / file, metadata={"format": "pt"})
            (folder / file).chmod(0o644)  # it is private otherwise
            weight_map |= dict.fromkeys(tensors, file)
            total_bytes += sum(each.nbytes for each in tensors.values())
        if len(shards) > 1:
            content = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
            _write_json(folder / "model.safetensors.index.json", content)
        _write_json(folder / "config.json", config)
        for name in _TEXT_FILES:
            if (checkpoint.folder / name).exists():
                shutil.copyfile(checkpoint.folder / name, folder / name)
    return rounding_loss


def _plan(source: SourceTensors) -> Iterator[_PlannedTensor]:
    """Yield the tensors of the new folder. Each expert of a merged tensor gets its usual name."""
    for published_name, tensor in source.tensors.items():
        name = published_name if tensor.is_merged else tensor.name
        is_quantized = len(tensor.shape) == 2 and _QUANTIZED.search(name) is not None
        num_values = math.prod(tensor.shape)
        num_bytes = num_values + 4 * tensor.shape[0] if is_quantized else num_values * tensor.dtype.itemsize
        yield _PlannedTensor(name, tensor, tensor.shape, num_bytes, is_quantized)
    for file, name in source.others:
        if name != "lm_head.weight":  # the copy of a tied head
            shape = file.entries[name].shape
            yield _PlannedTensor(name, file, shape, 4 * math.prod(shape), is_quantized=False)


def _num_tensors(planned: list[_PlannedTensor]) -> int:
    return sum(1 + tensor.is_quantized for tensor in planned)


def _shards(planned: list[_PlannedTensor]) -> list[list[_PlannedTensor]]:
    """Distribute the tensors over files of bounded size, which are written one by one from host memory."""
    shards: list[list[_PlannedTensor]] = [[]]
    num_bytes = 0
    for tensor in planned:
        if shards[-1] and num_bytes + tensor.num_bytes > _SHARD_BYTES:
            shards.append([])
            num_bytes = 0
        shards[-1].append(tensor)
        num_bytes += tensor.num_bytes
    return shards


def _quantization_config(planned: list[_PlannedTensor]) -> dict[str, Any]:
    """Return quantization_config of config.json. All linear layers that keep their type are listed by name."""
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
    inputs = weights | {"strategy": "token", "dynamic": True}
    unquantized_names = [tensor.name for tensor in planned if not tensor.is_quantized and len(tensor.shape) > 1]
    modules = {name.rpartition(".")[0] for name in unquantized_names if not name.endswith("embed_tokens.weight")}
    ignored = {_MTP if re.match(_MTP.removeprefix("re:"), module) else module for module in modules}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
        "ignore": sorted(ignored | {"lm_head"}),
        "kv_cache_scheme": None,
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_atomic(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())
