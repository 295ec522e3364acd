"""Temporary memory of loading and of random weights is small, and is given back before anything else is allocated."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_tools import write_model
from safetensors.torch import save_file
from small_config import SMALL
from test_gguf import BLOCKS_OF_256, reference_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meltcore.engine.worker import loading
from meltcore.layers.tensor_parallel import TensorParallelGroup
from meltcore.layers.weight_loader import ConvertingLoader, ShardLoader, split_rows
from meltcore.models import loader
from meltcore.models.checkpoints import gguf_weights, tensor_parts
from meltcore.models.checkpoints.checkpoint import Checkpoint, open_checkpoint
from meltcore.models.decoders.model import Model
from meltcore.models.loader import build_model, fill_dummy_weights, load_weights
from meltcore.settings.config import EngineConfig, Quantization

CPU = torch.device("cpu")
PART_BYTES = 2**14  # in place of 32 MiB
# Of one tensor, where parts are converted: 64 MiB for 32 MiB.
LARGEST_BYTES = 2 * PART_BYTES
DENSE = SMALL | {"tie_word_embeddings": True, "vocab_size": 4096, "intermediate_size": 64}


class Allocations(TorchDispatchMode):
    """Counts the bytes of new storages on the CPU."""

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        known = self._known | {each.untyped_storage().data_ptr() for each in inputs if each.device == CPU}
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and each.device == CPU and each.untyped_storage().data_ptr() not in known:
                self.sizes.append(each.untyped_storage().nbytes())
        return result


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (loader, tensor_parts):
        monkeypatch.setattr(module, "PART_BYTES", PART_BYTES)
    monkeypatch.setattr(gguf_weights, "_PART_VALUES", PART_BYTES // 4)


def dense_folder(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(DENSE))
    return folder


def gguf_checkpoint(folder: Path, family: str) -> Checkpoint:
    file = write_model(folder / "model.gguf", reference_of(family, **BLOCKS_OF_256), "Q4_0 and Q8_0")
    return open_checkpoint(str(file), files="all")


def largest_temporary(model: Model, work: Any) -> int:
    with Allocations(model.parameters()) as allocations:
        work()
    return max(allocations.sizes)


@pytest.mark.parametrize("group", [None, TensorParallelGroup(1, 2)])
@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_random_weights_are_drawn_in_small_parts(
    tmp_path: Path, quantization: Quantization, group: TensorParallelGroup | None
) -> None:
    checkpoint = open_checkpoint(str(dense_folder(tmp_path)), files="config")
    model = build_model(checkpoint, torch.float32, CPU, quantization, group)
    assert max(weight.nbytes for weight in model.parameters()) >= 8 * LARGEST_BYTES
    for weight in model.parameters():
        weight.fill_(float("nan"))
    assert largest_temporary(model, lambda: fill_dummy_weights(model, checkpoint, 3)) <= LARGEST_BYTES
    assert all(weight.float().isfinite().all() for weight in model.parameters()), "every row is filled"
    embedding = model.get_parameter("embedding.weight.values")
    assert embedding.std() == pytest.approx(loader.DUMMY_WEIGHT_STD, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_blocks_of_a_file_are_drawn_and_read_in_small_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, quantization: Quantization
) -> None:
    checkpoint = gguf_checkpoint(tmp_path, family)
    in_parts = build_model(checkpoint, torch.float32, CPU, quantization)
    assert largest_temporary(in_parts, lambda: fill_dummy_weights(in_parts, checkpoint, 3)) <= LARGEST_BYTES
    assert largest_temporary(in_parts, lambda: load_weights(in_parts, checkpoint, lambda *_: None)) <= LARGEST_BYTES
    monkeypatch.undo()
    whole = build_model(checkpoint, torch.float32, CPU, quantization)
    assert largest_temporary(whole, lambda: load_weights(whole, checkpoint, lambda *_: None)) > LARGEST_BYTES
    for part, expected in zip(in_parts.parameters(), whole.parameters(), strict=True):
        assert torch.equal(part.view(torch.uint8), expected.view(torch.uint8))


def test_ranks_draw_the_same_parts(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(dense_folder(tmp_path)), files="config")
    models = [build_model(checkpoint, torch.float32, CPU)]
    models += [build_model(checkpoint, torch.float32, CPU, group=TensorParallelGroup(rank, 2)) for rank in range(2)]
    for model in models:
        fill_dummy_weights(model, checkpoint, 3)
    whole, *parts = (model.get_parameter("embedding.weight.values") for model in models)
    assert torch.equal(whole, torch.cat(parts))


def test_parts_of_a_sharded_tensor_are_its_rows() -> None:
    source, kept = torch.arange(40.0).view(10, 4), torch.zeros(5, 2)
    target = ShardLoader(source.shape, (((slice(1, 3), slice(2, 4)), kept[:2]), ((slice(6, 9), slice(2, 4)), kept[2:])))
    for rows, part in split_rows(target, 4):
        assert part.shape == (len(rows), 4)
        part.copy_(source[rows.start : rows.stop])
    assert torch.equal(kept, source[[1, 2, 6, 7, 8], 2:])
    whole = ShardLoader(source.shape, (((slice(0, 9),), ConvertingLoader(torch.Size((9, 4)), print)),))
    assert [part for _, part in split_rows(whole, 4)] == [whole]


def test_building_a_model_allocates_its_weights_alone(tmp_path: Path) -> None:
    """A tied embedding is not allocated twice: in a pool of memory nothing else can have its place."""
    checkpoint = open_checkpoint(str(dense_folder(tmp_path)), files="config")
    with Allocations() as allocations:
        model = build_model(checkpoint, torch.float32, CPU)
    assert sum(allocations.sizes) == sum(weight.nbytes for weight in model.parameters())


@pytest.mark.parametrize("load_format", ["dummy", "auto"])
def test_cached_memory_is_freed_before_other_tensors_are_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load_format: Any
) -> None:
    checkpoint = open_checkpoint(str(dense_folder(tmp_path)), files="config")
    weights = build_model(checkpoint, torch.float32, CPU).checkpoint_tensors()
    save_file({name: torch.randn(tensor.shape) for name, tensor in weights.items()}, tmp_path / "model.safetensors")
    events: list[str] = []

    def record(owner: Any, name: str) -> None:
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: (events.append(name), function(*args))[1])

    for name in ("fill_weights", "free_cached_memory", "_plan_memory"):
        record(loading, name)
    record(type(build_model(checkpoint, torch.float32, CPU)), "prepare")
    config = EngineConfig(model=str(tmp_path), load_format=load_format, max_model_len=64, memory_bytes=2**28)
    loading.load(config, open_checkpoint(str(tmp_path), files="all"), CPU, lambda *_: None)
    assert events == [
        "_plan_memory",
        "fill_weights",
        "free_cached_memory",
        "prepare",
        "free_cached_memory",
        "_plan_memory",
    ]
