"""From a checkpoint folder to a model with its weights on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from meltcore.config import Quantization
from meltcore.errors import ConfigError
from meltcore.layers.destination import Destination
from meltcore.layers.group import Group
from meltcore.layers.pieces import Pieces
from meltcore.models.checkpoint import Checkpoint
from meltcore.models.decoder import Decoder
from meltcore.models.quantization import hold_in_fp8
from meltcore.models.qwen2 import Qwen2
from meltcore.models.qwen3 import Qwen3
from meltcore.models.qwen3_5 import Qwen3_5
from meltcore.models.qwen3_moe import Qwen3Moe

Progress = Callable[[str, float], None]
ARCHITECTURES: dict[str, Callable[[Mapping[str, Any]], Decoder]] = {
    "Qwen2ForCausalLM": Qwen2,
    "Qwen3ForCausalLM": Qwen3,
    "Qwen3_5MoeForCausalLM": Qwen3_5,
    "Qwen3_5MoeForConditionalGeneration": Qwen3_5,
    "Qwen3MoeForCausalLM": Qwen3Moe,
}
# The spread that published models are initialised with (initializer_range in their configurations).
DUMMY_WEIGHT_STD = 0.02
_NAMES_SHOWN = 5


def build_model(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization = "none",
    group: Group | None = None,
) -> Decoder:
    """The network that config.json names, its weights allocated on `device` and not yet filled.

    With a group it is one rank's share of it. Raises ConfigError for an architecture that we do not have, or that
    cannot be quantised or shared out as asked.
    """
    names = checkpoint.config.get("architectures") or []
    known = [name for name in names if name in ARCHITECTURES]
    if not known:
        asked = ", ".join(names) or "nothing"
        raise ConfigError(f"{checkpoint.name}: config.json names {asked}; we have {', '.join(ARCHITECTURES)}")
    with torch.device("meta"), _default_dtype(dtype):
        model = ARCHITECTURES[known[0]](checkpoint.config)
        if group is not None:
            model.divide(group)
        if quantization == "fp8":
            if model.config.experts is not None:
                raise ConfigError(f"--quantization fp8 does not compute routed experts, which {checkpoint.name} has")
            hold_in_fp8(model, device)
    return model.to_empty(device=device)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """What is allocated has this type unless it names another: so some things stay float32 in any model."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def load_weights(model: Decoder, checkpoint: Checkpoint, progress: Progress) -> None:
    """Copy every tensor of the safetensors shards into the model, converting types on the way.

    Of a tensor that is shared out among ranks only our part is read.

    Raises ConfigError naming the missing, unexpected or mis-shaped tensors, or the unreadable shard.
    """
    files = checkpoint.weight_files
    if not files:
        raise ConfigError(f"{checkpoint.folder} holds no *.safetensors files (--load-format dummy needs none)")
    table, fused = model.checkpoint_tensors(), model.fused_tensors()
    missing = set(table)
    unexpected: list[str] = []
    for number, path in enumerate(files):
        try:
            with safe_open(path, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118 - not a mapping, it has no __iter__
                    if name in table:
                        _copy(shard, name, table[name], path.name)
                        missing.discard(name)
                    elif name in fused:
                        _copy(shard, name, fused[name].tensor, path.name)
                        missing.difference_update(fused[name].stands_for)
                    elif not model.ignored_tensor(name):
                        unexpected.append(name)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        progress("loading weights", (number + 1) / len(files))
    problems = [_listed("missing", sorted(missing)), _listed("unexpected", sorted(unexpected))]
    if any(problems):
        raise ConfigError(f"{checkpoint.folder}: {'; '.join(filter(None, problems))}")


def fill_dummy_weights(model: Decoder, seed: int) -> None:
    """Random weights of the configured shapes: the speed of the real ones, and answers that mean nothing.

    Ranks draw the whole of a tensor and keep their part, so that together they hold the same weights as one alone.
    """
    generator = torch.Generator(device=model.embedding.device).manual_seed(seed)
    for name, target in model.checkpoint_tensors().items():
        values = torch.empty(target.shape, dtype=model.embedding.dtype, device=model.embedding.device)
        if values.dim() == 1:
            target.copy_(values.fill_(0.0 if name.endswith(".bias") else 1.0))
        else:
            target.copy_(values.normal_(0.0, DUMMY_WEIGHT_STD, generator=generator))


def _copy(shard: Any, name: str, target: Destination, file: str) -> None:
    in_file = shard.get_slice(name)  # nothing of it is read yet
    shape = in_file.get_shape()
    if shape != list(target.shape):
        raise ConfigError(f"{file}: {name} has shape {shape}; the configuration asks for {list(target.shape)}")
    if isinstance(target, Pieces):
        target.copy_(in_file)
    else:
        target.copy_(shard.get_tensor(name))


def _listed(word: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return f"{len(names)} {word} tensors: {', '.join(names[:_NAMES_SHOWN])}{more}"
