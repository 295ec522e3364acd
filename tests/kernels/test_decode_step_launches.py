"""How many kernels a decode step launches, by the code that serves it, on tensors without memory.

Qwen3.5-35B-A3B at its own size; Gemma 3 and a GGUF file with few layers.
"""

from __future__ import annotations

import collections
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from compile_tools import AbsentGPU
from random_gguf import layout, new_writer, text_config, write_header
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from meltcore.engine.distributed.group_runner import GroupRunner
from meltcore.engine.memory.graph_sizes import capture_sizes
from meltcore.engine.worker.caches import ModelRunnerConfig
from meltcore.engine.worker.model_runner import ModelRunner
from meltcore.engine.worker.sampler import Sampler
from meltcore.kernels.comm.symmetric_memory import SymmetricMemory
from meltcore.kernels.launch import force_implementation
from meltcore.layers.tensor_parallel import TensorParallelGroup
from meltcore.models.checkpoints.checkpoint import Checkpoint, open_checkpoint
from meltcore.models.loader import build_model

MODEL = "Qwen/Qwen3.5-35B-A3B"
MOST = 400  # up to 32 sequences
META = torch.device("meta")
# Of torch's operations those that launch nothing on a GPU: memory and views.
FREE = {"empty", "empty_strided", "new_empty", "new_empty_strided", "empty_like", "detach", "lift_fresh"}


class TorchKernels(TorchDispatchMode):
    """Counts operations that compute, each as one kernel."""

    def __init__(self, launched: collections.Counter[str]) -> None:
        super().__init__()
        self._launched = launched

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name not in FREE and not func.is_view:
            self._launched[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[collections.Counter[str]]:
    """Names of what is launched, as on an H200; nothing runs."""
    counts: collections.Counter[str] = collections.Counter()

    def count(function: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        counts[function.__name__] += 1

    monkeypatch.setattr(JITFunction, "run", count)
    monkeypatch.setattr(triton.runtime.driver, "_active", AbsentGPU(90))
    force_implementation("triton")
    yield counts
    force_implementation(None)


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    model = build_model(open_checkpoint(MODEL, files="config"), torch.bfloat16, META)
    model.prepare(4096)
    return ModelRunner(
        model,
        Sampler(model.config.vocab_size, META, 0),
        ModelRunnerConfig(64, 8, 1024, 4096, 8192, 1024),
        torch.bfloat16,
    )


def step(runner: ModelRunner, sequences: int, launched: collections.Counter[str]) -> None:
    """What a decode step launches, without what is made once."""
    indices = torch.zeros(sequences, dtype=torch.int64, device=META)
    runner._decode_step(indices, indices)
    launched.clear()
    with TorchKernels(launched):
        runner._decode_step(indices, indices)


@pytest.mark.slow
@pytest.mark.parametrize("sequences", [size for size in capture_sizes(1024) if size <= 32])
def test_decode_step_has_fewer_than_400_kernels(
    sequences: int, runner: ModelRunner, launched: collections.Counter[str]
) -> None:
    step(runner, sequences, launched)
    assert launched.total() < MOST, launched


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sequences", "kernels"),
    [(1, 337), (16, 337), (20, 377), (32, 377), (33, 417), (128, 417), (144, 457), (896, 457), (1024, 537)],
)
def test_decode_step_has_the_documented_number_of_kernels(
    sequences: int, kernels: int, runner: ModelRunner, launched: collections.Counter[str]
) -> None:
    step(runner, sequences, launched)
    assert launched.total() == kernels, launched


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "sequences", "kernels"),
    [(2, 1, 381), (2, 16, 381), (2, 32, 421), (2, 33, 421), (8, 1, 381), (8, 2, 381), (8, 33, 421), (8, 256, 461)],
)
def test_decode_step_of_a_rank_has_the_documented_number_of_kernels(
    ranks: int, sequences: int, kernels: int, launched: collections.Counter[str]
) -> None:
    """An all-reduce follows attention and experts; one of the two is a launch that one GPU does not have."""
    step(rank_runner(ranks), sequences, launched)
    assert launched.total() == kernels, launched


