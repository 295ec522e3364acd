"""Which reduction a group's shapes choose: kernels of one launch, of stages, or torch.distributed."""

from __future__ import annotations

import pytest
import torch

from meltcore.kernels.comm.symmetric_memory import SymmetricMemory
from meltcore.kernels.norm import Norm
from meltcore.layers import tensor_parallel
from meltcore.layers.tensor_parallel import TensorParallelGroup

META = torch.device("meta")
HIDDEN = 2048
KERNELS = (
    "all_reduce",
    "all_reduce_rms_norm",
    "combine_all_reduce_rms_norm",
    "staged_all_reduce_rms_norm",
    "staged_combine_all_reduce_rms_norm",
)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the reductions that are called."""
    names: list[str] = []

    def record(name: str, result: object) -> object:
        names.append(name)
        return result

    for name in KERNELS:
        monkeypatch.setattr(tensor_parallel, name, lambda values, *_, name=name: record(name, (values, values)))
    monkeypatch.setattr(tensor_parallel, "all_reduce", lambda values, *_: record("all_reduce", values))
    monkeypatch.setattr(tensor_parallel.dist, "all_reduce", lambda values: record("dist", values))
    monkeypatch.setattr(tensor_parallel, "combine", lambda outputs, weights: outputs[:: weights.shape[1]].contiguous())
    return names


def group(ranks: int, *, has_memory: bool = True) -> TensorParallelGroup:
    made = TensorParallelGroup(0, ranks)
    numbers = torch.empty(ranks + 1, dtype=torch.int64, device=META)
    made.symmetric_memory = SymmetricMemory(numbers, numbers, numbers, 0, numbers) if has_memory else None
    return made


def reduce(group: TensorParallelGroup, rows: int, size: int = HIDDEN) -> None:
    values = torch.empty(rows, size, dtype=torch.bfloat16, device=META)
    group.all_reduce_add_rms_norm(values.clone(), values, Norm(values[0], 1e-6))


def reduce_experts(group: TensorParallelGroup, rows: int, size: int = HIDDEN) -> None:
    residual = torch.empty(rows, size, dtype=torch.bfloat16, device=META)
    outputs, weights = residual.repeat_interleave(9, 0), torch.empty(rows, 9, device=META)
    group.combine_all_reduce_add_rms_norm(residual, outputs, weights, Norm(residual[0], 1e-6))


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(("rows", "stages"), [(1, ""), (256, ""), (257, "staged_"), (16384, "staged_")])
def test_messages_of_more_than_1_mib_are_reduced_in_stages(
    ranks: int, rows: int, stages: str, chosen: list[str]
) -> None:
    reduce(group(ranks), rows)
    reduce_experts(group(ranks), rows)
    assert chosen == [f"{stages}all_reduce_rms_norm", f"{stages}combine_all_reduce_rms_norm"]


def test_rows_that_no_program_of_one_launch_holds_are_reduced_without_their_norm(chosen: list[str]) -> None:
    for rows in (64, 128):  # less than 1 MiB, and more
        reduce(group(8), rows, 5120)
        reduce_experts(group(8), rows, 5120)
    assert chosen == ["all_reduce", "all_reduce", "staged_all_reduce_rms_norm", "staged_combine_all_reduce_rms_norm"]


def test_rows_without_alignment_are_left_to_torch(chosen: list[str]) -> None:
    reduce(group(2), 512, 2044)
    reduce_experts(group(2), 512, 2044)
    assert chosen == ["dist", "dist"]


def test_without_peer_memory_all_is_left_to_torch(chosen: list[str]) -> None:
    """With `--debug no-peer-memory`, and without peer access."""
    for rows in (1, 512):
        reduce(group(2, has_memory=False), rows)
        reduce_experts(group(2, has_memory=False), rows)
    assert chosen == ["dist"] * 4
