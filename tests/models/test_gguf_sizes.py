"""Bytes of a GGUF file's weights on each rank: what plans count is what ranks load, also where rows are padded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_tools import write_model
from test_gguf import reference_of

from meltcore.engine.memory.memory_needs import engine_needs
from meltcore.layers.tensor_parallel import TensorParallelGroup
from meltcore.models.checkpoints.checkpoint import open_checkpoint
from meltcore.models.loader import build_model, load_weights, matrix_dtypes
from meltcore.models.quantized.host_weights import host_weights, weight_bytes
from meltcore.settings.fleet_spec import ModelSection

CPU = torch.device("cpu")
# No part of a rank is a multiple of the 256 columns of a chunk, or of the 16 rows that a CPU packs.
PADDED: dict[str, Any] = {
    "hidden_size": 320,
    "intermediate_size": 576,
    "moe_intermediate_size": 192,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "num_hidden_layers": 2,
    "vocab_size": 308,
}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("family", "store"),
    [
        ("llama", "Q8_0"),
        ("llama", "Q4_0"),
        ("qwen2", "BF16"),
        ("qwen3_moe", "Q4_1"),
        ("olmo2", "Q5_0"),
        ("phi3", "Q5_1"),
        ("gemma3_text", "blocks of 32"),
    ],
)
def test_ranks_load_the_bytes_of_the_plan(tmp_path: Path, family: str, store: str, ranks: int) -> None:
    """On a CPU as it converts them, and as any device loads them."""
    sizes = PADDED | ({"hidden_size": 384, "head_dim": 24} if family == "phi3" else {})  # which rotates 3/4 of a head
    file = write_model(tmp_path / "model.gguf", reference_of(family, **sizes), store)
    checkpoint = open_checkpoint(str(file), files="all")
    section = ModelSection(checkpoint=str(file), device="cpu", tensor_parallel_size=ranks, max_model_len=64)
    for rank in range(ranks):
        group = TensorParallelGroup(rank, ranks) if ranks > 1 else None
        model = build_model(checkpoint, torch.float32, CPU, group=group)
        load_weights(model, checkpoint, lambda *_: None)
        loaded = ModelSection(checkpoint=str(file), dtype="float32", tensor_parallel_size=ranks, max_model_len=64)
        assert engine_needs(loaded).rows[0].size_bytes == weight_bytes(model)
        held = host_weights(model, matrix_dtypes(checkpoint))
        if held is not None:
            held.convert(lambda stage, part: None)
            assert held.total_bytes == weight_bytes(model)
        assert engine_needs(section, on_cpu=True).rows[0].size_bytes == weight_bytes(model)


@pytest.mark.parametrize("store", ["Q8_0", "Q4_0"])
def test_one_kv_head_is_on_every_rank(tmp_path: Path, store: str) -> None:
    """And a share of the whole file's bytes is too little for a rank."""
    sizes = PADDED | {"num_key_value_heads": 1, "num_attention_heads": 32, "intermediate_size": 640}
    file = write_model(tmp_path / "model.gguf", reference_of("llama", **sizes), store)
    checkpoint = open_checkpoint(str(file), files="all")
    needed = {}
    for ranks in (1, 2, 4):
        model = build_model(checkpoint, torch.float32, CPU, group=TensorParallelGroup(ranks - 1, ranks))
        section = ModelSection(checkpoint=str(file), dtype="float32", tensor_parallel_size=ranks, max_model_len=64)
        needed[ranks] = engine_needs(section).rows[0].size_bytes
        assert needed[ranks] == weight_bytes(model)
    assert needed[4] > needed[1] // 4