@functools.cache
def rank_runner(ranks: int) -> ModelRunner:
    group = TensorParallelGroup(0, ranks)
    pointers, steps = (torch.empty(size, dtype=torch.int64, device=META) for size in (ranks + 1, 512))
    group.symmetric_memory = SymmetricMemory(pointers, steps, steps, 0, steps)
    model = build_model(open_checkpoint(MODEL, files="config"), torch.bfloat16, META, group=group)
    model.prepare(4096)
    layout = ModelRunnerConfig(64, 8, 1024, 4096, 8192, 1024)
    return GroupRunner(model, Sampler(model.config.vocab_size, META, 0), layout, torch.bfloat16, group)


@pytest.mark.parametrize(("sequences", "placing"), [(2, 0), (16, 0), (17, 1), (33, 1)])
def test_pairs_are_grouped_for_many_tokens_only(
    sequences: int, placing: int, runner: ModelRunner, launched: collections.Counter[str]
) -> None:
    """A layer of routed experts is five launches, and one more with alignment."""
    step(runner, sequences, launched)
    layers = runner.model.config.num_hidden_layers
    names = (
        "_router_kernel",
        "_select_experts_kernel",
        "_moe_align_few_kernel",
        "_moe_grouped_gemm_kernel",
        "_moe_combine_kernel",
    )
    assert [launched[name] / layers for name in names] == [sequences <= 32, 1, placing, 2, 1]


def test_layer_of_routed_experts_is_five_launches_for_one_token(
    runner: ModelRunner, launched: collections.Counter[str]
) -> None:
    step(runner, 1, launched)
    layers = runner.model.config.num_hidden_layers
    names = (
        "_router_kernel",
        "_select_experts_kernel",
        "_moe_gate_up_gemv_kernel",
        "_moe_down_gemv_kernel",
        "_moe_grouped_gemm_kernel",
    )
    assert [launched[name] / layers for name in names] == [0, 1, 1, 1, 0]
    assert launched["_rms_norm_kernel"] == layers + 1
    # Gated DeltaNet and attention have two each, the router one, the head one.
    assert launched["_gemv_kernel"] == 3 * layers + 1


SHORT = {"num_hidden_layers": 6, "vocab_size": 1024, "bos_token_id": 1022, "eos_token_id": 1023}


def dense_runner(model: str, file_type: str, folder: Path) -> ModelRunner:
    """A network of a published shape and 6 layers. file_type: of a GGUF file without its weights; empty for BF16."""
    config = text_config(model) | SHORT
    checkpoint = Checkpoint(model, folder, config, {})
    if file_type:
        path = folder / "model.gguf"
        sizes, tensors = layout(config, file_type, None)
        write_header(new_writer(path, config, sizes, file_type), tensors)
        os.truncate(path, path.stat().st_size + sum(tensor.num_bytes + 64 for tensor in tensors))  # a hole
        checkpoint = open_checkpoint(str(path), files="all")
    network = build_model(checkpoint, torch.bfloat16, META)
    network.prepare(4096)
    return ModelRunner(
        network,
        Sampler(network.config.vocab_size, META, 0),
        ModelRunnerConfig(64, 8, 1024, 4096, 8192, 1024),
        torch.bfloat16,
    )


@pytest.mark.parametrize("sequences", [1, 64])
@pytest.mark.parametrize(
    ("model", "file_type", "per_layer", "outside"),
    [
        ("google/gemma-3-27b-it", "", 8, 7),  # 4 GEMMs, 2 norms with addition, attention, GELU
        ("google/gemma-3-27b-it", "q4_0", 8, 7),
        ("Qwen/Qwen3-0.6B", "q8_0", 7, 7),  # 4 GEMMs, the second with SiLU; 2 norms, attention
    ],
)
def test_dense_decode_step_has_as_many_kernels_as_its_layers_need(
    model: str,
    file_type: str,
    per_layer: int,
    outside: int,
    sequences: int,
    tmp_path: Path,
    launched: collections.Counter[str],
) -> None:
    """No weight is dequantized beside its GEMM, and no addition has a launch of its own."""
    step(dense_runner(model, file_type, tmp_path), sequences, launched)
    assert launched.total() == 6 * per_layer + outside, launched
    assert launched["_ggml_gemm_kernel"] >= (24 if file_type else 0)
